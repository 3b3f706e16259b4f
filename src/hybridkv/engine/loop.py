"""The thread that owns the core: others hand it requests and are told what becomes of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from hybridkv.engine.core import EngineCore
from hybridkv.engine.loading.host import flush_denormals
from hybridkv.engine.results import Update
from hybridkv.errors import EngineError, HybridKVError, RequestError

T = TypeVar("T")


_POLL_S = 0.02
"""While everyone waits for a store: to notice that one is late."""

Sink = Callable[[Update | HybridKVError], None]
"""Called on the engine's thread: must not wait. After an error nothing more comes."""


class EngineLoop:
    """Runs steps as long as there is work, and sleeps otherwise. Every touch of the core happens on its thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._failure: EngineError | None = None
        self._closed = False
        self._door = threading.Lock()
        """Held to come in, and to close: whoever is in will get an answer."""
        self._thread = threading.Thread(target=self._run, name="hybridkv-engine", daemon=True)
        self._thread.start()

    def add(self, request_id: str, sink: Sink, add: Callable[[], None]) -> None:
        """Queue a request: `add` runs on the engine's thread, then `sink` gets every update."""

        def start() -> None:
            try:
                add()
            except Exception as error:  # the others go on
                self._sinks.pop(request_id, None)
                refused = error if isinstance(error, HybridKVError) else RequestError(f"cannot be served: {error!r}")
                _tell(sink, refused)

        with self._door:
            self.check_alive()
            self._sinks[request_id] = sink
            self._inbox.put(start)

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._deliver(self._core.abort(request_id)))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, and wait for what it returns."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        with self._door:
            self.check_alive()
            self._inbox.put(run)
        while not wait([answer], timeout=1.0).done:
            self.check_alive()
        return answer.result()

    def wake_up(self) -> None:
        """What the core waits for may have come. Called on any thread."""
        self._inbox.put(_wake_up)

    def close(self) -> None:
        """After the present step. What has not ended is aborted."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    def check_alive(self) -> None:
        """Raises what has ended the engine, if something has."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineError("the engine is closed: start a new one")

    def _run(self) -> None:
        flush_denormals()
        try:
            while self._take_in():
                self._deliver(self._core.step())
            for request_id in list(self._sinks):
                self._deliver(self._core.abort(request_id))
        except BaseException as error:  # a bug: nobody may wait for an answer that will not come
            with self._door:
                self._failure = EngineError(f"the engine has failed: {error!r}; start a new one")
            for sink in self._sinks.values():
                _tell(sink, self._failure)
            raise

    def _take_in(self) -> bool:
        """Do what others asked for; wait for something if there is nothing to compute. False: it is over."""
        while True:
            try:
                if self._core.has_work and self._core.waits:
                    command = self._inbox.get(timeout=_POLL_S)
                else:
                    command = self._inbox.get(block=not self._core.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if command is _wake_up:
                return True
            command()
            self._core.waits = False  # there may be something to compute now

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            sink = self._sinks.get(update.request_id)
            if update.result is not None:
                self._sinks.pop(update.request_id, None)
            if sink is None:
                continue
            try:
                sink(update)
            except Exception:  # nobody listens any more, such as when an event loop was closed: others go on
                self._sinks.pop(update.request_id, None)
                self._core.abort(update.request_id)


def _wake_up() -> None:
    """What was waited for has come."""


def _tell(sink: Sink, error: HybridKVError) -> None:
    """One that does not listen any more, such as when an event loop was closed, keeps no other from being told."""
    with suppress(Exception):
        sink(error)
