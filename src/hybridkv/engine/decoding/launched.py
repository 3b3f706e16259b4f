"""A decoding step that was submitted to the device and whose results have not been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.cache import Lease, StepTables
from hybridkv.engine.decoding.decoder import Decoded
from hybridkv.engine.request import Sample


class Entry(NamedTuple):
    """A row of the step."""

    sample: Sample
    lease: Lease
    """The sample's lease when the step began. The sample may have been aborted since."""
    tables: StepTables

    @property
    def is_alive(self) -> bool:
        """Whether the sample still waits for the result."""
        return self.sample.lease is self.lease and self.lease.in_flight


class Launched(NamedTuple):
    decoded: Decoded
    began_s: float
    entries: Sequence[Entry]
    """By row."""
