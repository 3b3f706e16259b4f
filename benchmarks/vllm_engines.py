"""The engines of vllm_connector.py: what each mode starts vLLM with, and processes that come, answer and go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from vllm_mooncake import Mooncake

HERE = Path(__file__).resolve().parent


def has_store(mode: str) -> bool:
    return not mode.startswith("none")


class EngineEndedError(Exception):
    """The process of an engine ended, or was ended because it took too long."""


class Child:
    """One engine in a process of its own."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path, timeout_s: float) -> None:
        self._log = log
        self._timeout_s = timeout_s
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def ready(self) -> None:
        self._answer()

    def serve(self, prompt: list[int], max_tokens: int = 1, breakpoints: Sequence[int] = ()) -> dict[str, Any]:
        return self._ask({"prompt": prompt, "max_tokens": max_tokens, "breakpoints": list(breakpoints)})

    def reset(self) -> None:
        """Empty vLLM's own prefix cache, once everything is saved."""
        self._ask({"do": "reset"})

    def settle(self) -> None:
        """Wait until everything is saved."""
        self._ask({"do": "settle"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self._timeout_s if kind is None else 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # no answer comes then, and the log says why
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(self._timeout_s, self._process.kill)
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        if not line:
            lines = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
            raise EngineEndedError("the engine ended:\n" + "\n".join(lines[-5:]))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Setup(NamedTuple):
    """What the engines of one model are started with."""

    args: argparse.Namespace
    scratch: Path
    model_dir: Path
    mooncake: Mooncake | None

    def files(self, mode: str) -> Path:
        return self.scratch / f"{self.model_dir.name}-{mode}"

    def stored_bytes(self, mode: str) -> int:
        """What the mode's store holds. Mooncake's holds all models'."""
        if self.mooncake is not None and mode.startswith("mooncake"):
            return self.mooncake.stored_bytes()
        return sum(path.stat().st_size for path in self.files(mode).rglob("*") if path.is_file())

    def child(self, mode: str) -> Child:
        connector, _, chunks = mode.partition("-")
        options: dict[str, Any] = {"max_model_len": 2048}
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": self.args.preload,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        if chunks == "checkpoints":
            options["scheduler_cls"] = "hybridkv.integrations.vllm.checkpoint_scheduler.CheckpointScheduler"
        elif chunks:
            options["long_prefill_token_threshold"] = int(chunks)
        if connector == "mooncake":
            assert self.mooncake is not None
            environment |= self.mooncake.environment
            options["kv_transfer_config"] = {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lookup_rpc_port": os.getpid()},
            }
        elif connector == "hybridkv":
            self.files(mode).mkdir(exist_ok=True)
            options["kv_transfer_config"] = {
                "kv_connector": "HybridKVConnector",
                "kv_connector_module_path": "hybridkv.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "store": ["memory://?size=1GiB", f"file://{self.files(mode)}?size=10GiB"]
                },
            }
        command = [self.args.vllm_python, str(HERE / "vllm_child.py"), str(self.model_dir), json.dumps(options)]
        return Child(command, environment, self.scratch / f"{self.model_dir.name}-{mode}.log", self.args.timeout_s)


class Fleet:
    """One engine of each mode, all alive at once: what is compared is then measured within seconds.

    A mode whose engine fails is left out from then on, and `failures` says why.
    """

    def __init__(self, setup: Setup, modes: Sequence[str], failures: dict[str, str]) -> None:
        self._children: dict[str, Child] = {}
        self._failures = failures
        self._stack = contextlib.ExitStack()
        for mode in modes:
            if mode not in failures:
                self._children[mode] = self._stack.enter_context(setup.child(mode))
        for mode, child in self.in_turn():
            with self.leaving_out(mode):
                child.ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_error: Any) -> None:
        self._stack.__exit__(*of_error)

    @property
    def modes(self) -> list[str]:
        return list(self._children)

    def in_turn(self, number: int = 0) -> list[tuple[str, Child]]:
        """All engines, in an order that rotates with `number`."""
        turn = number % len(self._children) if self._children else 0
        children = list(self._children.items())
        return children[turn:] + children[:turn]

    @contextlib.contextmanager
    def leaving_out(self, mode: str) -> Iterator[None]:
        """If the engine of this mode fails in the block, it is left out from here on."""
        try:
            yield
        except EngineEndedError as ended:
            self._failures.setdefault(mode, str(ended))
            self._children.pop(mode, None)
