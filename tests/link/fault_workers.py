"""Engines in processes of their own, for tests that kill, stop and confuse one of two linked engines.

A test calls an `Outpost`; the process behind it runs a `Rig`. Seams in the rig stop its link at a named place (a gate)
or spoil what passes there, so that a test can kill the process exactly there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.link.rig import Rig
from tests.link.workers import forking

SECRET = "a secret for the tests of links"
CALL_S = 120.0
_FORK = forking()


class Outpost:
    """An engine in a child process. Use it in a `with`: the child is killed at its end."""

    def __init__(self, transport: str, **options: Any) -> None:
        """`options`: of `Rig`. `transport`: UCX_TLS of the child; empty: UCX chooses."""
        self._pipe, other = _FORK.Pipe()
        self._process = _FORK.Process(target=_work, args=(other, transport, options), daemon=True)
        self._process.start()
        other.close()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._events: dict[str, threading.Event] = {}
        self._number = 0
        threading.Thread(target=self._listen, daemon=True).start()
        self.port: int = self.call("port")

    def ask(self, name: str, *args: Any, **options: Any) -> Future[Any]:
        """Call a method of the rig on a thread of its own."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            self._futures[self._number] = future
            with suppress(OSError):
                self._pipe.send((self._number, name, args, options))
        return future

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        try:
            return self.ask(name, *args, **options).result(CALL_S)
        except TimeoutError:
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGUSR1)  # it prints the stacks of its threads
            time.sleep(1.0)
            raise

    def reached(self, gate: str, timeout_s: float = 20.0) -> None:
        """Wait until the child stands at a gate."""
        assert self._event(gate).wait(timeout_s), f"{gate} was not reached: {self.call('report')}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def close(self) -> None:
        self.kill()
        self._pipe.close()

    def __enter__(self) -> Outpost:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def _listen(self) -> None:
        try:
            while True:
                number, is_good, value = self._pipe.recv()
                if number == 0:
                    self._event(value).set()
                elif is_good:
                    self._futures.pop(number).set_result(value)
                else:
                    self._futures.pop(number).set_exception(value)
        except (EOFError, OSError, TypeError):
            for future in list(self._futures.values()):
                if not future.done():
                    future.set_exception(ChildProcessError(f"the child has ended: {self.exit_code}"))


def _work(pipe: Connection, transport: str, options: dict[str, Any]) -> None:
    os.environ["HYBRIDKV_LINK_SECRET"] = options.pop("secret", SECRET)
    if transport:
        os.environ["UCX_TLS"] = transport
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    lock = threading.Lock()

    def send(*message: Any) -> None:
        with lock:
            pipe.send(message)

    rig = Rig(lambda gate: send(0, True, gate), **options)

    def run(number: int, name: str, args: Sequence[Any], options: dict[str, Any]) -> None:
        try:
            send(number, True, getattr(rig, name)(*args, **options))
        except BaseException as error:
            send(number, False, RuntimeError(f"{type(error).__name__}: {error}"))

    while True:
        try:
            message = pipe.recv()
        except EOFError:
            os._exit(0)
        threading.Thread(target=run, args=message, daemon=True).start()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
