"""A page of HTML about plans, for design documents: the tables of `hybridkv plan`, and curves with their values.

Every figure comes from `plan` and `models`. The page has no script and loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridkv import __version__
from hybridkv.cli.html_charts import Line, Words, bar_chart, line_chart
from hybridkv.cli.html_parts import element, html_table, simple_table, text
from hybridkv.cli.page_style import STYLE
from hybridkv.cli.tables import compare_table, tables_of
from hybridkv.models import Compute
from hybridkv.plan import Plan
from hybridkv.plan.curves import Packing, by_packing, fits_by_length, lengths_between, request_lengths
from hybridkv.plan.gpus import GPUS, USABLE_RATIO, Gpu, GpuFit, fewest_gpus
from hybridkv.plan.report import layer_words, unknown_words
from hybridkv.units import format_bytes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_REQUEST_COUNTS = (1, 16, 64, 256)
_SHORT_REQUEST = 8192
_TICK_DISTANCE = 1.4
"""Lengths that are closer to the longest have no label on the axis."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model of the page."""

    plan: Plan
    compute: Compute | None
    """None if the config does not tell how many parameters there are."""
    fits: Sequence[GpuFit]

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.plan, self.compute)


def weight_bytes(plan: Plan, compute: Compute | None) -> int:
    """Bytes of the whole model's weights in its own dtype; 0 if they are not known."""
    return compute.total_parameters * plan.model.dtype.nbytes if compute is not None else 0


def plan_page(models: Sequence[PlannedModel], max_model_len: int, *, compare: bool = False) -> str:
    """The whole page. Several models are compared first, and so is one if `compare` is set."""
    names = ", ".join(one.plan.model.name for one in models)
    title = f"Cache plan: {names}"
    parts = [text("h1", title), text("p", _options(models[0].plan, max_model_len), class_="meta")]
    if compare or len(models) > 1:
        parts.append(html_table(compare_table([one.plan for one in models], max_model_len)))
    if len(models) > 1:
        links = (element("li", text("a", one.plan.model.name, href=f"#m{i}")) for i, one in enumerate(models))
        parts.append(element("nav", element("ul", "".join(links)), aria_label="Models"))
    parts += [_model_section(one, f"m{i}", max_model_len, has_heading=len(models) > 1) for i, one in enumerate(models)]
    parts.append(text("footer", f"Written by hybridkv {__version__}: hybridkv plan --html. Sizes are binary."))
    head = (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{text('title', title)}\n<style>{STYLE}</style>"
    )
    body = element("main", "\n".join(parts))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _options(plan: Plan, max_model_len: int) -> str:
    options = plan.options
    pack = "all" if options.attn_pack_size is None else str(options.attn_pack_size)
    return (
        f"{format_bytes(options.memory_bytes)} for the cache of one rank of TP {plan.model.tp}, blocks of "
        f"{options.block_tokens} tokens, attn_pack_size {pack}, rows of {options.row_layers} layers in order "
        f"{options.row_order}, requests of up to {max_model_len:,} tokens."
    )


def _model_section(one: PlannedModel, anchor: str, max_model_len: int, *, has_heading: bool) -> str:
    model = one.plan.model
    source = f"{model.model_type}, {layer_words(model)}, one rank of TP {model.tp}. Source: {model.source}"
    groups, facts, uniform = map(html_table, tables_of(one.plan, max_model_len))
    parts = [
        text("h2", model.name) if has_heading else "",
        text("p", source, class_="meta" if model.verified else "warn"),
        "" if model.has_record else text("p", f"{unknown_words(model)}.", class_="warn"),
        text("h3", "What it keeps, and how the memory is cut"),
        groups,
        facts,
        text("h3", "Requests that fit, by their length"),
        _length_figure(one.plan, anchor, max_model_len),
        uniform,
        text("h3", "Block size, by packing"),
        _packing_figure(one.plan, anchor, max_model_len),
        text("h3", "GPUs that hold it"),
        _gpu_figure(one, anchor, max_model_len),
    ]
    return element("section", "\n".join(parts), id=anchor, class_="model")


def _figure(title: str, chart: str) -> str:
    return element("figure", text("figcaption", title) + chart)


def _length_figure(plan: Plan, anchor: str, max_model_len: int) -> str:
    lengths = request_lengths(max_model_len)
    fits, fine = fits_by_length(plan, lengths), lengths_between(lengths)
    curves = fits_by_length(plan, fine)
    lines = [
        Line(name, list(zip(fine, curves[name], strict=True)), list(zip(lengths, counts, strict=True)))
        for name, counts in fits.items()
    ]
    title = f"Requests that fit at once in {format_bytes(plan.options.memory_bytes)}"
    says = f"Requests of {max_model_len:,} tokens that fit: "
    says += ", ".join(f"{counts[-1]:,} ({name})" for name, counts in fits.items()) + "."
    words = Words(
        f"{anchor}-length",
        title,
        f"{says} The table below has all values.",
        "length of each request (tokens)",
        "requests at once",
    )
    rows = [[f"{length:,}", *(f"{fits[name][i]:,}" for name in fits)] for i, length in enumerate(lengths)]
    ticks = [length for length in lengths if length == lengths[-1] or length * _TICK_DISTANCE <= lengths[-1]]
    note = (
        "Requests share nothing; each has its working state, if the model has states. A line ends where no request "
        "fits. Uniform: one page size for all layers, by the rules of vLLM 0.32."
    )
    return (
        text("p", says)
        + _figure(title, line_chart(words, lines, ticks))
        + simple_table("Requests that fit", ["tokens", *fits], rows)
        + text("p", note, class_="note")
    )


def _packing_figure(plan: Plan, anchor: str, max_model_len: int) -> str:
    packings = by_packing(plan)
    if not packings:
        return text("p", f"{plan.model.name} has no full-attention layers: there is nothing to pack.")
    block = plan.options.block_tokens
    bars = [("hybridkv, any N", float(block), f"{block:,}")]
    bars += [
        (f"uniform, N = {one.pack_size}", float(one.uniform.block_tokens or 0), _count(one.uniform.block_tokens))
        for one in packings
    ]
    title = "Tokens in a block, with N full-attention layers in a page (attn_pack_size)"
    says = "; ".join(f"{name}: {shown}" for name, _, shown in bars)
    words = Words(f"{anchor}-packing", title, f"{says}. The table below has all values.", "block size (tokens)", "")
    headers = ["N", "block (tokens)", "page", "padding", f"fit at {max_model_len:,}"]
    ours = ["hybridkv block", "hybridkv padding", "hybridkv fit"]
    rows = [_packing_row(one, max_model_len) for one in packings]
    return (
        text("p", "A prefix shorter than a block is never shared: smaller blocks share shorter prefixes.")
        + _figure(title, bar_chart(words, bars))
        + simple_table("Uniform pages, and hybridkv, by N", [*headers, *ours], rows)
    )


def _packing_row(one: Packing, max_model_len: int) -> list[str]:
    uniform, plan = one.uniform, one.plan
    row = [str(one.pack_size), _count(uniform.block_tokens), format_bytes(uniform.page_bytes)]
    row += [f"{uniform.padding_ratio:.2%}", f"{uniform.max_requests(max_model_len):,}"]
    if plan is None:
        return [*row, "-", "-", "0"]
    return [
        *row,
        f"{plan.options.block_tokens:,}",
        f"{plan.padding_ratio:.2%}",
        f"{plan.max_requests(max_model_len):,}",
    ]


def _gpu_figure(one: PlannedModel, anchor: str, max_model_len: int) -> str:
    counts = sorted({fit.num_gpus for fit in one.fits})
    held = {(fit.gpu, fit.num_gpus): fit.max_requests(max_model_len) for fit in one.fits}
    title = f"Requests of {max_model_len:,} tokens that GPUs hold beside the weights"
    rows = [[_gpu_name(gpu), *(_count(held[gpu, count] or None) for count in counts)] for gpu in GPUS]
    return (
        text("p", _weights_words(one), class_="words" if one.compute is not None else "warn")
        + (_figure(title, _gpu_chart(f"{anchor}-gpus", title, held, counts)) if any(held.values()) else "")
        + simple_table(
            f"Requests of {max_model_len:,} tokens, by number of GPUs", ["GPU memory", *map(str, counts)], rows
        )
        + _fewest_table(one.fits, max_model_len)
        + text("p", "-: none of these numbers of GPUs holds it. A line begins where one request fits.", class_="note")
    )


def _gpu_chart(name: str, title: str, held: Mapping[tuple[Gpu, int], int], counts: Sequence[int]) -> str:
    lines = []
    for gpu in reversed(GPUS):
        points = [(float(count), float(held[gpu, count])) for count in counts]
        lines.append(Line(_gpu_name(gpu), points, points))
    says = "One line for each size of GPU memory. The table below has all values."
    return line_chart(Words(name, title, says, "GPUs (tensor-parallel size)", "requests at once"), lines, counts)


def _fewest_table(fits: Sequence[GpuFit], max_model_len: int) -> str:
    lengths = sorted({min(_SHORT_REQUEST, max_model_len), max_model_len})
    rows = [
        [f"{count} x {length:,} tokens", *(_count(fewest_gpus(fits, gpu, count, length)) for gpu in GPUS)]
        for length in lengths
        for count in _REQUEST_COUNTS
    ]
    return simple_table(
        "Fewest GPUs for so many requests at once",
        ["requests", *(format_bytes(gpu.memory_bytes) for gpu in GPUS)],
        rows,
    )


def _weights_words(one: PlannedModel) -> str:
    room = f"Of each GPU's memory {USABLE_RATIO:.0%} are used; activations, graphs and the driver have the rest."
    if one.compute is None:
        return f"The config does not tell how many parameters there are: the figures are of the cache alone. {room}"
    whose = "counted from the config" if one.compute.source == "config" else "taken from the model's name"
    without = "norms, biases and MTP layers" if one.plan.model.num_mtp_layers else "norms and biases"
    return (
        f"Weights: {one.compute.total_parameters / 1e9:,.1f} billion parameters, {whose} (the language model without "
        f"{without}), take {format_bytes(one.weight_bytes)} in {one.plan.model.dtype}, split evenly over the "
        f"GPUs. Quantized weights take less. {room}"
    )


def _gpu_name(gpu: Gpu) -> str:
    return f"{format_bytes(gpu.memory_bytes)} ({gpu.example})"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
