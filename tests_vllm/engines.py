"""The tests' side of `host.py`: engines in other processes, what they answer, and the stores beside them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from checkpoints import VOCABULARY, Family

HERE = Path(__file__).parent
ROOT = HERE.parent
STARTING_S = 180.0
ANSWERING_S = 180.0
STORE_BYTES = "1GiB"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # Two engines run beside each other on two cores. What is compiled takes longer to compile than to run.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
CONNECTOR = {"kv_connector": "HybridKVConnector", "kv_connector_module_path": "hybridkv.integrations.vllm"}
FAULTY_CONNECTOR = {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty"}


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


def file_url(directory: Path) -> str:
    return f"file://{directory}?size={STORE_BYTES}"


def transfer_config(urls: Sequence[str], connector: Mapping[str, str] = CONNECTOR, **extra: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` says for our connector on these stores."""
    return {**connector, "kv_role": "kv_both", "kv_connector_extra_config": {"store": list(urls), **extra}}


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int = 6
    salt: str | None = None
    at: int = 0
    """The step at which it arrives."""


@dataclass
class Reply:
    request: Request
    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int
    finish: str | None
    spans: list[tuple[int, int]]
    """Tokens that were computed, in the order of the steps."""

    def last_chunk_end(self, count: int) -> int:
        """Where a state or a window was at hand, among the first `count` tokens."""
        return max((end for _, end in self.spans if end <= count), default=0)

    @property
    def said(self) -> list[int]:
        return self.request.prompt + self.tokens


@dataclass
class Run:
    replies: dict[str, Reply]
    steps: int
    preemptions: int

    def __getitem__(self, name: str) -> Reply:
        return self.replies[name]


class EngineDiedError(Exception):
    """The process has ended."""


class Process:
    """One process of the host."""

    def __init__(self, host: Host, log: Path, **become: Any) -> None:
        self.log = log
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWERING_S)
        self._socket.connect(str(host.path))
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        environment = {**ENVIRONMENT, **become.pop("environment", {})}
        self._send({"log": str(log), "environment": environment, "path": [str(HERE), str(ROOT)], **become})
        self.pid = 0

    def wait_until_started(self) -> None:
        if not self.pid:
            self.pid = int(self._receive()["pid"])

    def kill(self) -> None:
        """Kill the process at once, whatever it does."""
        os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the process to end, and wait until it has."""
        os.kill(self.pid, signal.SIGTERM)
        self.close()

    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def close(self) -> None:
        """Let the process end by itself, and wait for that."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._lines.readline():
                pass
        self._socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()
        except OSError as error:
            raise EngineDiedError(self.last_words()) from error

    def _receive(self) -> Any:
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        if not line:
            raise EngineDiedError(self.last_words())
        return json.loads(line)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else "no log"


class Engine(Process):
    """One vLLM engine. Starting is asynchronous: the first call waits for it."""

    def __init__(self, host: Host, family: Family, model: Path, log: Path, **options: Any) -> None:
        self.family = family
        environment = options.pop("environment", {})
        engine = {
            "model": str(model),
            "dtype": family.dtype,
            **({"mamba_ssm_cache_dtype": "bfloat16"} if family.dtype == "bfloat16" else {}),  # float32 on some CPUs
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **options,
        }
        super().__init__(host, log, engine=engine, environment=environment)

    def begin(
        self,
        requests: Mapping[str, Request] | Sequence[Request],
        aborts: Mapping[str, Mapping[str, int]] | None = None,
        chunks: Sequence[int] | None = None,
        resets: Sequence[int] = (),
    ) -> None:
        """Begin to run requests: `end` gives the replies. `chunks`: where prefill chunks end, for one request.

        `resets`: steps before which vLLM's cache is emptied, and all that runs is preempted.
        """
        named = requests if isinstance(requests, Mapping) else {str(n): one for n, one in enumerate(requests)}
        self._begun = dict(named)
        sent = [{"id": name, **vars(request)} for name, request in named.items()]
        abrupt = {name: dict(when) for name, when in (aborts or {}).items()}
        self._ask("run", requests=sent, aborts=abrupt, chunks=chunks, resets=list(resets))

    def end(self) -> Run:
        answer = self._receive()["result"]
        replies = {}
        for name, result in answer["results"].items():
            spans = [(start, end) for start, end in result.pop("spans")]
            replies[name] = Reply(self._begun[name], spans=spans, **result)
        return Run(replies, answer["steps"], answer["preemptions"])

    def run(self, *args: Any, **options: Any) -> Run:
        self.begin(*args, **options)
        return self.end()

    def ask(self, prompt: list[int], **options: Any) -> Reply:
        """One request alone."""
        return self.run([Request(prompt, **options)])["0"]

    def reset(self) -> None:
        """vLLM's own cache is empty afterwards, and nothing is held back any more."""
        assert self.call("reset"), "vLLM still holds blocks"

    def call(self, do: str, **options: Any) -> Any:
        self._ask(do, **options)
        return self._receive()["result"]

    def _ask(self, do: str, **options: Any) -> None:
        self.wait_until_started()
        self._send({"do": do, "with": options})


SERVER_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_SERVER_DEV_MODE": "1",  # with this vLLM's own cache can be emptied from outside
}


class Server(Process):
    """vLLM's server, with its engine in a process of its own."""

    def __init__(self, host: Host, log: Path, model: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        arguments = [f"--model={model}", "--host=127.0.0.1", f"--port={port}", "--enforce-eager", *options]
        super().__init__(host, log, serve=arguments, environment=SERVER_ENVIRONMENT)

    def wait_until_healthy(self) -> None:
        self.wait_until_started()
        deadline = time.monotonic() + STARTING_S
        while True:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
            assert self.is_alive(), self.last_words()
            assert time.monotonic() < deadline, self.last_words()


@dataclass
class Host:
    """The process that all engines are forks of."""

    path: Path
    log: Path
    processes: list[Process] = field(default_factory=list)

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "host.py"), str(self.path)],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_until_started(self) -> None:
        deadline = time.monotonic() + STARTING_S
        while not self.path.exists():
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, "vLLM is not imported in time"
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.processes:
            process.close()
        self._process.kill()
        self._process.wait()
