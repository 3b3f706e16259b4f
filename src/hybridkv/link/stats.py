"""Counters of a link. docs/stats.md explains each."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridkv.link.arrival import Arrival
    from hybridkv.link.push import Push

_LOCK = threading.Lock()
"""Held to change counters: several threads of a link do."""


@dataclass(slots=True)
class LinkStats:
    """Counters of both halves. They only grow, but for `quarantined`."""

    offers: int = 0
    """Prompts that were computed here for another engine."""
    sent_requests: int = 0
    sent_bytes: int = 0
    sent_descriptors: int = 0
    """Runs of bytes that were written to consumers."""
    received_requests: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    received_descriptors: int = 0
    full_attention_bytes: int = 0
    """What the received requests would have taken if every layer kept all tokens."""
    quarantined: int = 0
    """Transfers that were given up and whose pages may still be written to."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase: connect, claim (from asking to its answer), arrive (to the last byte), verify, push, checksum."""
    failures: Counter[str] = field(default_factory=Counter)
    """By kind: docs/disaggregation.md lists them."""

    def count_failure(self, kind: str) -> None:
        with _LOCK:
            self.failures[kind] += 1

    def spent(self, phase: str, seconds: float) -> None:
        with _LOCK:
            self.seconds[phase] += seconds

    def sent(self, push: Push) -> None:
        """Count a push that is over."""
        with _LOCK:
            self.sent_bytes += push.num_bytes
            self.sent_descriptors += push.num_descriptors
            self.seconds["push"] += time.monotonic() - push.began
            self.seconds["checksum"] += push.checksum_seconds
            if push.failure is None:
                self.sent_requests += 1

    def received(self, arrival: Arrival) -> None:
        """Count an arrival that is complete."""
        with _LOCK:
            self.received_requests += 1
            self.received_tokens += arrival.end - arrival.start
            self.received_bytes += arrival.num_bytes
            self.received_descriptors += arrival.num_descriptors
            self.full_attention_bytes += arrival.full_attention_bytes

    def snapshot(self) -> LinkStats:
        with _LOCK:
            seconds = defaultdict(float, self.seconds)
            return replace(self, seconds=seconds, failures=Counter(self.failures))
