"""The transfers of one step: the loads that its layers wait for, and the objects that they dump."""

from __future__ import annotations

import time
from collections.abc import Hashable

from hybridkv.stream.dump import Dumper, Outgoing
from hybridkv.stream.load import Load


class StepTransfers:
    """Called before and after every layer of a step. Asynchronous loads are not part of it.

    An owner is the caller's key for one of the step's requests. Each load and each object belongs to one.
    """

    def __init__(self, dumper: Dumper) -> None:
        self.loads: dict[Hashable, Load] = {}
        """By owner: loads that the step waits for, layer by layer."""
        self.wait_seconds = 0.0
        self.has_run = False
        self._dumper = dumper
        self._due: dict[int, list[tuple[Outgoing, int]]] = {}
        """By layer: chunks that can be copied out once the layer has run."""
        self._unjudged: dict[Hashable, list[Outgoing]] = {}
        self._judged: list[tuple[Outgoing, bool]] = []

    def add(self, owner: Hashable, outgoing: Outgoing) -> None:
        """Add an object whose last tokens this step computes."""
        self._unjudged.setdefault(owner, []).append(outgoing)
        for number, chunk in enumerate(outgoing.group.chunks):
            self._due.setdefault(chunk.row.last_layer, []).append((outgoing, number))

    def before_layer(self, layer: int) -> None:
        if self.loads:
            start = time.perf_counter()
            for load in self.loads.values():
                load.wait(layer)
            self.wait_seconds += time.perf_counter() - start

    def after_layer(self, layer: int) -> None:
        for outgoing, number in self._due.pop(layer, ()):
            self._dumper.chunk(outgoing, number)

    def after_last_layer(self) -> None:
        """All layers have run. Rows of what the last layer or the final norm gives are complete only now."""
        for layer in list(self._due):
            self.after_layer(layer)

    def finish(self) -> None:
        """All layers have run, or one has failed: end the loads. A second call does nothing."""
        for load in self.loads.values():
            load.finish()
        self.has_run = True

    def judge(self, owner: Hashable, counts: bool) -> None:
        """Set whether the step's results for `owner` count. Takes effect with `publish`."""
        self._judged += [(one, counts) for one in self._unjudged.pop(owner, ())]

    def publish(self) -> None:
        """Publish the objects of owners whose step counts. All others are discarded, and counted."""
        for owner in list(self._unjudged):
            self.judge(owner, False)
        self._due.clear()
        for one, counts in self._judged:
            self._dumper.judge(one, counts)
        self._judged = []
