"""Number and bytes of stored objects. Counting lists all of them, so the result is used for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import Usage

_LEAST_S = 10.0
_MOST_S = 300.0
_TIMES = 100
"""A count is used for so many times as long as it took."""


class RecentUsage:
    """What this process writes is added to the last count. Writes of others, and evictions, show at the next count."""

    def __init__(self, count: Callable[[], Usage], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._lock = Lock()
        self._usage: Usage | None = None
        self._fault: StoreFault | None = None
        self._expires_at = 0.0

    def get(self) -> Usage:
        """Raises StoreFault, and the same again without a call for a while: statistics must not wait each time."""
        began = self._clock()
        if began >= self._expires_at:
            self._recount(began)
        with self._lock:
            if self._fault is not None:
                raise self._fault
            assert self._usage is not None
            return self._usage

    def add(self, nbytes: int) -> None:
        with self._lock:
            if self._usage is not None:
                self._usage = Usage(self._usage.objects + 1, self._usage.nbytes + nbytes)

    def forget(self) -> None:
        with self._lock:
            self._expires_at = 0.0

    def _recount(self, began: float) -> None:
        """Counts without the lock, since it may take long."""
        try:
            usage, fault = self._count(), None
        except StoreFault as error:
            usage, fault = None, error
        ended = self._clock()
        with self._lock:
            self._usage, self._fault = usage or self._usage, fault
            good_for_s = _LEAST_S if fault else min(max(_LEAST_S, _TIMES * (ended - began)), _MOST_S)
            self._expires_at = ended + good_for_s
