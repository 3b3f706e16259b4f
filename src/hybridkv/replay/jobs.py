"""What a concurrent replay moves around: requests that have arrived, those that run, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from hybridkv.cache import Lease
from hybridkv.replay.traces import TraceRequest


@dataclass(slots=True)
class Job:
    """One request that has arrived."""

    index: int
    ready_s: float
    computed: int = 0
    """Tokens computed before it was preempted; 0: it has not started yet."""
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


class Event(Enum):
    ARRIVAL = auto()
    PREFILLED = auto()
    DECODED = auto()
