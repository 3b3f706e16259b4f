"""The search for a slab size that suits pages of any size.

A slab of S bytes must hold a whole number of pages of every group: S = n_g * stride_g with stride_g >= page_bytes_g and
aligned. Then page i of group g lies at i * stride_g and no address computation knows about slabs. Larger slabs divide
more evenly, smaller ones cost less where they are not full. We minimise what an arena of M bytes may lose:

    M * worst padding of any group  +  the null slab  +  half a slab a group that is not full
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE_ALIGN_BYTES = 256
"""Strides are multiples of this: every dtype and vector load is aligned in every page."""

PADDING_LIMIT = 0.02
"""Padding we accept wherever some slab size stays below it."""

_WIDEST_STRIDE = 1.25
"""Strides beyond this multiple of the page are not tried: some other slab size always does better."""

_FINE_UNITS = 2048
"""Pages are measured in units so coarse that the smallest still has this many: large pages need no fine search."""

_LARGEST_SLAB_LOSS = 0.1
"""Slabs whose cost alone is this part of the memory are not worth a search for less padding."""

_Units = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageNeed:
    """One group's pages, what they hold on average, and how many the smallest workable arena must have room for."""

    page_bytes: int
    used_bytes: float
    min_pages: int


@dataclass(frozen=True, slots=True)
class SlabChoice:
    slab_bytes: int
    strides_bytes: tuple[int, ...]
    padding_ratio: float
    """Of the group that pads most: whatever the arena is filled with, no more than this is lost."""
    loss_bytes: float

    @property
    def rank(self) -> tuple[bool, float]:
        """The smaller, the better: acceptable padding first."""
        return self.padding_ratio > PADDING_LIMIT, self.loss_bytes


def choose_slab(needs: Sequence[PageNeed], memory_bytes: int) -> SlabChoice | None:
    """The best slab size for `memory_bytes`, or None if none leaves room for every group."""
    best: SlabChoice | None = None
    for candidates in _scan(needs, memory_bytes):
        found = candidates.best(memory_bytes)
        if found is not None and (best is None or found.rank < best.rank):
            best = found
        if best is not None:
            cost = candidates.cost_of_largest
            if cost > _LARGEST_SLAB_LOSS * memory_bytes or (not best.rank[0] and best.loss_bytes <= cost):
                break
    return best


def smallest_arena(needs: Sequence[PageNeed]) -> int:
    """Bytes below which no slab size leaves room for every group."""
    least: int | None = None
    for candidates in _scan(needs):
        arenas = candidates.min_slabs * candidates.slab_bytes
        least = int(arenas.min()) if least is None else min(least, int(arenas.min()))
        if int(candidates.slab_bytes[-1]) * (1 + len(needs)) >= least:  # larger slabs need larger arenas
            return least
    raise AssertionError("the scan has no end")


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Slab sizes for which every group has a stride, in ascending order."""

    needs: Sequence[PageNeed]
    slab_bytes: _Units
    strides_bytes: dict[int, _Units]
    """By the bytes of the page."""
    padding: npt.NDArray[np.float64]
    min_slabs: _Units
    """The null slab and enough for every group's `min_pages`."""

    @property
    def slabs_lost(self) -> float:
        """The null slab, and half a slab a group."""
        return 1 + len(self.needs) / 2

    @property
    def cost_of_largest(self) -> float:
        return int(self.slab_bytes[-1]) * self.slabs_lost

    def best(self, memory_bytes: int) -> SlabChoice | None:
        loss = memory_bytes * self.padding + self.slab_bytes * self.slabs_lost
        rank = np.where(self.padding > PADDING_LIMIT, loss + memory_bytes, loss)
        rank = np.where(self.min_slabs * self.slab_bytes > memory_bytes, np.inf, rank)
        index = int(np.argmin(rank))
        if not np.isfinite(rank[index]):
            return None
        return SlabChoice(
            slab_bytes=int(self.slab_bytes[index]),
            strides_bytes=tuple(int(self.strides_bytes[need.page_bytes][index]) for need in self.needs),
            padding_ratio=float(self.padding[index]),
            loss_bytes=float(loss[index]),
        )


def _scan(needs: Sequence[PageNeed], memory_bytes: int | None = None) -> Iterator[_Candidates]:
    """Every slab size from the largest page up to the memory (or without end), in windows of doubling size."""
    unit = PAGE_ALIGN_BYTES
    while min(need.page_bytes for need in needs) // (2 * unit) >= _FINE_UNITS:
        unit *= 2
    pages = {need.page_bytes: -(-need.page_bytes // unit) for need in needs}
    alike = Counter(needs)  # packs of equal size are searched once
    low = max(pages.values())
    while memory_bytes is None or low <= memory_bytes // unit:
        high = 2 * low if memory_bytes is None else min(2 * low, memory_bytes // unit + 1)
        by_page = {page_bytes: _best_strides(page, low, high) for page_bytes, page in pages.items()}
        usable = np.flatnonzero(np.logical_and.reduce([strides > 0 for strides in by_page.values()]))
        if len(usable):
            slab = (usable + low) * unit
            chosen = {page_bytes: strides[usable] * unit for page_bytes, strides in by_page.items()}
            padding = np.zeros(len(usable))
            min_slabs = np.ones(len(usable), dtype=np.int64)
            for need, count in alike.items():
                stride = chosen[need.page_bytes]
                padding = np.maximum(padding, 1 - need.used_bytes / stride)
                min_slabs += count * -(-need.min_pages // (slab // stride))
            yield _Candidates(needs, slab, chosen, padding, min_slabs)
        low = high


def _best_strides(page: int, low: int, high: int) -> _Units:
    """For each slab size in [low, high): the smallest divisor that is a stride for `page`, or 0 if there is none."""
    best = np.zeros(high - low, dtype=np.int64)
    widest = int(page * _WIDEST_STRIDE)
    if widest - page < high // page:
        for stride in range(widest, page - 1, -1):  # few strides: mark their multiples, the smallest stride last
            best[-low % stride :: stride] = stride
    else:
        for count in range(max(1, low // widest), high // page + 1):  # few counts: the largest count comes last
            first = max(page, -(-low // count))
            strides = np.arange(first, min(widest, (high - 1) // count) + 1)
            best[strides * count - low] = strides
    return best
