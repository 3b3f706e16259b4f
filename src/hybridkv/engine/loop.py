"""The thread that owns the core: others hand it requests and are told what becomes of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from hybridkv.engine.core import EngineCore
from hybridkv.engine.host import flush_denormals
from hybridkv.engine.results import Update
from hybridkv.errors import HybridKVError


class EngineError(HybridKVError):
    """The engine has stopped and serves nothing any more."""


Sink = Callable[[Update | EngineError], None]
"""Called on the engine's thread: must not wait."""


class EngineLoop:
    """Runs steps as long as there is work, and sleeps otherwise. Every touch of the core happens on its thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._failure: EngineError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-engine", daemon=True)
        self._thread.start()

    def add(self, request_id: str, sink: Sink, add: Callable[[], None]) -> None:
        """Queue a request: `add` runs on the engine's thread, then `sink` gets every update."""
        self._check_alive()

        def start() -> None:
            self._sinks[request_id] = sink
            add()

        self._inbox.put(start)

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._deliver(self._core.abort(request_id)))

    def call(self, function: Callable[[], object]) -> None:
        """Run a function between two steps, and wait for it."""
        self._check_alive()
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        self._inbox.put(run)
        while not done.wait(timeout=1.0):
            self._check_alive()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """After the present step. What has not ended is aborted."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            self._thread.join()

    def _check_alive(self) -> None:
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
            self._failure = EngineError(f"the engine has failed: {error!r}; start a new one")
            for sink in self._sinks.values():
                sink(self._failure)
            raise

    def _take_in(self) -> bool:
        """Do what others asked for; wait for something if there is nothing to compute. False: it is over."""
        while True:
            try:
                command = self._inbox.get(block=not self._core.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

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
