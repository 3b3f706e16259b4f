"""Counters of streaming."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamStats:
    """Counters since the start. Every load that has ended is counted in either `loads` or `failures`."""

    lookups: int = 0
    found: int = 0
    """Lookups that extended the prefix in memory."""
    slow_lookups: int = 0
    """Lookups that timed out."""
    failed_lookups: int = 0
    """Lookups that raised."""
    skipped_lookups: int = 0
    """Lookups that were not tried, because lookups or reads hang on all threads."""
    loads: Counter[str] = field(default_factory=Counter)
    """Complete loads, by the mode in which they ended: async or layerwise."""
    late_loads: int = 0
    """Layerwise loads that became asynchronous because other requests waited."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed loads, by the first reason: missing, corrupt, unknown, fault, timeout, error or aborted."""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    """Bytes read by loads, whether they succeeded or not."""
    load_seconds: float = 0.0
    """Sum over loads of the time from start to last row."""
    wait_seconds: float = 0.0
    """Time that steps have waited for rows."""
    dumped: int = 0
    """Objects that became visible."""
    dumped_bytes: int = 0
    dumps_dropped: int = 0
    """Objects that were not written because too many bytes were waiting."""
    dumps_failed: int = 0
    dumps_discarded: int = 0
    """Objects discarded because their step was not committed for the request."""
    dump_bytes_waiting: int = 0
