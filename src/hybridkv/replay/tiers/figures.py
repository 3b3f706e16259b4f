"""What a replay reports about its tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierReport:
    """The numbers of one tier. Bytes are those of all ranks."""

    size_bytes: int
    bytes_per_s: float
    latency_s: float
    hit_tokens: int
    """Prompt tokens that were loaded from it, counted once a request."""
    read_bytes: int
    written_bytes: int
    peak_bytes: int
    spare_bytes: int
    """Bytes at the end that only fill idle room."""
    evicted: int
    """Objects."""
    dropped: int
    """Objects that are larger than the tier."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The numbers of all loads together."""

    rule: str
    loads: int
    """Loads that were used."""
    slower: int | None
    """Used loads that took longer than computing the same tokens. None: compute was not timed."""
    declined: int
    """Loads that were not begun because computing is faster."""
    timeouts: int
    """Loads that were given up; their tokens were computed."""
    seconds: Mapping[str, float] | None
    """Percentiles of the time of a load, the wait for other loads included; None if requests have no time."""
