"""Rows in a torch buffer: CPU memory is copied directly, GPU memory through pinned memory.

GPU transfers run on their own CUDA streams. A copy into pages runs after all work that was submitted before `order`. A
copy out of pages runs before all work that is submitted after `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hybridkv.stream.boxes import Box
from hybridkv.stream.form import Chunk
from hybridkv.stream.row_io import Copy, HostPages, PageBytes, Span

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Element types of GPU copies, by the alignment of what is copied."""


def page_bytes(buffer: torch.Tensor) -> PageBytes:
    """Page access for an arena. `buffer`: all its bytes, contiguous."""
    return DevicePages(buffer) if buffer.device.type == "cuda" else HostPages(memoryview(buffer.numpy()))


class DevicePages(PageBytes):
    """Arena bytes on a GPU. A chunk of many pages is one transfer and a few kernels that scatter or gather it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._device = buffer.device
        self._bytes = buffer.view(torch.uint8)
        self._in = torch.cuda.Stream(buffer.device)
        self._out = torch.cuda.Stream(buffer.device)

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
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """The same bytes of a chunk, box by box: all pages of the arena, which of them are meant, and rows in `data`.

        Blocks with equally many tokens that follow each other are copied together.
        """
        for first, pages, count in _stretches(span):
            numbers = torch.tensor(pages).pin_memory().to(self._device, non_blocking=True)
            places = numbers // chunk.plan.pages_per_slab, numbers % chunk.plan.pages_per_slab
            for box in chunk.boxes(span.num_tokens):
                yield (
                    self._in_pages(chunk, box, count),
                    places,
                    _in_row(box, data, first, len(pages), span.block_tokens, count),
                )

    def _in_pages(self, chunk: Chunk, box: Box, count: int) -> torch.Tensor:
        """The box of every page of the arena: `[slabs, pages of a slab, ..., tokens, words]`."""
        size, plan = box.alignment, chunk.plan
        shape = (len(self._bytes) // plan.slab_bytes, plan.pages_per_slab, *box.shape, count, box.nbytes)
        strides = (plan.slab_bytes, plan.stride_bytes, *box.page_strides, box.token_stride)
        return _words(self._bytes, size, shape, strides, box.page_offset)


def _in_row(box: Box, data: torch.Tensor, first: int, num_pages: int, block_tokens: int, count: int) -> torch.Tensor:
    """The box of consecutive blocks: `[blocks, ..., tokens, words]`."""
    shape = (num_pages, *box.shape, count, box.nbytes)
    strides = (block_tokens * box.nbytes, *box.row_strides, box.nbytes)
    return _words(data, box.alignment, shape, strides, box.row_offset + first * box.nbytes)


def _words(
    data: torch.Tensor, size: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A strided view of bytes as words of `size` bytes. `strides`: in bytes, of all axes but the last."""
    words = data[: len(data) // size * size].view(_WORDS[size])
    in_words = [stride // size for stride in strides]
    return words.as_strided((*shape[:-1], shape[-1] // size), (*in_words, 1), offset // size)


def _stretches(span: Span) -> Iterator[tuple[int, list[int], int]]:
    """Runs of blocks of equally many tokens with nothing left out: first token, pages, tokens of each."""
    run: list[int] = []
    start = expected = tokens = 0
    for page, first, count in span.blocks():
        if run and (first != expected or count != tokens):
            yield start, run, tokens
            run = []
        if not run:
            start, tokens = first, count
        run.append(page)
        expected = first + span.block_tokens
    if run:
        yield start, run, tokens


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
