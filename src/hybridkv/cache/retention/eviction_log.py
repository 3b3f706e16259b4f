"""The eviction log: evicted items by block key. Policies learn from requests for items that were evicted before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridkv.cache.retention.policy import Numbers


class Eviction(NamedTuple):
    """Log entry of an evicted item."""

    position: int
    turn: int
    """Conversation turn of a request that would have continued it."""
    cohort: Numbers
    """Its cohort in the eviction policy."""
    last_used: int
    is_superseded: bool
    evicted_at: int = 0
    """Number of the request during which it was evicted."""


class EvictionLog:
    """A bounded number of entries; the oldest are dropped first."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._by_key: OrderedDict[bytes, Eviction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def remember(self, key: bytes, eviction: Eviction) -> None:
        self._by_key.pop(key, None)
        self._by_key[key] = eviction
        if len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def recall(self, keys: Sequence[bytes]) -> Eviction | None:
        """Remove and return the deepest entry among consecutive blocks."""
        if self._by_key.keys().isdisjoint(keys):  # fast path, nearly always taken
            return None
        deepest = next(key for key in reversed(keys) if key in self._by_key)
        return self._by_key.pop(deepest)

    def deepest(self, keys: Sequence[bytes]) -> Eviction | None:
        """The deepest entry among consecutive blocks. It stays in the log."""
        if self._by_key.keys().isdisjoint(keys):
            return None
        return self._by_key[next(key for key in reversed(keys) if key in self._by_key)]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove the entries of blocks that are gone for another reason."""
        for key in keys:
            self._by_key.pop(key, None)

    def clear(self) -> None:
        self._by_key.clear()
