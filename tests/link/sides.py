"""Ranks of two engines, and transfers between their memories with plain copies.

What must arrive is written through the plan's views (`Rank.fill`), which know nothing of `hybridkv.link`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import shake_128
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hybridkv.cache import CacheLayout
from hybridkv.cache.tokens import pack_tokens
from hybridkv.link.geometry import Geometry
from hybridkv.link.parcels import Parcel
from hybridkv.link.runs import Cutter, PageTables
from hybridkv.plan import GroupPlan, PlanOptions, make_plan
from hybridkv.spec import AttentionLayer, LayerSpec, ModelSpec, Part
from hybridkv.store import MemoryStore
from hybridkv.stream import Catalogue, PageRequest
from tests.stream.ranks import Content, Rank
from tests.stream.reader import Bytes


class Side(NamedTuple):
    """A rank with the pages of one request."""

    rank: Rank
    geometry: Geometry
    request: PageRequest

    @property
    def tables(self) -> PageTables:
        return PageTables(self.request.blocks, {name: at[self.request.end] for name, at in self.request.states.items()})

    @property
    def layers(self) -> list[int]:
        return sorted({spec.layer for spec in self.rank.plan.model.layers})

    def filled(self, memory: bytearray, content: Content, start: int, layers: Sequence[int]) -> bytearray:
        known = pack_tokens(range(self.request.end))
        for layer in layers:
            self.rank.fill(memory, self.request._replace(start=start), known, content, layer)
        return memory

    def mask(self, content: Content, start: int) -> Bytes:
        empty = bytearray(len(self.rank.memory))
        return np.frombuffer(self.filled(empty, content, start, self.layers), np.uint8)

    def in_pages(self, start: int) -> Bytes:
        """1 for each byte of pages of blocks from `start` on, and of states."""
        found = np.zeros(len(self.rank.memory), np.uint8)
        for group in self.rank.plan.groups:
            for page in self._pages_of(group, start):
                begin = group.page_offset(page)
                found[begin : begin + group.stride_bytes] = 1
        return found

    def _pages_of(self, group: GroupPlan, start: int) -> list[int]:
        first = start // self.rank.block_tokens if start < self.request.end else None
        tables = [f"tap{layer}" for layer in group.layers] if group.name == "taps" else [group.name]
        pages = [page for name in tables for page in self.request.blocks.get(name, ())[first:] if first is not None]
        return [page for page in (*pages, *self.tables.states.get(group.name, ())) if page]


def side(
    spec: ModelSpec,
    end: int,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    taps: Sequence[str] = (),
    from_block: int | None = None,
) -> Side:
    """`from_block`: the first block of local groups that has a page; by default the first that is visible."""
    rank = Rank(spec, MemoryStore(1 << 20), "weights", 256, seed, **options)
    rank.close()
    seen = rank.visible(end)
    first_of = {name: first if from_block is None else min(first, from_block) for name, first in seen.items()}
    geometry = Geometry.of(rank.catalogue, arena_bytes=rank.plan.arena_bytes, identity="weights")
    return Side(rank, Geometry.from_json(geometry.to_json()), rank.request(end, [end], taps, first_of))


def geometry_of(spec: ModelSpec, options: Mapping[str, Any]) -> Geometry:
    """Without memory."""
    plan = make_plan(spec, PlanOptions(**options))
    catalogue = Catalogue(plan, CacheLayout.from_plan(plan), "weights")
    return Geometry.of(catalogue, arena_bytes=plan.arena_bytes, identity="weights")


def truth(spec: LayerSpec, part: Part, known: bytes) -> Bytes:
    """This rank's elements of the whole model's part, after the tokens `known`: different ones everywhere."""
    nbytes = prod(part.inner) * part.dtype.nbytes
    runs = [
        _whole(f"{spec.kind} {spec.layer} {part.name} {axis} {len(known)}", run.total, nbytes)[
            run.start : run.start + run.count
        ]
        for axis, run in enumerate(part.runs)
    ]
    return np.concatenate(runs)


@lru_cache(maxsize=1 << 14)
def _whole(what: str, length: int, element_bytes: int) -> Bytes:
    return np.frombuffer(shake_128(what.encode()).digest(length * element_bytes), np.uint8).reshape(length, -1)


def seen_from(end: int) -> Content:
    """1 where the token is visible from `end`, else 0."""

    def content(spec: LayerSpec, part: Part, known: bytes) -> Bytes:
        first = spec.sight.first_visible(end) if isinstance(spec, AttentionLayer) else 0
        return np.full((part.shape[0], prod(part.inner) * part.dtype.nbytes), len(known) // 4 > first, np.uint8)

    return content


def copy(parcel: Parcel, source: bytearray, target: bytearray) -> None:
    for begin, to, nbytes in zip(parcel.source.tolist(), parcel.target.tolist(), parcel.nbytes.tolist(), strict=True):
        target[to : to + nbytes] = source[begin : begin + nbytes]


def transfer(sources: Sequence[Side], target: Side, start: int, **options: Any) -> bytearray:
    """The target's memory after each source that has something for it has sent its parcels.

    With `by_layer`, parcels leave as soon as their last layer is written.
    """
    after, end = bytearray(target.rank.memory), target.request.end
    for source in sources:
        parcels = cutter(source, target).parcels(source.tables, target.tables, start, end, **options)
        memory = bytearray(source.rank.memory)
        for layer in source.layers if options.get("by_layer") else [None]:
            source.filled(memory, truth, 0, source.layers if layer is None else [layer])
            for parcel in parcels:
                if layer is None or parcel.last_layer == layer:
                    copy(parcel, memory, after)
        check_parcels(parcels, options.get("parcel_bytes", 4 << 20))
    return after


def cutter(source: Side, target: Side) -> Cutter:
    return Cutter(source.geometry, target.geometry)


def check_parcels(parcels: Sequence[Parcel], parcel_bytes: int) -> None:
    for parcel in parcels:
        assert parcel.total_bytes == int(parcel.nbytes.sum()) > 0
        assert parcel.total_bytes <= 1.05 * parcel_bytes + 128 * len(parcel.nbytes) or len(parcel.nbytes) == 1
        ends, target_ends = parcel.source + parcel.nbytes, parcel.target + parcel.nbytes
        assert not ((ends[:-1] == parcel.source[1:]) & (target_ends[:-1] == parcel.target[1:])).any()


def check_arrived(target: Side, after: bytearray, start: int) -> None:
    """Every visible token of every wanted block from `start` on is there, and nothing outside wanted pages changed."""
    first = start - start % target.rank.block_tokens if start < target.request.end else start
    expected = target.filled(bytearray(target.rank.memory), truth, first, target.layers)
    must = target.mask(seen_from(target.request.end), first) == 1
    got, wanted = np.frombuffer(after, np.uint8), np.frombuffer(expected, np.uint8)
    np.testing.assert_array_equal(got[must], wanted[must])
    outside = target.in_pages(start) == 0
    before = np.frombuffer(target.rank.memory, np.uint8)
    np.testing.assert_array_equal(got[outside], before[outside])
