"""A decoding step that was submitted to the device and whose results have not been read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.cache import Lease, StepTables
from hybridkv.engine.decoding.decoder import Decoded
from hybridkv.engine.request import Sample


class Entry(NamedTuple):
    """A sample's row of the step."""

    row: int
    """Rows that have ended leave gaps."""
    token: int
    """The token that the step computes."""
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
    entries: Sequence[Entry]


class LookAhead(NamedTuple):
    """What is known of the step after a decoding step before that one's tokens are known."""

    steady: Mapping[int, StepTables]
    """By row: the tables of samples that go on in the same pages, unless their token ends them."""
    seeds: npt.NDArray[np.uint64] | None
    """Of the draws, by entry. None if all are greedy."""
