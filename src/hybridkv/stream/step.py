"""The transfers of one step: the loads that its layers wait for, and the objects that they dump."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from hybridkv.stream.dump import Dumper, Outgoing
from hybridkv.stream.load import Load
from hybridkv.stream.times import LayerTime

STEP_WAIT_S = 0.05
"""Longest time that a step waits for rows, all loads and layers together, while other requests wait.

It is ten times what `auto` accepts for a load beside other requests, so loads of the predicted length are rarely late.
It is about one step of a large model, so a reply beside the load pauses once and briefly.
"""
_SLICE_S = 0.005
"""A step that waits looks this often whether other requests wait by now."""


class StepTransfers:
    """Called before and after every layer of a step. Asynchronous loads are not part of it.

    An owner is the caller's key for one of the step's requests. Each load and each object belongs to one.

    While other requests wait, the step waits at most `STEP_WAIT_S` in total. A load whose rows are missing after that
    is late: the step goes on without them, and its results for this owner are invalid. The load itself continues.
    """

    def __init__(self, dumper: Dumper, others_wait: Callable[[], bool] | None = None) -> None:
        """`others_wait`: whether requests wait that do not need the rows. Default: none ever does."""
        self.loads: dict[Hashable, Load] = {}
        """By owner: loads that the step waits for, layer by layer."""
        self.late: set[Hashable] = set()
        """Owners of loads that the step no longer waits for."""
        self.wait_seconds = 0.0
        self.layers: list[LayerTime] = []
        """When layers ran, if any load is part of the step."""
        self.has_run = False
        self._dumper = dumper
        self._others_wait = others_wait or _never
        self._spent_s = 0.0
        """Time that the step has waited while other requests waited."""
        self._due: dict[int, list[tuple[Outgoing, int]]] = {}
        """By layer: chunks that can be copied out once the layer has run."""
        self._unjudged: dict[Hashable, list[Outgoing]] = {}
        self._judged: list[tuple[Outgoing, bool]] = []

    @property
    def has_transfers(self) -> bool:
        """Whether any layer loads or dumps."""
        return bool(self.loads or self._unjudged)

    def add(self, owner: Hashable, outgoing: Outgoing) -> None:
        """Add an object whose last tokens this step computes."""
        self._unjudged.setdefault(owner, []).append(outgoing)
        for number, chunk in enumerate(outgoing.group.chunks):
            self._due.setdefault(chunk.row.last_layer, []).append((outgoing, number))

    def before_layer(self, layer: int) -> None:
        before = self.wait_seconds
        self._wait_for_all(lambda load, most_s: load.wait(layer, most_s))
        if self.loads:
            now = time.monotonic()
            self.layers.append(LayerTime(layer, now, now, self.wait_seconds - before))

    def _wait_for_all(self, wait: Callable[[Load, float], bool]) -> None:
        """Wait for the loads that are not late. `wait`: waits for one; False if the time has passed before its end."""
        for owner, load in self.loads.items():
            if owner not in self.late and not self._wait(load, wait):
                self.late.add(owner)

    def _wait(self, load: Load, wait: Callable[[Load, float], bool]) -> bool:
        """Wait for one load. False if it is late."""
        while True:
            others_wait, start = self._others_wait(), time.perf_counter()
            left_s = max(0.0, STEP_WAIT_S - self._spent_s)
            is_there = wait(load, min(_SLICE_S, left_s) if others_wait else _SLICE_S)
            waited_s = time.perf_counter() - start
            self.wait_seconds += waited_s
            self._spent_s += waited_s if others_wait else 0.0
            if is_there or (others_wait and not left_s):
                return is_there

    def after_layer(self, layer: int) -> None:
        if self.layers and self.layers[-1].layer == layer:
            self.layers[-1] = self.layers[-1]._replace(end=time.monotonic())
        for outgoing, number in self._due.pop(layer, ()):
            self._dumper.chunk(outgoing, number)

    def after_last_layer(self) -> None:
        """All layers have run. Rows of what the last layer or the final norm gives are complete only now."""
        for layer in list(self._due):
            self.after_layer(layer)

    def finish(self) -> None:
        """All layers have run: end the loads that are not late. A second call does nothing."""
        self._wait_for_all(lambda load, most_s: load.finish(most_s))
        self.has_run = True

    def give_up(self) -> None:
        """The step has failed: give up its loads, late ones included."""
        for load in self.loads.values():
            if not load.is_over:
                load.give_up("aborted", RuntimeError("the step failed"))
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


def _never() -> bool:
    """Default of `others_wait`."""
    return False
