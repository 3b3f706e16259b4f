"""Copies between pages and the bytes of stored rows. Nothing here knows how pages are allocated.

Rows are read into a buffer outside the pages first and copied into them once they have been checked. So a read that
hangs or returns wrong bytes never touches a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.stream.boxes import Box
from hybridkv.stream.form import Chunk

Bytes = npt.NDArray[np.uint8]


class Copy(NamedTuple):
    """Bytes copied out of pages. They are valid once `wait` has returned."""

    data: memoryview
    wait: Callable[[], None]


class Span(NamedTuple):
    """Pages of consecutive blocks, and how many tokens they hold together. A state is one page with one token."""

    pages: Sequence[int | None]
    """None: a page that is left out."""
    num_tokens: int
    block_tokens: int

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Each page, with its first token and its number of tokens."""
        for number, page in enumerate(self.pages):
            if page is not None:
                first = number * self.block_tokens
                yield page, first, min(self.block_tokens, self.num_tokens - first)


class PageBytes(ABC):
    """Chunks of pages, as bytes in the stored form."""

    @abstractmethod
    def order(self) -> Callable[[], None]:
        """Call on the engine thread. Returns a function for the reader thread, to be called before `copy_in`.

        It orders that copy after everything that was submitted before this call.
        """

    @abstractmethod
    def stage(self, nbytes: int) -> memoryview:
        """A buffer outside the pages, for a store to read into."""

    @abstractmethod
    def copy_in(self, chunk: Chunk, span: Span, staged: memoryview) -> None:
        """Copy staged bytes into pages. The copy is complete on return."""

    @abstractmethod
    def copy_out(self, chunk: Chunk, span: Span) -> Copy:
        """Copy the chunk as it is now. No page may be left out."""

    @abstractmethod
    def settle(self) -> None:
        """Work submitted after this call may overwrite pages that were copied out."""


class HostPages(PageBytes):
    """Pages in host memory, copied by the CPU."""

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self._bytes = memoryview(buffer).cast("B")

    def order(self) -> Callable[[], None]:
        return _nothing

    def stage(self, nbytes: int) -> memoryview:
        return np.empty(nbytes, np.uint8).data

    def copy_in(self, chunk: Chunk, span: Span, staged: memoryview) -> None:
        for page, row in self._pairs(chunk, span, staged):
            page[...] = row

    def copy_out(self, chunk: Chunk, span: Span) -> Copy:
        data = np.empty(chunk.nbytes(span.num_tokens), np.uint8).data
        for page, row in self._pairs(chunk, span, data):
            row[...] = page
        return Copy(data, _nothing)

    def settle(self) -> None:
        """Nothing to do: copies are complete on return."""

    def _pairs(self, chunk: Chunk, span: Span, data: memoryview) -> Iterator[tuple[Bytes, Bytes]]:
        """The same bytes of a chunk in pages and in `data`, page by page and box by box."""
        boxes = chunk.boxes(span.num_tokens)
        for page, first, count in span.blocks():
            start = chunk.plan.page_offset(page)
            for box in boxes:
                yield self._in_page(box, start, count), _in_row(box, data, first, count)

    def _in_page(self, box: Box, page_start: int, count: int) -> Bytes:
        shape, strides = (*box.shape, count, box.nbytes), (*box.page_strides, box.token_stride, 1)
        return np.ndarray(shape, np.uint8, self._bytes, page_start + box.page_offset, strides)


def _in_row(box: Box, data: memoryview, first: int, count: int) -> Bytes:
    shape, strides = (*box.shape, count, box.nbytes), (*box.row_strides, box.nbytes, 1)
    return np.ndarray(shape, np.uint8, data, box.row_offset + first * box.nbytes, strides)


def _nothing() -> None:
    """Nothing to wait for."""
