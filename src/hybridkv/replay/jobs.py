"""What a concurrent replay moves around: requests that have arrived, those that run, and what happens to them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hybridkv.cache import Lease, StepTables
from hybridkv.replay.tiers.request import TieredRequest
from hybridkv.replay.tiers.tiers import TierLoad
from hybridkv.replay.traces import TraceRequest


@dataclass(slots=True)
class Job:
    """One request that has arrived."""

    index: int
    ready_s: float
    computed: int = 0
    """Tokens computed before it was preempted."""
    has_started: bool = False
    has_first_token: bool = False
    follows: bool = False

    @property
    def rank(self) -> tuple[float, int]:
        """Small: old."""
        return self.ready_s, self.index


@dataclass(slots=True)
class Running:
    """A job with a lease."""

    job: Job
    request: TraceRequest
    reply: bytes
    lease: Lease
    before: int
    """Tokens of it that had been computed before it started, by anyone."""
    stored: TieredRequest | None = None
    """Its way to the tiers, if there are any."""
    tables: StepTables | None = None
    """The prefill step in flight."""
    load: TierLoad | None = None
    """The load in flight."""


class Event(Enum):
    ARRIVAL = auto()
    LOADED = auto()
    PREFILLED = auto()
    DECODED = auto()


class Events:
    """What happens next, by time; what happens at the same time, in the order in which it was added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event, int, Running | None]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time_s: float, event: Event, index: int, running: Running | None) -> None:
        heapq.heappush(self._heap, (time_s, self._num_added, event, index, running))
        self._num_added += 1

    def take(self) -> tuple[float, Event, int, Running | None]:
        """Time, event, the request's index, and the running request if it has started."""
        time_s, _, event, index, running = heapq.heappop(self._heap)
        return time_s, event, index, running


class Turns:
    """Which requests wait for the reply that they contain."""

    def __init__(self, continued_by: Sequence[int | None]) -> None:
        self.early: set[int] = set()
        """Requests whose time has come before the replies they contain were finished."""
        self._continued_by = continued_by
        self._before = [0] * len(continued_by)
        """By request: turns before it that have not ended."""
        for turn in continued_by:
            if turn is not None:
                self._before[turn] += 1

    def is_early(self, index: int) -> bool:
        """Whether the request has to wait; `ended` says when it may arrive."""
        if self._before[index]:
            self.early.add(index)
        return index in self.early

    def ended(self, index: int) -> int | None:
        """A request has ended. Returns the turn that may arrive now, if one has waited for it."""
        turn = self._continued_by[index]
        if turn is None:
            return None
        self._before[turn] -= 1
        if self._before[turn] or turn not in self.early:
            return None
        self.early.remove(turn)
        return turn
