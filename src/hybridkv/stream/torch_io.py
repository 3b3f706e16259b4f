"""Rows in a torch buffer: CPU memory is copied directly, GPU memory through pinned memory.

GPU transfers run on their own CUDA streams. A copy into pages runs after all work that was submitted before `order`. A
copy out of pages runs before all work that is submitted after `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hybridkv.plan import GroupPlan, Row
from hybridkv.stream.row_io import Copy, HostPages, PageBytes

_WORD = torch.int64
"""Element type of GPU copies. Rows begin and end on multiples of 64 bytes."""


def page_bytes(buffer: torch.Tensor) -> PageBytes:
    """Page access for an arena. `buffer`: all its bytes, contiguous."""
    return DevicePages(buffer) if buffer.device.type == "cuda" else HostPages(memoryview(buffer.numpy()))


class DevicePages(PageBytes):
    """Arena bytes on a GPU. A row of many pages is one transfer and one kernel that scatters or gathers it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._device = buffer.device
        self._words = buffer.view(_WORD)
        self._in = torch.cuda.Stream(buffer.device)
        self._out = torch.cuda.Stream(buffer.device)

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
            self._rows(group, row)[places // group.pages_per_slab, places % group.pages_per_slab] = rows
            done = self._in.record_event()
        done.synchronize()

    def copy_out(self, group: GroupPlan, row: Row, pages: Sequence[int]) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        staged = _pinned(row, len(pages))
        with torch.cuda.stream(self._out):
            places = torch.tensor(pages, device=self._device)
            rows = self._rows(group, row)[places // group.pages_per_slab, places % group.pages_per_slab]
            staged.copy_(rows, non_blocking=True)
            done = self._out.record_event()
        return Copy(memoryview(staged.numpy()).cast("B"), done.synchronize)

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._out)

    def _rows(self, group: GroupPlan, row: Row) -> torch.Tensor:
        """The row of every page of the arena: `[slabs, pages of a slab, words]`."""
        size = _WORD.itemsize
        slab, stride = group.slab_bytes // size, group.stride_bytes // size
        shape = len(self._words) // slab, group.pages_per_slab, row.nbytes // size
        return self._words.as_strided(shape, (slab, stride, 1), row.offset_bytes // size)


def _pinned(row: Row, count: int) -> torch.Tensor:
    """Pinned host memory for the row of `count` pages."""
    return torch.empty((count, row.nbytes // _WORD.itemsize), dtype=_WORD, pin_memory=True)
