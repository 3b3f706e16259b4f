"""Engines in processes of their own, told what to do through a pipe.

    with Workers() as workers:
        producer = workers.start("llama", role="prefill")
        result = producer.generate(prompt, params, transfer={"do_remote_decode": True})

A process runs each command on a thread of its own, so commands of one engine overlap. It ends with its pipe, with
`Workers`, or when its time is over; in the last case it prints where each of its threads was.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

SECRET = "a secret of tests, long enough"
PATIENCE_S = 90.0
"""A command that has not answered by then fails its test."""
LIFETIME_S = 3000.0
"""No process lives longer."""
TCP = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"
"""NIXL refuses to start without a transport for the memory of GPUs that the machine has."""
TRANSPORTS: dict[str, dict[str, str]] = {"cma": {}, "tcp": {"UCX_TLS": TCP}}


@dataclass(frozen=True)
class Audit:
    """What an engine holds between two requests."""

    pins: int
    pinned_bytes: int
    quarantined: int
    outbound: int
    """Prompts that wait for a consumer."""
    arrivals: int
    """Prompts that are waited for."""
    requests: int
    used_bytes: dict[str, int]

    @property
    def is_at_rest(self) -> bool:
        return not (self.pins or self.quarantined or self.outbound or self.arrivals or self.requests)


def forking() -> ForkServerContext:
    """The context of processes that start with all that tests/link/preloaded.py has loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.link.preloaded"])
    return context


class Worker:
    """One engine, as seen from the test's process."""

    def __init__(self, family: str, transport: str = "cma", **options: Any) -> None:
        context = forking()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, TRANSPORTS[transport]), daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._started = self.ask("start", family, options)

    @property
    def port(self) -> int:
        return int(self._started.result(PATIENCE_S))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, command: str, *args: Any, **options: Any) -> Future[Any]:
        """Run a command; commands that are asked for at once overlap."""
        with self._lock:
            self._count += 1
            answer = self._answers[self._count] = Future()
            self._pipe.send_bytes(pickle.dumps((self._count, command, args, options)))
        return answer

    def call(self, command: str, *args: Any, **options: Any) -> Any:
        return self.ask(command, *args, **options).result(PATIENCE_S)

    def generate(
        self, prompt: list[int], params: Any, *, salt: str = "", transfer: Mapping[str, Any] | None = None
    ) -> Any:
        return self.call("generate", prompt, params, salt=salt, transfer=transfer)

    def audit(self) -> Audit:
        found: Audit = self.call("audit")
        return found

    def stats(self) -> Any:
        return self.call("stats")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def _read(self) -> None:
        try:
            while True:
                number, is_good, value = pickle.loads(self._pipe.recv_bytes())
                answer = self._answers.pop(number)
                if is_good:
                    answer.set_result(value)
                else:
                    answer.set_exception(value)
        except (EOFError, OSError):
            for answer in list(self._answers.values()):
                answer.set_exception(RuntimeError(f"process {self.process.pid} has ended: its output says why"))


class Workers:
    """All processes of a test."""

    def __init__(self) -> None:
        self._all: list[Worker] = []

    def start(self, family: str, transport: str = "cma", **options: Any) -> Worker:
        """An engine for the tiny model of a family. `options`: of the engine, and `role`, `peers` ... of its link."""
        worker = Worker(family, transport, **options)
        self._all.append(worker)
        return worker

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._all:
            worker.kill()


# --- in the process of an engine --------------------------------------------------------------------------------------

_LINK_OPTIONS = ("role", "peers", "lease_s", "timeout_s", "checksums")


class _Logged(logging.Handler):
    """Keeps what is logged. The output of a process is that of the first test, so later ones cannot capture it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class _Host:
    """The commands of one process."""

    def __init__(self) -> None:
        self._logged = _Logged()
        logging.getLogger("hybridkv.link").addHandler(self._logged)

    def log(self) -> list[str]:
        """What the link has logged."""
        return self._logged.messages

    def start(self, family: str, options: dict[str, Any]) -> int:
        from hybridkv.engine import Engine
        from hybridkv.link.link import LinkOptions
        from tests.engine import zoo
        from tests.engine.checkpoints import tokenizer

        options = {"memory": "24MiB", "device": "cpu", **options}
        link = {name: options.pop(name) for name in _LINK_OPTIONS if name in options}
        model = zoo.build(family, options.pop("weights", 0))
        if options.pop("with_tokenizer", False):
            options["tokenizer"] = tokenizer()
        self.engine = Engine(model, link=LinkOptions(**link) if link else None, **options)
        return self.engine.link.port if self.engine.link is not None else 0

    def generate(
        self, prompt: list[int], params: Any, *, salt: str = "", transfer: Mapping[str, Any] | None = None
    ) -> Any:
        [result] = self.engine.generate([prompt], params, cache_salt=salt, kv_transfer_params=transfer, progress=False)
        return result

    def leave(self, prompt: list[int], params: Any, transfer: Mapping[str, Any] | None, after_s: float) -> Any:
        """Read a stream for so long, then abort it. Returns the result, or None if it was aborted."""

        async def read() -> Any:
            async for update in self.engine.stream(prompt, params, kv_transfer_params=transfer):
                if update.result is not None:
                    return update.result
            return None

        async def limited() -> Any:
            try:
                return await asyncio.wait_for(read(), after_s)
            except TimeoutError:
                return None

        return asyncio.run(limited())

    def stats(self) -> Any:
        return self.engine.stats()

    def reset(self) -> None:
        self.engine.reset_cache()

    def audit(self) -> Audit:
        self.engine.check_integrity()
        stats, link, linking = self.engine.stats(), self.engine.link, self.engine._linking
        receipts = None if linking is None else linking.receipts
        return Audit(
            pins=stats.memory.pinned_prefixes,
            pinned_bytes=stats.memory.pinned_bytes,
            quarantined=0 if receipts is None else receipts.num_quarantined,
            outbound=link.producer.num_outbound if link is not None and link.producer is not None else 0,
            arrivals=link.consumer.num_arrivals if link is not None and link.consumer is not None else 0,
            requests=stats.running + stats.waiting,
            used_bytes=stats.memory.used_bytes,
        )

    def close(self) -> None:
        self.engine.close()


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    faulthandler.dump_traceback_later(LIFETIME_S, exit=True)
    os.environ.update({"HYBRIDKV_LINK_SECRET": SECRET, "OMP_NUM_THREADS": "1", **environment})
    import torch

    torch.set_num_threads(1)
    host, lock = _Host(), threading.Lock()

    def run(number: int, command: str, args: Any, options: Any) -> None:
        try:
            answer = pickle.dumps((number, True, getattr(host, command)(*args, **options)))
        except BaseException as error:
            error.add_note(f"in process {os.getpid()}, by {command}")
            answer = pickle.dumps((number, False, error))
        with lock:
            pipe.send_bytes(answer)

    try:
        while True:
            number, command, args, options = pickle.loads(pipe.recv_bytes())
            if command == "start":  # the others need its engine
                run(number, command, args, options)
            else:
                threading.Thread(target=run, args=(number, command, args, options), daemon=True).start()
    except (EOFError, OSError):
        os._exit(0)
