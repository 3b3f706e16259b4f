"""The thread that owns the core. Other threads submit requests and get updates through sinks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import NamedTuple, TypeVar

from hybridkv.engine.core import EngineCore
from hybridkv.engine.loading.host import flush_denormals
from hybridkv.engine.results import Update
from hybridkv.errors import EngineError, HybridKVError, RequestError

T = TypeVar("T")


_POLL_S = 0.02
"""Poll interval while all requests wait for a store, to notice timeouts."""

Sink = Callable[[Update | HybridKVError], None]
"""Called on the engine's thread: must not block. An error is the last call."""


class Submission(NamedTuple):
    request_id: str
    sink: Sink
    """Gets every update."""
    add: Callable[[], None]
    """Adds the request to the core."""


class EngineLoop:
    """Runs steps while there is work, and sleeps otherwise. The core is only accessed on this thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: deque[Callable[[], None] | None] = deque()
        """Submitted calls that have not run yet. None: the loop must end."""
        self._bell = threading.Event()
        """Set when there is a call, or when a store may have answered."""
        core.calls_wait = lambda: bool(self._calls)
        self._sinks: dict[str, Sink] = {}
        self._failure: EngineError | None = None
        self._closed = False
        self._door = threading.Lock()
        """Held to submit work and to close, so that all submitted work gets an answer."""
        self._thread = threading.Thread(target=self._run, name="hybridkv-engine", daemon=True)
        self._thread.start()

    def add(self, requests: Sequence[Submission]) -> None:
        """Queue requests. The engine's thread adds all of them before its next step, so that they share prefixes."""

        def start() -> None:
            for one in requests:
                self._start(one)

        with self._door:
            self.check_alive()
            for one in requests:
                if one.request_id in self._sinks:
                    raise RequestError(f"request id {one.request_id!r} is in use: choose another, or leave it out")
            self._sinks.update((one.request_id, one.sink) for one in requests)
            self._submit(start)

    def _start(self, one: Submission) -> None:
        try:
            one.add()
        except Exception as error:  # other requests continue
            self._sinks.pop(one.request_id, None)
            refused = error if isinstance(error, HybridKVError) else RequestError(f"cannot be served: {error!r}")
            _tell(one.sink, refused)

    def abort(self, requests: Sequence[Submission]) -> None:
        """Abort those of these requests that are running. If `add` refused them, others may have their ids."""

        def stop() -> None:
            for one in requests:
                if self._sinks.get(one.request_id) is one.sink:
                    self._deliver(self._core.abort(one.request_id))
                    self._sinks.pop(one.request_id, None)  # `add` may have been interrupted before the core knew it

        self._submit(stop)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps, and return its result."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        with self._door:
            self.check_alive()
            self._submit(run)
        while not wait([answer], timeout=1.0).done:
            self.check_alive()
        return answer.result()

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread between two steps, soon. After the loop has ended it never runs."""
        self._submit(function)

    def wake_up(self) -> None:
        """Tell the loop that a store may have answered. Called on any thread."""
        self._bell.set()

    def close(self) -> None:
        """Stop after the current step. Unfinished requests are aborted."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._submit(None)
        self._thread.join()

    def check_alive(self) -> None:
        """Raises the error that ended the engine, if it has ended."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineError("the engine is closed: start a new one")

    def _submit(self, call: Callable[[], None] | None) -> None:
        self._calls.append(call)
        self._bell.set()

    def _run(self) -> None:
        flush_denormals()
        try:
            while self._take_in():
                self._deliver(self._core.step())
                self._core.publishing.refresh()
            for request_id in list(self._sinks):
                self._deliver(self._core.abort(request_id))
        except BaseException as error:  # a bug: callers must not wait forever
            with self._door:
                self._failure = EngineError(f"the engine has failed: {error!r}; start a new one")
            for sink in self._sinks.values():
                _tell(sink, self._failure)
            raise

    def _take_in(self) -> bool:
        """Run submitted calls; wait for one if there is nothing to compute. False: the loop must end."""
        while True:
            while self._calls:
                call = self._calls.popleft()
                if call is None:
                    return False
                call()
                self._core.waits = False  # there may be something to compute now
            if self._core.has_work and not self._core.waits:
                return True
            self._bell.wait(_POLL_S if self._core.has_work else None)
            self._bell.clear()  # what it was set for is looked at only after this
            if self._core.has_work and not self._calls:
                return True

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            sink = self._sinks.get(update.request_id)
            if update.result is not None:
                self._sinks.pop(update.request_id, None)
            if sink is None:
                continue
            try:
                sink(update)
            except Exception:  # a dead sink, such as of a closed event loop: other requests continue
                self._sinks.pop(update.request_id, None)
                self._core.abort(update.request_id)


def _tell(sink: Sink, error: HybridKVError) -> None:
    """Send an error to a sink. A dead sink, such as of a closed event loop, must not affect other sinks."""
    with suppress(Exception):
        sink(error)
