"""Memory that is registered with Mooncake's client. All bytes pass through it.

Callers' buffers are not registered: an abandoned transfer may write at any later time, and registration is slow with
RDMA.
"""

from __future__ import annotations

import mmap
import time
from bisect import insort
from collections.abc import Callable
from threading import Condition, Lock
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from hybridkv.errors import StoreFault

T = TypeVar("T")

_ALIGNMENT = 4096


class Region:
    """A part of the memory. Its owner releases it once; calls that use it hold it until they return, however late."""

    def __init__(self, staging: Staging, start: int, nbytes: int, is_write: bool) -> None:
        self.view = staging.view[start : start + nbytes]
        self.address = staging.address + start
        self.start, self.nbytes, self.is_write = start, nbytes, is_write
        self._staging = staging
        self._users = 1
        self._lock = Lock()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_free = self._users == 0
        if is_free:
            self._staging.give_back(self)

    def used_by(self, call: Callable[[], T]) -> Callable[[], T]:
        """The same call, which holds the region while it runs. It raises if the owner has released it before."""

        def run() -> T:
            with self._lock:
                if self._users == 0:
                    raise StoreFault("a call began after its caller had given up")
                self._users += 1
            try:
                return call()
            finally:
                self.release()

        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Staging:
    """First-fit allocator. Objects being written get one half of the memory, so that reads always go on."""

    def __init__(self, label: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = memoryview(mmap.mmap(-1, nbytes))
        self.address: int = np.frombuffer(self.view, np.uint8).ctypes.data
        self._label = label
        self._changed = Condition()
        half = nbytes // 2 // _ALIGNMENT * _ALIGNMENT
        self._free = {True: [(0, half)], False: [(half, nbytes - half)]}
        """(start, length), sorted, never adjacent. True: the half for writes."""
        self.read_bytes = nbytes - half

    def take(self, nbytes: int, timeout_s: float) -> Region:
        """Memory for a read. Raises StoreFault if there is none within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (start := self._allocate(nbytes, is_write=False)) is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise StoreFault(f"{self._label}: no {nbytes:,} bytes of transfer memory; raise buffer=")
        return Region(self, start, nbytes, is_write=False)

    def take_for_write(self, nbytes: int) -> Region | None:
        with self._changed:
            start = self._allocate(nbytes, is_write=True)
        return None if start is None else Region(self, start, nbytes, is_write=True)

    def give_back(self, region: Region) -> None:
        with self._changed:
            insort(self._free[region.is_write], (region.start, _rounded(region.nbytes)))
            self._free[region.is_write] = _merged(self._free[region.is_write])
            self._changed.notify_all()

    def _allocate(self, nbytes: int, *, is_write: bool) -> int | None:
        wanted, free = _rounded(nbytes), self._free[is_write]
        for number, (start, length) in enumerate(free):
            if length >= wanted:
                free[number : number + 1] = [(start + wanted, length - wanted)] if length > wanted else []
                return start
        return None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _merged(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, length in free:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found
