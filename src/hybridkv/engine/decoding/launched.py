"""A decoding step that was submitted to the device and whose results have not been read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridkv.cache import Lease, StepTables
from hybridkv.cache.arena.pages import Pages
from hybridkv.engine.decoding.decoder import Decoded
from hybridkv.engine.decoding.step_buffer import Moved
from hybridkv.engine.request import Sample


class Entry(NamedTuple):
    """A sample's row of the step."""

    row: int
    """Rows that have ended leave gaps."""
    sample: Sample
    lease: Lease
    """The sample's lease when the step began. The sample may have been aborted since."""
    tables: StepTables
    sent: Mapping[str, Pages]
    """The page tables that the device has. Those of `tables` may differ: `commit` replaces the page of a block that
    another request has published first."""

    @property
    def is_alive(self) -> bool:
        """Whether the sample still waits for the result."""
        return self.sample.lease is self.lease and self.lease.in_flight


class Launched(NamedTuple):
    decoded: Decoded
    entries: Sequence[Entry]


class LookAhead(NamedTuple):
    """What is known of the step after a decoding step before that one's tokens are known."""

    following: Mapping[int, StepTables]
    """By row: tables of samples whose next step may run before this one is committed, unless their token ends them."""
    moved: Moved
    is_free: bool
    """Whether the device can begin the next step by itself: it knows which tokens end a row, and no more is needed."""
