"""When rows came and layers ran: what a drawing of one load needs."""

from __future__ import annotations

from typing import NamedTuple


class RowTime(NamedTuple):
    """One row of a load, from the start of its read until it lay in its pages."""

    group: str
    first_layer: int
    last_layer: int
    num_bytes: int
    start: float
    """Seconds, on the clock of the load."""
    end: float

    def joined(self, other: RowTime) -> RowTime:
        """This row and another one of the same layers."""
        return self._replace(
            num_bytes=self.num_bytes + other.num_bytes, start=min(self.start, other.start), end=max(self.end, other.end)
        )


class LayerTime(NamedTuple):
    """One layer of a step that loads."""

    layer: int
    start: float
    """When its rows were there; seconds of `time.monotonic`."""
    end: float
    waited: float
    """Seconds that it waited for its rows before."""
