"""Rows in a torch buffer: CPU memory is copied directly, GPU memory through pinned memory.

GPU transfers run on their own CUDA streams. A copy into pages runs after all work that was submitted before `order`. A
copy out of pages runs before all work that is submitted after `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hybridkv.stream.boxes import Span, View
from hybridkv.stream.form import Chunk
from hybridkv.stream.row_io import Copy, HostPages, PageBytes

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Element types of GPU copies, by the alignment of what is copied."""
_Places = tuple[torch.Tensor, torch.Tensor] | tuple[slice, int]
"""An index into the first two axes of a view of all pages."""


def page_bytes(buffer: torch.Tensor) -> PageBytes:
    """Page access for an arena. `buffer`: all its bytes, contiguous."""
    return pages_of_buffers([buffer])[0]


def pages_of_buffers(buffers: Sequence[torch.Tensor]) -> list[PageBytes]:
    """Page access for several buffers of one device. Their copies are ordered together."""
    device = buffers[0].device
    if device.type != "cuda":
        return [HostPages(memoryview(buffer.numpy())) for buffer in buffers]
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return [DevicePages(buffer, *streams) for buffer in buffers]


class DevicePages(PageBytes):
    """Arena bytes on a GPU. A chunk of many pages is one transfer and a few kernels that scatter or gather it."""

    def __init__(self, buffer: torch.Tensor, stream_in: torch.cuda.Stream, stream_out: torch.cuda.Stream) -> None:
        self._device = buffer.device
        self._bytes = buffer.view(torch.uint8)
        self._in = stream_in
        self._out = stream_out

    def order(self) -> Callable[[], None]:
        submitted = torch.cuda.current_stream(self._device).record_event()
        return lambda: self._in.wait_event(submitted)

    def stage(self, nbytes: int) -> memoryview:
        return memoryview(_pinned(nbytes).numpy())

    def copy_in(self, chunk: Chunk, span: Span, staged: memoryview) -> None:
        with torch.cuda.stream(self._in):
            data = torch.frombuffer(staged, dtype=torch.uint8).to(self._device, non_blocking=True)
            for pages, places, rows in self._pairs(chunk, span, data):
                pages[places] = rows
            done = self._in.record_event()
        done.synchronize()

    def copy_out(self, chunk: Chunk, span: Span) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        staged = _pinned(chunk.nbytes(span.num_tokens))
        with torch.cuda.stream(self._out):
            data = torch.empty(len(staged), dtype=torch.uint8, device=self._device)
            for pages, places, rows in self._pairs(chunk, span, data):
                rows.copy_(pages[places])
            staged.copy_(data, non_blocking=True)
            done = self._out.record_event()
        return Copy(memoryview(staged.numpy()), done.synchronize)

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._out)

    def _pairs(
        self, chunk: Chunk, span: Span, data: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, _Places, torch.Tensor]]:
        """The same bytes of a chunk, box by box: every page of the arena, the places of ours, and rows of `data`."""
        for blocks in span.blocks():
            places = self._places(blocks.pages, chunk.grid.pages_per_slab)
            for box in chunk.boxes(span.num_tokens):
                size = box.alignment(chunk.grid)
                for pages, rows in box.views(chunk.grid, len(self._bytes), blocks, span.block_tokens):
                    yield _words(self._bytes, pages, size), places, _words(data, rows, size)

    def _places(self, pages: Sequence[int], pages_per_slab: int) -> _Places:
        """Slab and number in it of each page, as an index. A single page needs no tensors: it is a slice."""
        if len(pages) == 1:
            slab, number = divmod(pages[0], pages_per_slab)
            return slice(slab, slab + 1), number
        slabs, numbers = torch.tensor([divmod(page, pages_per_slab) for page in pages], device=self._device).unbind(1)
        return slabs, numbers


def _words(data: torch.Tensor, view: View, size: int) -> torch.Tensor:
    """A view of bytes as words of `size` bytes."""
    words = data[: len(data) // size * size].view(_WORDS[size])
    shape = (*view.shape[:-1], view.shape[-1] // size)
    strides = (*(stride // size for stride in view.strides[:-1]), 1)
    return words.as_strided(shape, strides, view.offset // size)


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
