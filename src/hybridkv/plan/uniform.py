"""What the same model costs an engine with one page size for all layers, to set beside our plan.

The rules are vLLM's (0.32): every layer has pages of the same number of bytes; the token block grows until one layer's
block of attention is no smaller than one layer's state; layers of a kind form groups of equal length, short groups are
padded with empty layers; a page id stands for one page in each layer of a group. Packing N full-attention layers into
one page makes the block N times shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hybridkv.errors import PlanError
from hybridkv.spec import FullAttention, HiddenTap, LatentAttention, LayerSpec, LinearState, ModelSpec

_BLOCK_TOKENS = 16
_LATENT_BLOCK_TOKENS = 128  # MLA kernels of hybrid models want whole blocks of 128


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one kind, in units that take a page each: a layer, or a pack of full-attention layers."""

    specs: tuple[LayerSpec, ...]
    units: int
    unit_bytes: int
    block_tokens: int
    """Tokens a page of this kind holds; states hold one state whatever the number of tokens."""

    @property
    def used_bytes(self) -> int:
        """Bytes of one block, or state, of all layers."""
        tokens = 1 if isinstance(self.specs[0], LinearState) else self.block_tokens
        return sum(spec.nbytes for spec in self.specs) * tokens


@dataclass(frozen=True, slots=True)
class UniformPlan:
    """One page size for all. `block_tokens` is None for a model without any attention."""

    pack_size: int
    block_tokens: int | None
    page_bytes: int
    group_units: int
    num_pages: int
    padding_ratio: float
    buckets: tuple[_Bucket, ...]

    def request_pages(self, num_tokens: int) -> int:
        return sum(
            bucket.specs[0].held_blocks(num_tokens, bucket.block_tokens) * -(-bucket.units // self.group_units)
            for bucket in self.buckets
        )

    def max_requests(self, num_tokens: int) -> int:
        """How many requests of that length fit at once, sharing nothing and with one working state each."""
        if num_tokens < 1:
            raise PlanError(f"requests of {num_tokens} tokens: a request has at least 1 token")
        return max(0, self.num_pages - 1) // self.request_pages(num_tokens)

    def request_bytes(self, num_tokens: int) -> int:
        return self.request_pages(num_tokens) * self.group_units * self.page_bytes


def uniform_plan(model: ModelSpec, memory_bytes: int, pack_size: int = 1) -> UniformPlan:
    """The plan of an engine with one page size, with `pack_size` full-attention layers in a page."""
    if pack_size < 1:
        raise PlanError(f"pack size {pack_size}: a page holds at least 1 layer")
    kinds = _by_kind(model.layers)
    state_bytes = max((spec.nbytes for spec in model.layers if isinstance(spec, LinearState)), default=0)
    attention = next((specs for specs in kinds if isinstance(specs[0], FullAttention)), None)
    attention = attention or next((specs for specs in kinds if not isinstance(specs[0], LinearState)), None)

    block_tokens: int | None = None
    page_bytes = state_bytes
    if attention is not None:
        align = _LATENT_BLOCK_TOKENS if state_bytes and isinstance(attention[0], LatentAttention) else _BLOCK_TOKENS
        packed = pack_size if isinstance(attention[0], FullAttention) else 1
        token_bytes = attention[0].nbytes * packed
        block_tokens = align * max(1, -(-state_bytes // (align * token_bytes)))
        page_bytes = max(_unit_bytes(specs, block_tokens, pack_size) for specs in kinds)
    buckets = tuple(_bucket(specs, block_tokens or _BLOCK_TOKENS, page_bytes, pack_size) for specs in kinds)

    group_units = _group_units([bucket.units for bucket in buckets])
    padding = max(
        1 - bucket.used_bytes / (-(-bucket.units // group_units) * group_units * page_bytes) for bucket in buckets
    )
    return UniformPlan(
        pack_size=pack_size,
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        group_units=group_units,
        num_pages=memory_bytes // (group_units * page_bytes),
        padding_ratio=padding,
        buckets=buckets,
    )


def uniform_pack_sizes(model: ModelSpec) -> dict[str, int]:
    """The pack sizes worth showing: 1, 2, 4, 8 as far as there are layers, and all of them."""
    packable = sum(isinstance(spec, FullAttention) for spec in model.layers)
    sizes = {str(size): size for size in (1, 2, 4, 8) if size == 1 or size <= packable}
    return {**sizes, "all": packable} if packable else sizes


def _by_kind(layers: Sequence[LayerSpec]) -> list[tuple[LayerSpec, ...]]:
    kept = sorted((spec for spec in layers if not isinstance(spec, HiddenTap)), key=lambda spec: spec.group)
    return [tuple(specs) for _, specs in groupby(kept, key=lambda spec: spec.group)]


def _unit_bytes(specs: Sequence[LayerSpec], block_tokens: int, pack_size: int) -> int:
    largest = max(spec.nbytes for spec in specs)
    if isinstance(specs[0], LinearState):
        return largest
    return largest * block_tokens * (pack_size if isinstance(specs[0], FullAttention) else 1)


def _bucket(specs: tuple[LayerSpec, ...], block_tokens: int, page_bytes: int, pack_size: int) -> _Bucket:
    """Kinds with smaller pages hold more tokens in one, if a whole number of blocks fits; else they are padded."""
    unit_bytes = _unit_bytes(specs, block_tokens, pack_size)
    grown = page_bytes // unit_bytes if page_bytes % unit_bytes == 0 else 1
    if isinstance(specs[0], LinearState):
        grown = 1
    units = -(-len(specs) // pack_size) if isinstance(specs[0], FullAttention) else len(specs)
    return _Bucket(specs, units, unit_bytes * grown, block_tokens * grown)


def _group_units(units: Sequence[int]) -> int:
    """Groups are as long as the shortest kind, or as the longest if that is less than half as long again."""
    return max(units) if max(units) < 1.5 * min(units) else min(units)
