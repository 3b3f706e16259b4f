"""Counters that several threads add to."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

from hybridkv.errors import StoreFault
from hybridkv.store.store import StoreStats


class Counters:
    """`with counters as stats: stats.hits += 1`"""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats = StoreStats()

    def __enter__(self) -> StoreStats:
        self._lock.acquire()
        return self._stats

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.release()

    def copy(self) -> StoreStats:
        with self._lock:
            return replace(self._stats)

    def faults(self) -> _Faults:
        """Context manager that counts a StoreFault and lets it propagate."""
        return _Faults(self)


class _Faults:
    __slots__ = ("_counters",)

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and issubclass(kind, StoreFault):
            with self._counters as stats:
                stats.faults += 1
