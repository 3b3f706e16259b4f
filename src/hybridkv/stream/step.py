"""One step's transfers: what its layers wait for, and what they leave. Made anew for each step, and over with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridkv.stream.dump import Dumper, Outgoing
from hybridkv.stream.load import Load


@dataclass(slots=True)
class StepTransfers:
    """Told of every layer of a step. Loads that are under way beside it are not its business."""

    dumper: Dumper
    loads: Sequence[Load] = ()
    """What the step's own requests wait for, layer by layer."""
    wait_seconds: float = 0.0
    _due: dict[int, list[tuple[Outgoing, int]]] = field(default_factory=dict)
    """By layer: rows that can be taken out once it has run."""

    def add(self, outgoing: Outgoing) -> None:
        """An object whose last rows this step computes."""
        for number, row in enumerate(outgoing.group.rows):
            self._due.setdefault(row.last_layer, []).append((outgoing, number))

    def before_layer(self, layer: int) -> None:
        if self.loads:
            start = time.perf_counter()
            for load in self.loads:
                load.wait(layer)
            self.wait_seconds += time.perf_counter() - start

    def after_layer(self, layer: int) -> None:
        for outgoing, number in self._due.pop(layer, ()):
            self.dumper.row(outgoing, number)
