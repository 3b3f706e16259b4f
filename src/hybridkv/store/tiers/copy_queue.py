"""Queue of copies between tiers, bounded in bytes. One background thread makes the copies."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import NamedTuple

logger = logging.getLogger("hybridkv.store")


class CopyTask(NamedTuple):
    """One object to copy."""

    nbytes: int
    run: Callable[[], None]
    """Should not raise: an error is logged, and the task is dropped."""


class CopyQueue:
    """First in, first out. The thread starts with the first task."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changed = Condition()
        self._waiting: deque[CopyTask] = deque()
        self._nbytes = 0
        """Bytes of tasks that wait or run."""
        self._reserved = 0
        """Bytes reserved and not used yet."""
        self._closed = False
        self._thread: Thread | None = None

    def offer(self, task: CopyTask) -> bool:
        """Queue a task. False: the queue is full. An empty queue accepts a task larger than the bound."""
        with self._changed:
            return self._has_room(task.nbytes, self._nbytes) and self._add(task)

    def reserve(self, nbytes: int) -> bool:
        """Reserve room for a task, to be queued by `send` or given up by `release`. False: the queue is full.

        `offer` ignores reservations: its task may have the only copy of an object, a reserved task never has.
        """
        with self._changed:
            has_room = self._has_room(nbytes, self._nbytes + self._reserved)
            self._reserved += nbytes if has_room else 0
            return has_room

    def send(self, task: CopyTask) -> bool:
        """Queue a task that room was reserved for. False: the queue is closed."""
        with self._changed:
            self._reserved -= task.nbytes
            return not self._closed and self._add(task)

    def release(self, nbytes: int) -> None:
        """Give up a reservation."""
        with self._changed:
            self._reserved -= nbytes

    def hand_over(self, task: CopyTask, patience_s: float) -> bool:
        """Queue a task, waiting for room. False: the queue is closed, or no task ended within `patience_s`."""
        with self._changed:
            while not self._has_room(task.nbytes, self._nbytes):
                if self._closed or not self._changed.wait(patience_s):
                    return False
            return self._add(task)

    def drain(self, patience_s: float | None = None) -> bool:
        """Wait until all tasks have ended. False: none ended within `patience_s`."""
        with self._changed:
            while self._nbytes:
                if not self._changed.wait(patience_s):
                    return False
        return True

    def close(self, patience_s: float) -> bool:
        """Wait for all tasks, then stop. False: one hangs, and those after it are dropped."""
        is_done = self.drain(patience_s)
        with self._changed:
            self._closed = True
            if not is_done:
                self._waiting.clear()
            self._changed.notify_all()
        if is_done and self._thread is not None:
            self._thread.join()
        return is_done

    def _has_room(self, nbytes: int, taken: int) -> bool:
        return not self._closed and (not taken or taken + nbytes <= self._most_bytes)

    def _add(self, task: CopyTask) -> bool:
        self._nbytes += task.nbytes
        self._waiting.append(task)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="hybridkv-store", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return True

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.run()
            except BaseException:  # no store should raise it: this log line is the only sign of the bug
                logger.exception("an object could not be copied between tiers")
            with self._changed:
                self._nbytes -= task.nbytes
                self._changed.notify_all()

    def _next(self) -> CopyTask | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None
