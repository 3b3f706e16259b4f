"""Boxes: bytes that lie at regular distances both in pages and in a stored row, so that one strided copy moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple


class PageGrid(NamedTuple):
    """Where pages lie in a buffer: slabs at equal distances, with equally many pages at equal distances in each."""

    slab_bytes: int
    pages_per_slab: int
    stride_bytes: int

    def page_offset(self, page: int) -> int:
        slab, number = divmod(page, self.pages_per_slab)
        return slab * self.slab_bytes + number * self.stride_bytes


class Axis(NamedTuple):
    """Elements at equal distances, in bytes."""

    size: int
    stride: int


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
    token_axes: tuple[Axis, ...]
    """The tokens of a block in a page. More than one: the digits of a token's number, the first counts most."""
    row_token_stride: int
    nbytes: int
    page_stride: int | None = None
    """Distance of two pages of a slab, if it is not that of the grid."""

    def moved(self, row_bytes: int) -> Box:
        """The same box further on in the row."""
        return self._replace(row_offset=self.row_offset + row_bytes)

    def views(self, grid: PageGrid, arena_bytes: int, blocks: Blocks, block_tokens: int) -> Iterator[tuple[View, View]]:
        """The same bytes twice: of every page of an arena, `[slabs, pages of a slab, ...]`, and of `blocks` in the row,
        `[blocks, ...]`. Mostly one pair."""
        if len(self.token_axes) == 1:
            yield self._views(grid, arena_bytes, blocks, block_tokens, (blocks.num_tokens,), 0)
        elif blocks.num_tokens == block_tokens:
            yield self._views(grid, arena_bytes, blocks, block_tokens, tuple(axis.size for axis in self.token_axes), 0)
        else:
            for token in range(blocks.num_tokens):
                yield self._views(grid, arena_bytes, blocks, block_tokens, (1,) * len(self.token_axes), token)

    def _views(
        self,
        grid: PageGrid,
        arena_bytes: int,
        blocks: Blocks,
        block_tokens: int,
        num_tokens: tuple[int, ...],
        first: int,
    ) -> tuple[View, View]:
        """`num_tokens`: along each token axis, from token `first` of the block on."""
        shape = (*self.shape, *num_tokens, self.nbytes)
        stride = grid.stride_bytes if self.page_stride is None else self.page_stride
        pages = View(
            (-(-arena_bytes // grid.slab_bytes), grid.pages_per_slab, *shape),
            (grid.slab_bytes, stride, *self.page_strides, *(axis.stride for axis in self.token_axes), 1),
            self.page_offset + self._token_offset(first),
        )
        units = [prod(axis.size for axis in self.token_axes[number + 1 :]) for number in range(len(self.token_axes))]
        row = View(
            (len(blocks.pages), *shape),
            (
                block_tokens * self.row_token_stride,
                *self.row_strides,
                *(unit * self.row_token_stride for unit in units),
                1,
            ),
            self.row_offset + (blocks.first + first) * self.row_token_stride,
        )
        return pages, row

    def _token_offset(self, token: int) -> int:
        offset, (first, *others) = 0, self.token_axes
        for axis in reversed(others):
            token, digit = divmod(token, axis.size)
            offset += digit * axis.stride
        return offset + token * first.stride

    def alignment(self, grid: PageGrid) -> int:
        """The largest power of two, up to 8, that divides all offsets, distances and lengths."""
        sizes = (self.page_offset, self.row_offset, self.row_token_stride, self.nbytes, self.page_stride or 0)
        return gcd(
            8,
            grid.slab_bytes,
            grid.stride_bytes,
            *sizes,
            *(axis.stride for axis in self.token_axes),
            *self.page_strides,
            *self.row_strides,
        )


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
