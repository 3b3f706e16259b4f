"""The bytes of rows in the arena, and how they get in and out: plain copies on a CPU, pinned memory on a GPU.

Rows are read into a buffer outside the arena first and copied into their pages once they have been checked. So a read
that hangs, or that brings wrong bytes, never touches a page.

Transfers on a GPU run on a stream of their own. What they write is ordered after all that was submitted when they were
prepared; what they read is ordered before all that is submitted after `settle`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hybridkv.memory import Memory
from hybridkv.plan import GroupPlan, Row

_WORD = torch.int64
"""What rows are copied as on a GPU: they begin and end on 64 bytes."""


class Copy(NamedTuple):
    """Bytes that were copied out of the arena, or will be as soon as `wait` returns."""

    data: memoryview
    wait: Callable[[], None]


class PageBytes(ABC):
    """Rows of pages, as bytes."""

    @abstractmethod
    def order(self) -> Callable[[], None]:
        """Call on the engine thread. Returns a function for the reader thread, to be called before `copy_in`.

        It orders that copy after everything that was submitted before this call.
        """

    @abstractmethod
    def stage(self, row: Row, count: int) -> memoryview:
        """A buffer outside the arena for the row of `count` pages, for a store to read into."""

    @abstractmethod
    def copy_in(self, group: GroupPlan, row: Row, pages: Sequence[int | None], staged: memoryview) -> None:
        """Copy a staged row into its pages. A page of None is skipped. The copy is complete on return."""

    @abstractmethod
    def copy_out(self, group: GroupPlan, row: Row, pages: Sequence[int]) -> Copy:
        """The row of each page, one after the other, as it is now."""

    @abstractmethod
    def settle(self) -> None:
        """Pages that were copied out may be written again by what is submitted from now on."""


def page_bytes(memory: Memory) -> PageBytes:
    return DevicePages(memory) if memory.device.type == "cuda" else HostPages(memory)


class HostPages(PageBytes):
    """Arena bytes that the processor reads and writes itself."""

    def __init__(self, memory: Memory) -> None:
        self._bytes = memoryview(memory.buffer.numpy()).cast("B")

    def order(self) -> Callable[[], None]:
        return _nothing

    def stage(self, row: Row, count: int) -> memoryview:
        return memoryview(torch.empty(row.nbytes * count, dtype=torch.uint8).numpy()).cast("B")

    def copy_in(self, group: GroupPlan, row: Row, pages: Sequence[int | None], staged: memoryview) -> None:
        for index, page in enumerate(pages):
            if page is not None:
                self._view(group, row, page)[:] = staged[index * row.nbytes : (index + 1) * row.nbytes]

    def copy_out(self, group: GroupPlan, row: Row, pages: Sequence[int]) -> Copy:
        data = memoryview(bytearray(row.nbytes * len(pages)))
        for index, page in enumerate(pages):
            data[index * row.nbytes : (index + 1) * row.nbytes] = self._view(group, row, page)
        return Copy(data, _nothing)

    def settle(self) -> None:
        """Copies are done when they are made."""

    def _view(self, group: GroupPlan, row: Row, page: int) -> memoryview:
        start = page * group.stride_bytes + row.offset_bytes
        return self._bytes[start : start + row.nbytes]


class DevicePages(PageBytes):
    """Arena bytes on a GPU. A row of many pages is one transfer and one kernel that scatters or gathers it."""

    def __init__(self, memory: Memory) -> None:
        self._device = memory.device
        self._words = memory.buffer.view(_WORD)
        self._in = torch.cuda.Stream(memory.device)
        self._out = torch.cuda.Stream(memory.device)

    def order(self) -> Callable[[], None]:
        submitted = torch.cuda.current_stream(self._device).record_event()
        return lambda: self._in.wait_event(submitted)

    def stage(self, row: Row, count: int) -> memoryview:
        return memoryview(_pinned(row, count).numpy()).cast("B")

    def copy_in(self, group: GroupPlan, row: Row, pages: Sequence[int | None], staged: memoryview) -> None:
        words = torch.frombuffer(staged, dtype=_WORD).view(len(pages), -1)
        wanted = [index for index, page in enumerate(pages) if page is not None]
        with torch.cuda.stream(self._in):
            rows = words.to(self._device, non_blocking=True)
            if len(wanted) < len(pages):
                rows = rows[torch.tensor(wanted, device=self._device)]
            places = torch.tensor([page for page in pages if page is not None], device=self._device)
            self._rows(group, row).index_copy_(0, places, rows)
            done = self._in.record_event()
        done.synchronize()

    def copy_out(self, group: GroupPlan, row: Row, pages: Sequence[int]) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        staged = _pinned(row, len(pages))
        with torch.cuda.stream(self._out):
            places = torch.tensor(pages, device=self._device)
            staged.copy_(self._rows(group, row).index_select(0, places), non_blocking=True)
            done = self._out.record_event()
        return Copy(memoryview(staged.numpy()).cast("B"), done.synchronize)

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._out)

    def _rows(self, group: GroupPlan, row: Row) -> torch.Tensor:
        """The row of every page of the arena: `[pages, words]`."""
        size, stride = _WORD.itemsize, group.stride_bytes // _WORD.itemsize
        shape = len(self._words) // stride, row.nbytes // size
        return self._words.as_strided(shape, (stride, 1), row.offset_bytes // size)


def _pinned(row: Row, count: int) -> torch.Tensor:
    """Host memory for the row of so many pages, that a GPU can reach by itself."""
    return torch.empty((count, row.nbytes // _WORD.itemsize), dtype=_WORD, pin_memory=True)


def _nothing() -> None:
    """There is nothing to wait for."""
