"""Calls of a C++ client that may block for any time, made on threads so that callers wait at most `timeout_s`."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar

from hybridkv.errors import StoreError, StoreFault

T = TypeVar("T")

_MOST_HUNG = 16
_MOST_IDLE = 8


class _Job(Generic[T]):
    def __init__(self, call: Callable[[], T], late: Callable[[], None]) -> None:
        self.done = Event()
        self.is_abandoned = False
        self.result: T
        self.error: BaseException | None = None
        self._call = call
        self._late = late

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # raised again on the thread that waits
            self.error = error

    def clean_up(self) -> None:
        self._late()


class Calls:
    """A call that has not returned after `timeout_s` is abandoned: it raises StoreFault, and its thread stays with it.

    While `_MOST_HUNG` calls hang, every other call raises at once.
    """

    def __init__(self, label: str, timeout_s: float) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.made = 0
        """Number of calls: times that a thread waited."""
        self._lock = Lock()
        self._idle: list[SimpleQueue[_Job[Any] | None]] = []
        self._hung = 0
        self._is_closed = False

    def run(
        self,
        what: str,
        call: Callable[[], T],
        late: Callable[[], None] = lambda: None,
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Run `call`. `late` runs after an abandoned call has returned: it frees what the call was using."""
        job, wait_s = _Job(call, late), timeout_s or self.timeout_s
        self._worker(what).put(job)
        if not job.done.wait(wait_s) and self._abandon(job):
            raise StoreFault(f"{self.label}: cannot {what}: no answer within {wait_s:g} s")
        if job.error is not None:
            raise job.error
        return job.result

    @property
    def hung(self) -> int:
        """Number of abandoned calls that have not returned."""
        return self._hung

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for queue in idle:
            queue.put(None)

    def _worker(self, what: str) -> SimpleQueue[_Job[Any] | None]:
        with self._lock:
            if self._is_closed:
                raise StoreError(f"{self.label}: cannot {what}: the store is closed")
            if self._hung >= _MOST_HUNG:
                raise StoreFault(f"{self.label}: cannot {what}: {self._hung} earlier calls still hang")
            self.made += 1
            if self._idle:
                return self._idle.pop()
        queue: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        Thread(target=self._work, args=(queue,), name="hybridkv-mooncake", daemon=True).start()
        return queue

    def _abandon(self, job: _Job[Any]) -> bool:
        """False: the call has returned by now."""
        with self._lock:
            if job.done.is_set():
                return False
            job.is_abandoned = True
            self._hung += 1
            return True

    def _work(self, queue: SimpleQueue[_Job[Any] | None]) -> None:
        while (job := queue.get()) is not None:
            job.run()
            with self._lock:
                job.done.set()
            if job.is_abandoned:
                job.clean_up()
            with self._lock:
                self._hung -= job.is_abandoned
                if self._is_closed or len(self._idle) >= _MOST_IDLE:
                    return
                self._idle.append(queue)
