"""Prefetch: objects that a waiting request will load are copied to the faster tiers before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from hybridkv.errors import StoreError
from hybridkv.store.names import ObjectName
from hybridkv.store.store import Reader, Store
from hybridkv.store.tiers.io import copy_object
from hybridkv.workers import Workers

_THREADS = 4
_SHARE = 4
"""Objects that wait to be opened take at most one part in so many of the fastest tier."""
_PATIENCE_S = 60.0
"""An object that has not been opened by then no longer counts: its request has ended, or found it in memory."""
_MOST_WANTED = 65_536


class _Copied(NamedTuple):
    nbytes: int
    at: float


class Prefetcher:
    """Copies objects to the fastest tier, on threads of its own. They start with the first object."""

    def __init__(
        self, tiers: Sequence[Store], on_copied: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tiers = tiers
        self._on_copied = on_copied
        self._clock = clock
        self._lock = Lock()
        self._wanted: dict[ObjectName, None] = {}
        """Objects that no thread has taken yet, in the order in which they were asked for."""
        self._copied: dict[ObjectName, _Copied] = {}
        """Objects that were copied and have not been opened."""
        self._workers: Workers | None = None
        self._is_closed = False

    def want(self, names: Sequence[ObjectName]) -> None:
        with self._lock:
            if self._is_closed or len(self._wanted) + len(names) > _MOST_WANTED:
                return
            new = [name for name in names if name not in self._wanted and name not in self._copied]
            self._wanted.update(dict.fromkeys(new))
            if self._workers is None:
                self._workers = Workers(_THREADS, "hybridkv-prefetch")
            for _ in new:
                self._workers.submit(self._copy_next)

    def opened(self, names: Sequence[ObjectName]) -> None:
        """A request opens these now: those that no thread has taken are left to it."""
        with self._lock:
            for name in names:
                self._wanted.pop(name, None)
                self._copied.pop(name, None)

    def close(self, timeout_s: float) -> None:
        """Copy nothing more. `close` does not wait for copies that hang."""
        with self._lock:
            self._is_closed = True
            self._wanted.clear()
            workers = self._workers
        if workers is not None:
            workers.close(timeout_s)

    def _copy_next(self) -> None:
        with self._lock:
            name = next(iter(self._wanted), None)
            if name is None:
                return  # a request has opened it first
            del self._wanted[name]
        reader = self._open(name)
        if reader is None:
            return
        with reader:
            if not self._reserve(name, reader.header.nbytes):
                return
            try:
                is_copied = copy_object(reader, self._tiers[0])
            except (StoreError, MemoryError):
                is_copied = False
        if is_copied:
            self._on_copied()
        else:
            with self._lock:
                self._copied.pop(name, None)

    def _open(self, name: ObjectName) -> Reader | None:
        """The object of the fastest tier that has it; None if that is the first tier, or if there is none."""
        if any(self._tiers[0].lookup([name])):
            return None
        for store in self._tiers[1:]:
            try:
                return store.open(name)
            except StoreError:
                continue
        return None

    def _reserve(self, name: ObjectName, nbytes: int) -> bool:
        """Whether the fastest tier has room for one more object that waits to be opened."""
        with self._lock:
            before = self._clock() - _PATIENCE_S
            self._copied = {name: one for name, one in self._copied.items() if one.at > before}
            taken = sum(one.nbytes for one in self._copied.values())
            has_room = taken + nbytes <= self._tiers[0].size // _SHARE
            if has_room:
                self._copied[name] = _Copied(nbytes, self._clock())
            return has_room
