"""Pages in vLLM's memory, and bytes that wait in host memory until vLLM has blocks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import overload

import numpy as np
import torch

from hybridkv.cache import NULL_PAGE
from hybridkv.integrations.vllm.messages import BlockTable
from hybridkv.stream import Copy, PageBytes
from hybridkv.stream.boxes import Span
from hybridkv.stream.form import Chunk
from hybridkv.stream.torch_io import pages_of_buffers


class LayerPages(PageBytes):
    """Pages of vLLM's blocks. Each layer has a buffer of its own."""

    def __init__(self, buffers: Mapping[Chunk, torch.Tensor]) -> None:
        self._pages = dict(zip(buffers, pages_of_buffers(list(buffers.values())), strict=True))
        self._any = next(iter(self._pages.values()))

    def order(self) -> Callable[[], None]:
        return self._any.order()

    def stage(self, nbytes: int) -> memoryview:
        return self._any.stage(nbytes)

    def copy_in(self, chunk: Chunk, span: Span, staged: memoryview) -> None:
        self._pages[chunk].copy_in(chunk, span, staged)

    def copy_out(self, chunk: Chunk, span: Span) -> Copy:
        return self._pages[chunk].copy_out(chunk, span)

    def settle(self) -> None:
        self._any.settle()

    def zero(self, chunk: Chunk, pages: Sequence[int], block_tokens: int) -> None:
        span = Span(pages, len(pages) * block_tokens, block_tokens)
        self.copy_in(chunk, span, np.zeros(chunk.nbytes(span.num_tokens), np.uint8).data)


class FetchedPages(PageBytes):
    """What a load has read and verified, chunk by chunk. Its "pages" are the numbers of the request's blocks."""

    def __init__(self, pages: PageBytes) -> None:
        self._stage = pages.stage
        self._lock = threading.Lock()
        self.chunks: dict[Chunk, list[tuple[Span, memoryview]]] = {}

    def order(self) -> Callable[[], None]:
        return lambda: None

    def stage(self, nbytes: int) -> memoryview:
        return self._stage(nbytes)

    def copy_in(self, chunk: Chunk, span: Span, staged: memoryview) -> None:
        with self._lock:
            self.chunks.setdefault(chunk, []).append((span, staged))

    def copy_out(self, chunk: Chunk, span: Span) -> Copy:
        raise NotImplementedError("what was fetched is only copied into blocks")

    def settle(self) -> None:
        """Nothing to do: nothing is copied out."""


class TablePages(Sequence[int]):
    """The pages of a request in one of vLLM's groups, by the number of the request's block of 16 tokens."""

    def __init__(self, table: BlockTable, pages_per_block: int) -> None:
        self._table = table
        self._pages_per_block = pages_per_block

    def __len__(self) -> int:
        return (self._table.first + len(self._table.ids)) * self._pages_per_block

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number, page = divmod(index, self._pages_per_block)
        place = number - self._table.first
        block = self._table.ids[place] if 0 <= place < len(self._table.ids) else 0
        return block * self._pages_per_block + page if block else NULL_PAGE
