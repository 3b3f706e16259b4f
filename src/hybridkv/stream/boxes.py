"""Boxes: bytes that lie at regular distances both in pages and in a stored row, so that one strided copy moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from hybridkv.plan import GroupPlan


class Blocks(NamedTuple):
    """Consecutive blocks with equally many tokens."""

    first: int
    """Their first token, counted from the start of the row."""
    pages: list[int]
    num_tokens: int
    """Tokens of each block: those of a full block, or fewer in a single last one."""


class Span(NamedTuple):
    """Pages of consecutive blocks, and how many tokens they hold together. A state is one page with one token."""

    pages: Sequence[int | None]
    """None: a page that is left out."""
    num_tokens: int
    block_tokens: int

    def blocks(self) -> Iterator[Blocks]:
        """All pages but those that are left out."""
        run, start = list[int](), 0
        for number, page in enumerate(self.pages):
            first = number * self.block_tokens
            is_full = self.num_tokens - first >= self.block_tokens
            if run and (page is None or not is_full):
                yield Blocks(start, run, self.block_tokens)
                run = []
            if page is not None and not is_full:
                yield Blocks(first, [page], self.num_tokens - first)
            elif page is not None:
                start = start if run else first
                run.append(page)
        if run:
            yield Blocks(start, run, self.block_tokens)


class View(NamedTuple):
    """A strided view of bytes. The last axis has consecutive bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Box(NamedTuple):
    """Pieces of `nbytes` a token. A page has the tokens of one block, a row those of many blocks."""

    shape: tuple[int, ...]
    """Number of pieces along each axis, tokens excluded."""
    page_offset: int
    page_strides: tuple[int, ...]
    row_offset: int
    row_strides: tuple[int, ...]
    token_stride: int
    """Distance of two tokens in the page. In the row they are `nbytes` apart."""
    nbytes: int

    def moved(self, row_bytes: int) -> Box:
        """The same box further on in the row."""
        return self._replace(row_offset=self.row_offset + row_bytes)

    def in_pages(self, plan: GroupPlan, arena_bytes: int, num_tokens: int) -> View:
        """The first tokens of this box in every page of an arena: `[slabs, pages of a slab, ..., tokens, bytes]`."""
        shape = (arena_bytes // plan.slab_bytes, plan.pages_per_slab, *self.shape, num_tokens, self.nbytes)
        return View(
            shape, (plan.slab_bytes, plan.stride_bytes, *self.page_strides, self.token_stride, 1), self.page_offset
        )

    def in_row(self, blocks: Blocks, block_tokens: int) -> View:
        """The same in the row, of some blocks: `[blocks, ..., tokens, bytes]`."""
        shape = (len(blocks.pages), *self.shape, blocks.num_tokens, self.nbytes)
        strides = (block_tokens * self.nbytes, *self.row_strides, self.nbytes, 1)
        return View(shape, strides, self.row_offset + blocks.first * self.nbytes)

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 8, that divides all offsets, distances and lengths."""
        sizes = (self.page_offset, self.row_offset, self.token_stride, self.nbytes)
        return gcd(8, *sizes, *self.page_strides, *self.row_strides)


def stack(boxes: Sequence[Box]) -> list[Box]:
    """One box with another axis in front, if the boxes differ only in their offsets and lie at equal distances."""
    first = boxes[0]
    if len(boxes) == 1:
        return [first]
    steps = {(b.page_offset - a.page_offset, b.row_offset - a.row_offset) for a, b in pairwise(boxes)}
    same = {box._replace(page_offset=0, row_offset=0) for box in boxes}
    if len(steps) > 1 or len(same) > 1:
        return list(boxes)
    ((page_step, row_step),) = steps
    return [
        first._replace(
            shape=(len(boxes), *first.shape),
            page_strides=(page_step, *first.page_strides),
            row_strides=(row_step, *first.row_strides),
        )
    ]
