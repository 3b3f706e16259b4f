"""What streaming counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamStats:
    """Counters since the start. Every load that began has ended in one of `loads` or `failures`, or is under way."""

    lookups: int = 0
    found: int = 0
    """Lookups that found something to add."""
    slow_lookups: int = 0
    """Lookups that timed out."""
    failed_lookups: int = 0
    """Lookups that raised."""
    skipped_lookups: int = 0
    """Lookups that were not tried, because lookups or reads hang on all threads."""
    loads: Counter[str] = field(default_factory=Counter)
    """Loads that came whole, by mode: async or layerwise."""
    failures: Counter[str] = field(default_factory=Counter)
    """Loads that failed, by what went wrong first: missing, corrupt, fault, timeout or error; or were aborted."""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    """Read for loads, whether they succeeded or not."""
    load_seconds: float = 0.0
    """From the start of each load to its last row, all loads together."""
    wait_seconds: float = 0.0
    """How long steps have waited for rows."""
    dumped: int = 0
    """Objects that became visible."""
    dumped_bytes: int = 0
    dumps_dropped: int = 0
    """Objects that were not written because too much was waiting."""
    dumps_failed: int = 0
    dumps_discarded: int = 0
    """Objects whose step did not count after all."""
    dump_bytes_waiting: int = 0
