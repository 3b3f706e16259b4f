"""Series of figures from plans: what fits by the length of requests, and by how many layers share a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from hybridkv.errors import PlanError
from hybridkv.plan.plan import Plan, make_plan
from hybridkv.plan.uniform import UniformPlan, uniform_pack_sizes, uniform_plan
from hybridkv.spec import FullAttention

_SHORTEST_TOKENS = 256
_FEWEST_LENGTHS = 6
_STEPS_PER_OCTAVE = 12


@dataclass(frozen=True, slots=True)
class Packing:
    """The same model and memory with `pack_size` full-attention layers in a page."""

    pack_size: int
    uniform: UniformPlan
    plan: Plan | None
    """None if the memory is too little for that many groups."""


def request_lengths(max_model_len: int) -> list[int]:
    """Powers of two up to `max_model_len` tokens, and `max_model_len` itself."""
    most = max_model_len.bit_length() - 1
    least = max(0, min(_SHORTEST_TOKENS.bit_length() - 1, most - _FEWEST_LENGTHS))
    return sorted({*(1 << power for power in range(least, most + 1)), max_model_len})


def lengths_between(lengths: Sequence[int]) -> list[int]:
    """`lengths` and those between them, close enough to draw the steps of whole blocks as a line."""
    first, last = lengths[0], lengths[-1]
    num_steps = ceil(_STEPS_PER_OCTAVE * log2(last / first))
    between = (round(first * (last / first) ** (step / num_steps)) for step in range(1, num_steps))
    return sorted({*lengths, *between})


def uniform_layouts(plan: Plan) -> dict[str, UniformPlan]:
    """What one page size costs the plan's model in the same memory, by what it is called; each pack size once."""
    sizes = uniform_pack_sizes(plan.model)
    return {
        _uniform_name(name, size): uniform_plan(plan.model, plan.options.memory_bytes, size)
        for name, size in sizes.items()
        if name == "all" or size != sizes.get("all")
    }


def fits_by_length(plan: Plan, lengths: Sequence[int]) -> dict[str, list[int]]:
    """Requests of each length that fit: in the plan, and with one page size, least and most packed."""
    fits = {"hybridkv": [plan.max_requests(length) for length in lengths]}
    layouts = list(uniform_layouts(plan).items())
    for name, uniform in dict([layouts[0], layouts[-1]]).items():
        fits[name] = [uniform.max_requests(length) for length in lengths]
    return fits


def by_packing(plan: Plan) -> list[Packing]:
    """Both layouts for each pack size. Empty for a model without full attention, which has nothing to pack."""
    if not any(isinstance(spec, FullAttention) for spec in plan.model.layers):
        return []
    return [
        Packing(uniform.pack_size, uniform, _packed(plan, uniform.pack_size))
        for uniform in uniform_layouts(plan).values()
    ]


def _packed(plan: Plan, pack_size: int) -> Plan | None:
    try:
        return make_plan(plan.model, replace(plan.options, attn_pack_size=pack_size))
    except PlanError:  # too little memory: all else was checked when the plan was made
        return None


def _uniform_name(name: str, size: int) -> str:
    layers = "layer" if size == 1 else "layers"
    return f"uniform, all {size} {layers} a page" if name == "all" else f"uniform, {name} {layers} a page"
