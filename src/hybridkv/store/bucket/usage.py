"""Estimate of what a bucket holds: counted by a listing, then kept up to date with this process's own writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from hybridkv.store.blobs import Usage

_FRESH_S = 300.0
"""After this time the bucket is listed again, because other processes write and delete too."""


class UsageEstimate:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._objects = 0
        self._nbytes = 0
        self._pending = 0
        self._counted_at: float | None = None

    @property
    def is_fresh(self) -> bool:
        return self._counted_at is not None and self._clock() - self._counted_at < _FRESH_S

    @property
    def usage(self) -> Usage:
        """Objects, and bytes of objects and of those that are being written."""
        with self._lock:
            return Usage(max(self._objects, 0), max(self._nbytes, 0) + self._pending)

    def set(self, objects: int, nbytes: int) -> None:
        with self._lock:
            self._objects, self._nbytes, self._counted_at = objects, nbytes, self._clock()

    def begin(self, nbytes: int) -> None:
        with self._lock:
            self._pending += nbytes

    def end(self, nbytes: int, *, is_kept: bool) -> None:
        """A pending object was written, or was not."""
        with self._lock:
            self._pending -= nbytes
            if is_kept:
                self._objects += 1
                self._nbytes += nbytes

    def remove(self, objects: int, nbytes: int) -> None:
        with self._lock:
            self._objects -= objects
            self._nbytes -= nbytes
