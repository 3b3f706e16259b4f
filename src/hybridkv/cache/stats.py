"""Counters and events of the cache."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. They count tokens and blocks, never bytes; the plan has the sizes."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that the index did not supply, by reason."""
    checkpoints_kept: int = 0
    checkpoints_hit: int = 0
    kept_by_kind: Counter[str] = field(default_factory=Counter)
    """`checkpoints_kept` by the reason they were kept."""
    hit_by_kind: Counter[str] = field(default_factory=Counter)
    places_declined: int = 0
    """Likely places without a checkpoint: it was worth less than what would be evicted for it."""
    checkpoints_skipped: int = 0
    """Wanted checkpoints that were not kept because there was no room."""
    checkpoints_evicted: int = 0
    blocks_published: int = 0
    blocks_shared: int = 0
    """Blocks that were computed, but that another request published first; one copy is kept."""
    blocks_evicted: int = 0
    taps_evicted: int = 0
    """Pages of tapped layers that were evicted by themselves: the blocks stay."""
    loaded_tokens: int = 0
    """Prompt tokens that the index did not have and that were loaded."""
    rollbacks: int = 0
    rolled_back_tokens: int = 0
    invalid_pages: int = 0
    no_room: int = 0
    compactions: int = 0
    pages_moved: int = 0
    pins: int = 0
    pins_expired: int = 0
    pins_broken: int = 0
    """Pins that ended because pages were invalidated."""

    def copy(self) -> CacheStats:
        """The counters as they are now."""
        return replace(
            self,
            misses=Counter(self.misses),
            kept_by_kind=Counter(self.kept_by_kind),
            hit_by_kind=Counter(self.hit_by_kind),
        )


class Event(NamedTuple):
    kind: str
    """stored or removed (with `keys`), hit (with `tokens`) or missed (with `tokens` and `reason`)."""
    keys: tuple[bytes, ...] = ()
    tokens: int = 0
    reason: str = ""


class Events:
    """A bounded queue of events. If it is full, the oldest event is dropped and counted."""

    def __init__(self, limit: int) -> None:
        self.enabled = limit > 0
        self.num_dropped = 0
        self._waiting: deque[Event] = deque(maxlen=max(limit, 1))

    def stored(self, keys: Sequence[bytes]) -> None:
        self._add(Event("stored", tuple(keys)))

    def removed(self, keys: Sequence[bytes]) -> None:
        self._add(Event("removed", tuple(keys)))

    def hit(self, tokens: int) -> None:
        self._add(Event("hit", tokens=tokens))

    def missed(self, tokens: int, reason: str) -> None:
        self._add(Event("missed", tokens=tokens, reason=reason))

    def take(self) -> list[Event]:
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def _add(self, event: Event) -> None:
        if self.enabled:
            self.num_dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(event)
