"""Copies between pages and the bytes of stored rows. Nothing here knows how pages are allocated.

Rows are read into a buffer outside the pages first and copied into them once they have been checked. So a read that
hangs or returns wrong bytes never touches a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.stream.boxes import Span, View
from hybridkv.stream.form import Chunk

Words = npt.NDArray[np.unsignedinteger[Any]]


class Copy(NamedTuple):
    """Bytes copied out of pages. They are valid once `wait` has returned."""

    data: memoryview
    wait: Callable[[], None]


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
        for pages, slabs, numbers, rows in self._pairs(chunk, span, staged):
            pages[slabs, numbers] = rows

    def copy_out(self, chunk: Chunk, span: Span) -> Copy:
        data = np.empty(chunk.nbytes(span.num_tokens), np.uint8).data
        for pages, slabs, numbers, rows in self._pairs(chunk, span, data):
            for index, place in enumerate(zip(slabs, numbers, strict=True)):
                rows[index] = pages[place]
        return Copy(data, _nothing)

    def settle(self) -> None:
        """Nothing to do: copies are complete on return."""

    def _pairs(
        self, chunk: Chunk, span: Span, data: memoryview
    ) -> Iterator[tuple[Words, Sequence[int], Sequence[int], Words]]:
        """The same bytes of a chunk, box by box: every page of the arena, the places of ours, and rows of `data`."""
        for blocks in span.blocks():
            slabs, numbers = zip(*(divmod(page, chunk.grid.pages_per_slab) for page in blocks.pages), strict=True)
            for box in chunk.boxes(span.num_tokens):
                for pages, rows in box.views(chunk.grid, len(self._bytes), blocks, span.block_tokens):
                    size = box.alignment(chunk.grid)
                    yield _array(self._bytes, pages, size), slabs, numbers, _array(data, rows, size)


def _array(data: memoryview, view: View, size: int) -> Words:
    """A view of bytes as words of `size` bytes."""
    shape, strides = (*view.shape[:-1], view.shape[-1] // size), (*view.strides[:-1], size)
    return np.ndarray(shape, f"u{size}", data, view.offset, strides)


def _nothing() -> None:
    """Nothing to wait for."""
