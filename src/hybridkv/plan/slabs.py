"""The search for a slab size that suits pages of any size.

A slab of S bytes must hold a whole number of pages of every group: S = n_g * stride_g with stride_g >= page_bytes_g and
aligned. Then page i of group g lies at i * stride_g and no address computation knows about slabs. Larger slabs divide
more evenly, smaller ones cost less where they are not full. We minimise what an arena of M bytes may lose:

    M * worst padding of any group  +  the null slab  +  half a slab a group that is not full
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE_ALIGN_BYTES = 256
"""Strides are multiples of this: every dtype and vector load is aligned in every page."""

PADDING_LIMIT = 0.02
"""Padding we accept when a slab size within the arena allows it."""

_WIDEST_STRIDE = 1.25
"""Strides beyond this multiple of the page are not tried: some other slab size always does better."""

_Units = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageNeed:
    """One group's pages, and how many of them the smallest workable arena must hold."""

    page_bytes: int
    min_pages: int


@dataclass(frozen=True, slots=True)
class SlabChoice:
    slab_bytes: int
    strides_bytes: tuple[int, ...]
    padding_ratio: float
    """Of the group that pads most: whatever the arena is filled with, no more than this is lost."""
    min_slabs: int
    """The null slab and enough slabs for every group's `min_pages`."""

    def loss_bytes(self, memory_bytes: int) -> float:
        return memory_bytes * self.padding_ratio + self.slab_bytes * (1 + len(self.strides_bytes) / 2)


def choose_slab(needs: Sequence[PageNeed], memory_bytes: int) -> SlabChoice | None:
    """The slab size that loses least of `memory_bytes`, or None if none leaves room for every group."""
    best: SlabChoice | None = None
    for candidates in _scan(needs, memory_bytes):
        slab, padding = candidates.slab_units * PAGE_ALIGN_BYTES, candidates.padding
        loss = memory_bytes * padding + slab * (1 + len(needs) / 2)
        loss = np.where(padding > PADDING_LIMIT, loss + memory_bytes, loss)
        loss = np.where(candidates.min_slabs * slab > memory_bytes, np.inf, loss)
        index = int(np.argmin(loss))
        if np.isfinite(loss[index]):
            found = candidates.choice(index)
            if best is None or _rank(found, memory_bytes) < _rank(best, memory_bytes):
                best = found
        least_slab_cost = int(slab[-1]) * (1 + len(needs) / 2)
        if (
            best is not None
            and best.padding_ratio <= PADDING_LIMIT
            and best.loss_bytes(memory_bytes) <= least_slab_cost
        ):
            break
    return best


def smallest_arena(needs: Sequence[PageNeed]) -> int:
    """Bytes below which no slab size leaves room for every group."""
    least: int | None = None
    for candidates in _scan(needs):
        arenas = candidates.min_slabs * candidates.slab_units * PAGE_ALIGN_BYTES
        least = int(arenas.min()) if least is None else min(least, int(arenas.min()))
        largest_slab = int(candidates.slab_units[-1]) * PAGE_ALIGN_BYTES
        if largest_slab * (1 + len(needs)) >= least:  # larger slabs need larger arenas
            return least
    raise AssertionError("the scan has no end")


def _rank(choice: SlabChoice, memory_bytes: int) -> tuple[bool, float]:
    return choice.padding_ratio > PADDING_LIMIT, choice.loss_bytes(memory_bytes)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Slab sizes for which every group has a stride, in ascending order. All sizes in units of the alignment."""

    slab_units: _Units
    strides: tuple[_Units, ...]
    padding: npt.NDArray[np.float64]
    min_slabs: _Units

    def choice(self, index: int) -> SlabChoice:
        return SlabChoice(
            slab_bytes=int(self.slab_units[index]) * PAGE_ALIGN_BYTES,
            strides_bytes=tuple(int(stride[index]) * PAGE_ALIGN_BYTES for stride in self.strides),
            padding_ratio=float(self.padding[index]),
            min_slabs=int(self.min_slabs[index]),
        )


def _scan(needs: Sequence[PageNeed], memory_bytes: int | None = None) -> Iterator[_Candidates]:
    """Every slab size from the largest page up to the memory (or without end), in windows of doubling size."""
    pages = [-(-need.page_bytes // PAGE_ALIGN_BYTES) for need in needs]
    low = max(pages)
    while memory_bytes is None or low <= memory_bytes // PAGE_ALIGN_BYTES:
        high = 2 * low if memory_bytes is None else min(2 * low, memory_bytes // PAGE_ALIGN_BYTES + 1)
        by_page = {page: _best_strides(page, low, high) for page in set(pages)}  # packs of equal size search once
        strides = [by_page[page] for page in pages]
        usable = np.flatnonzero(np.logical_and.reduce([stride > 0 for stride in by_page.values()]))
        if len(usable):
            slab = usable + low
            chosen = tuple(stride[usable] for stride in strides)
            padding = np.zeros(len(usable))
            min_slabs = np.ones(len(usable), dtype=np.int64)
            for need, stride in zip(needs, chosen, strict=True):
                padding = np.maximum(padding, 1 - need.page_bytes / (stride * PAGE_ALIGN_BYTES))
                min_slabs += -(-need.min_pages // (slab // stride))
            yield _Candidates(slab, chosen, padding, min_slabs)
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
