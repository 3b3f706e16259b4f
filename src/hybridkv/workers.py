"""Threads that run what is submitted to them, the oldest first. They know nothing of rows, stores or texts.

They are daemons: a thread that hangs keeps neither the engine nor the process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """A few threads and one queue."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        return len(self._threads)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Never waits. The future gets the result or the error; it can be cancelled until the function begins.

        What is submitted after `close` never runs.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:  # raised again where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(run)
        return future

    def close(self, timeout_s: float = 0.0) -> bool:
        """Run what was submitted so far, then end. False: some of it still ran after `timeout_s`."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (run := self._queue.get()) is not None:
            run()
