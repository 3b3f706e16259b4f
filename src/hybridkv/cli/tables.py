"""Plans as tables that people like to read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hybridkv.plan import GroupPlan, Plan, uniform_plan
from hybridkv.plan.curves import uniform_layouts
from hybridkv.plan.report import checkpoint_tokens, layer_words, unknown_words
from hybridkv.spec import DType, HiddenTap, LayerSpec, LinearState
from hybridkv.units import format_bytes

_PLAIN_WIDTH = 120


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the entry point knows what to do


def write(text: str, end: str = "\n") -> None:
    """Print a line of plain text."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise BrokenPipeError from None  # without its errno: the parser would make an exit code of it


def console() -> Console:
    """As wide as the terminal; files and pipes get a fixed width so that nothing is cut."""
    probe = _Console()
    return probe if probe.is_terminal else _Console(width=_PLAIN_WIDTH)


def plan_tables(plan: Plan, max_model_len: int) -> Group:
    """The plan of one model: what it keeps, how the arena is cut, and what a uniform page would cost."""
    return Group(_heading(plan), *tables_of(plan, max_model_len), "")


def tables_of(plan: Plan, max_model_len: int) -> tuple[Table, Table, Table]:
    """Groups; memory of one rank; our blocks beside those of one uniform page size."""
    return _groups_table(plan), _facts_table(plan, max_model_len), _uniform_table(plan, max_model_len)


def compare_table(plans: Sequence[Plan], max_model_len: int) -> Table:
    """One line a model."""
    options = plans[0].options
    table = Table(
        title=f"{format_bytes(options.memory_bytes)} a rank, blocks of {options.block_tokens} tokens, "
        f"requests of {max_model_len:,} tokens; uniform: one page size for all layers",
        title_justify="left",
    )
    table.add_column("model")
    headers = ("TP", "KV / token", "checkpoint", "= tokens", "padding", "requests", "uniform block", "uniform requests")
    for header in headers:
        table.add_column(header, justify="right")
    for plan in plans:
        model, uniform = plan.model, uniform_plan(plan.model, options.memory_bytes)
        checkpoint = model.checkpoint_bytes(options.block_tokens)
        table.add_row(
            Text(model.name + ("" if model.verified else " *") + ("" if model.has_record else " **")),
            str(model.tp),
            format_bytes(model.kv_bytes_per_token) if model.kv_bytes_per_token else "-",
            format_bytes(checkpoint) if checkpoint else "-",
            _count(checkpoint_tokens(plan) if checkpoint else None),
            f"{plan.padding_ratio:.2%}",
            _count(plan.max_requests(max_model_len)),
            _count(uniform.block_tokens),
            _count(uniform.max_requests(max_model_len)),
        )
    captions = []
    if not all(plan.model.verified for plan in plans):
        captions.append("* unverified: no config in the transformers source to check it against")
    captions += [f"** {words}" for words in dict.fromkeys(unknown_words(plan.model) for plan in plans) if words]
    table.caption = "\n".join(captions) or None
    return table


def _heading(plan: Plan) -> Text:
    model = plan.model
    text = Text()
    text.append(model.name, style="bold")
    text.append(f"  {model.model_type}, {layer_words(model)}, one rank of TP {model.tp}\n")
    text.append(f"{model.source}\n", style="" if model.verified else "yellow")
    if not model.has_record:
        text.append(f"{unknown_words(model)}\n", style="yellow")
    return text


def _groups_table(plan: Plan) -> Table:
    table = Table(title="Groups", title_justify="left")
    table.add_column("group")
    table.add_column("kind")
    table.add_column("layers")
    table.add_column("dtype")
    for header in ("page", "a token", "pages a slab", "rows", "largest row", "padding"):
        table.add_column(header, justify="right")
    for group in plan.groups:
        cut = f" x {group.layout.pages}" if group.layout.pages > 1 else ""
        table.add_row(
            group.name,
            group.kind.replace("_", " "),
            _layer_list(group.layers),
            _dtypes(group.specs),
            format_bytes(group.page_bytes) + cut,
            format_bytes(sum(spec.nbytes for spec in group.specs)) if _counts_tokens(group) else "-",
            _count(group.pages_per_slab),
            _count(len(group.rows)),
            format_bytes(max(row.nbytes for row in group.rows)),
            f"{group.padding_ratio:.2%}",
        )
    return table


def _facts_table(plan: Plan, max_model_len: int) -> Table:
    model, options = plan.model, plan.options
    table = Table(title="Memory of one rank", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    table.add_column("remark")
    table.add_row(
        "arena", format_bytes(plan.arena_bytes), f"{plan.num_slabs:,} slabs of {format_bytes(plan.slab_bytes)}"
    )
    table.add_row("padding", f"{plan.padding_ratio:.2%}", "at most, whatever the arena is filled with")
    if model.kv_bytes_per_token:
        table.add_row("KV a token", format_bytes(model.kv_bytes_per_token), "what each further token adds for good")
    if model.local_bytes_per_token:
        table.add_row("window KV a token", format_bytes(model.local_bytes_per_token), "while it is in the window")
    if model.state_bytes:
        table.add_row("state", format_bytes(model.state_bytes), "one for each running request")
    checkpoint = model.checkpoint_bytes(options.block_tokens)
    if checkpoint:
        tokens = checkpoint_tokens(plan)
        remark = "what it takes to resume besides full-attention KV"
        table.add_row(
            "checkpoint", format_bytes(checkpoint), remark + (f"; weighs {tokens:,} tokens" if tokens else "")
        )
    taps = [group for group in plan.groups if isinstance(group.specs[0], HiddenTap)]
    if taps:
        table.add_row("tap page", format_bytes(taps[0].page_bytes), "one layer of one block, for requests that ask")
    fits = plan.max_requests(max_model_len)
    remark = f"of {max_model_len:,} tokens, {format_bytes(plan.request_bytes(max_model_len))} each"
    table.add_row(
        "requests that fit", f"{fits:,}", remark + ("" if fits else ": give more --memory or a shorter --max-model-len")
    )
    return table


def _uniform_table(plan: Plan, max_model_len: int) -> Table:
    """Our blocks beside those of an engine with one page size, for short and long requests."""
    lengths = sorted({length for length in (1024, 8192) if length < max_model_len} | {max_model_len})
    table = Table(title="Beside one uniform page size for all layers", title_justify="left")
    table.add_column("")
    table.add_column("block", justify="right")
    table.add_column("padding", justify="right")
    for length in lengths:
        table.add_column(f"fit at {length:,}", justify="right")
    table.add_row(
        "hybridkv",
        _count(plan.options.block_tokens),
        f"{plan.padding_ratio:.2%}",
        *(_count(plan.max_requests(length)) for length in lengths),
        style="bold",
    )
    for name, uniform in uniform_layouts(plan).items():
        table.add_row(
            name,
            _count(uniform.block_tokens),
            f"{uniform.padding_ratio:.2%}",
            *(_count(uniform.max_requests(length)) for length in lengths),
        )
    table.caption = "padding: of the kind of page that pads most; a prefix shorter than a block is never shared"
    return table


def _counts_tokens(group: GroupPlan) -> bool:
    return not isinstance(group.specs[0], LinearState)


def _dtypes(specs: Sequence[LayerSpec]) -> str:
    return " / ".join(dict.fromkeys(_short(part.dtype) for part in specs[0].parts))


def _short(dtype: DType) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _layer_list(layers: Sequence[int]) -> str:
    """Few layers in full, many by their number and ends."""
    if len(layers) <= 4:
        return ", ".join(map(str, layers))
    return f"{len(layers)}: {layers[0]}, {layers[1]}, .. {layers[-1]}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
