"""Copies of rows into pages and out of them. Nothing here knows how pages are allocated.

Rows are read into a buffer outside the pages first and copied into them once they have been checked. So a read that
hangs or returns wrong bytes never touches a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hybridkv.plan import GroupPlan, Row


class Copy(NamedTuple):
    """Bytes copied out of pages. They are valid once `wait` has returned."""

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
        """A buffer outside the pages for the row of `count` pages, for a store to read into."""

    @abstractmethod
    def copy_in(self, group: GroupPlan, row: Row, pages: Sequence[int | None], staged: memoryview) -> None:
        """Copy a staged row into its pages. A page of None is skipped. The copy is complete on return."""

    @abstractmethod
    def copy_out(self, group: GroupPlan, row: Row, pages: Sequence[int]) -> Copy:
        """Copy the row of each page as it is now, one after the other."""

    @abstractmethod
    def settle(self) -> None:
        """Work submitted after this call may overwrite pages that were copied out."""


class HostPages(PageBytes):
    """Pages in host memory, copied by the CPU."""

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self._bytes = memoryview(buffer).cast("B")

    def order(self) -> Callable[[], None]:
        return _nothing

    def stage(self, row: Row, count: int) -> memoryview:
        return np.empty(row.nbytes * count, np.uint8).data

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
        """Nothing to do: copies are complete on return."""

    def _view(self, group: GroupPlan, row: Row, page: int) -> memoryview:
        start = group.page_offset(page) + row.offset_bytes
        return self._bytes[start : start + row.nbytes]


def _nothing() -> None:
    """Nothing to wait for."""
