"""What was evicted, by name: so that asking for it again can be learned from, and told from what was never seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.cache.retention.policy import Numbers


class Eviction(NamedTuple):
    """What is remembered of something that was evicted."""

    position: int
    turn: int
    """Of a request that would have continued it."""
    cohort: Numbers
    """Its prospects, as the eviction policy saw them."""
    last_used: int
    is_superseded: bool


class EvictionLog:
    """A bounded number of them; the oldest are forgotten first."""

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
        """The deepest eviction among consecutive blocks; its entry is removed."""
        if self._by_key.keys().isdisjoint(keys):  # quick, and nearly always so
            return None
        deepest = next(key for key in reversed(keys) if key in self._by_key)
        return self._by_key.pop(deepest)

    def clear(self) -> None:
        self._by_key.clear()
