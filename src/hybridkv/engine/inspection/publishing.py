"""Snapshots for people who watch, and the last steps.

Snapshots are built on the engine's thread, between two steps, and only while somebody watches. Other threads read the
last one. While there is work, a snapshot is built only if all records and snapshots so far, with this one, stay below
`SHARE` of the time that steps took. While there is none, it delays no request. A record takes some 50 us: only a model
whose prompts take a few milliseconds spends more than that share on records alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hybridkv.engine.inspection.step_log import StepLog

SHARE = 0.01
_WATCHED_S = 5.0
"""A topic is built for so long after `watch`."""


class Snapshot(NamedTuple):
    version: int
    data: dict[str, Any]


class Topic:
    """One kind of snapshot."""

    def __init__(self, every_s: float, version: Callable[[], object], build: Callable[[], dict[str, Any]]) -> None:
        """`version`: while it is the same, a snapshot is as good as a new one."""
        self.every_s = every_s
        self.version = version
        self.build = build
        self.last: Snapshot | None = None
        self.watched_until = 0.0
        self.built_version: object = None
        self.due_at = 0.0
        self.cost_s = 0.0
        """Time that the last snapshot took."""


class Publishing:
    """The topics of one engine, and its last steps."""

    def __init__(self, busy_s: Callable[[], float], has_work: Callable[[], bool]) -> None:
        """`busy_s`: time of all steps so far. `has_work`: whether requests wait for the engine's thread."""
        self._busy_s = busy_s
        self._has_work = has_work
        self.seconds = 0.0
        """Time of the engine's thread for explanations, and for snapshots while there was work."""
        self.num_built = 0
        self.topics: dict[str, Topic] = {}
        self._watched_until = 0.0
        self.steps = StepLog()

    # --- any thread ---------------------------------------------------------------------------------------------------

    def watch(self, names: Iterable[str]) -> None:
        """Build snapshots of these topics for the next seconds."""
        until = time.monotonic() + _WATCHED_S
        for name in names:
            self.topics[name].watched_until = until
        self._watched_until = until

    def hasten(self) -> None:
        """Build the next snapshots as soon as something has changed."""
        for topic in self.topics.values():
            topic.due_at = 0.0

    def latest(self, name: str) -> Snapshot | None:
        return self.topics[name].last

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of the block as time for publishing."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def refresh(self) -> None:
        """Build what is watched, due, changed and affordable."""
        now = time.monotonic()
        if now >= self._watched_until:
            return
        for topic in self.topics.values():
            if now >= topic.due_at and now < topic.watched_until:
                self._build(topic, now)

    def _build(self, topic: Topic, now: float) -> None:
        version, has_work = topic.version(), self._has_work()
        if version == topic.built_version or (has_work and not self._can_afford(topic.cost_s)):
            return
        start = time.perf_counter()
        data = topic.build()
        topic.cost_s = time.perf_counter() - start
        self.seconds += topic.cost_s if has_work else 0.0
        topic.built_version, topic.due_at = version, now + topic.every_s
        self.num_built += 1
        topic.last = Snapshot(self.num_built, data)

    def _can_afford(self, cost_s: float) -> bool:
        return self.seconds + cost_s <= SHARE * self._busy_s()
