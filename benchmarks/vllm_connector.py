"""vLLM's CPU build without a connector, with its MooncakeStoreConnector and with HybridKVConnector, in one run.

Tokens that hit: a prompt repeated, siblings with a shared beginning, turns of a conversation, and prompts after a
restart of the engine. Times: to the first token of a hit and of a miss, and of 64 decoded tokens; bytes stored a prompt
token. One engine of each mode lives in a process of its own, with one thread for arithmetic. For times, each prompt
goes to all modes in turn before the next, and what is shown are medians. Modes named -256 run with
`long_prefill_token_threshold=256`, which ends prefill chunks, and so leaves states, every 256 tokens.

Hits are counted twice: with vLLM's own prefix cache emptied before each request, so that the store alone answers, and
without. Mode `none` has only the latter. Mooncake runs over TCP on this machine: make setup-mooncake.

    python benchmarks/vllm_connector.py --quick
    python benchmarks/vllm_connector.py --models gemma-3-tiny --modes none,hybridkv

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import engine_models
import vllm_mooncake
from rich.console import Console
from vllm_report import CACHES, Measured, show
from vllm_workloads import HITS, Prompts

HERE = Path(__file__).resolve().parent
MODELS = ("qwen3-next-tiny", "gemma-3-tiny")
MODES = ("none", "none-256", "mooncake", "hybridkv", "hybridkv-256")
QUICK_MODES = ("none", "mooncake", "hybridkv")
LONG_TOKENS = 1500
DECODED_TOKENS = 64


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

    def serve(self, prompt: list[int], max_tokens: int = 1) -> dict[str, Any]:
        return self._ask({"prompt": prompt, "max_tokens": max_tokens})

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
            raise RuntimeError("the engine ended:\n" + "\n".join(lines[-12:]))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Setup(NamedTuple):
    """What the engines of one model are started with."""

    args: argparse.Namespace
    scratch: Path
    model_dir: Path
    mooncake: vllm_mooncake.Mooncake | None

    def files(self, mode: str) -> Path:
        return self.scratch / f"{self.model_dir.name}-{mode}"

    def stored_bytes(self, mode: str) -> int:
        """What the mode's store holds. Mooncake's holds all models'."""
        if self.mooncake is not None and mode.startswith("mooncake"):
            return self.mooncake.stored_bytes()
        return sum(path.stat().st_size for path in self.files(mode).rglob("*") if path.is_file())

    def child(self, mode: str) -> Child:
        connector, _, threshold = mode.partition("-")
        options: dict[str, Any] = {"max_model_len": 2048}
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": self.args.preload,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        if threshold:
            options["long_prefill_token_threshold"] = int(threshold)
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


@contextlib.contextmanager
def engines(setup: Setup, modes: Sequence[str]) -> Iterator[dict[str, Child]]:
    """One engine of each mode, all at once: what is compared is then measured within seconds."""
    with contextlib.ExitStack() as stack:
        children = {mode: stack.enter_context(setup.child(mode)) for mode in modes}
        for mode, child in children.items():
            try:
                child.ready()
            except RuntimeError as failure:
                raise RuntimeError(f"mode {mode}: {failure}") from None
        yield children


def in_turn(children: dict[str, Child], number: int) -> Iterator[tuple[str, Child]]:
    """The modes in an order that rotates from prompt to prompt."""
    modes = list(children)
    turn = number % len(modes)
    for mode in (*modes[turn:], *modes[:turn]):
        yield mode, children[mode]


def measure(setup: Setup, modes: Sequence[str]) -> tuple[dict[str, Measured], dict[str, float]]:
    """All modes on one model, and the bytes each stored a prompt token."""
    prompts = Prompts(engine_models.SHAPES[setup.model_dir.name].vocab_size)
    warm_up, first_reply = prompts.tokens(LONG_TOKENS), prompts.tokens(LONG_TOKENS)
    stored = [prompts.tokens(LONG_TOKENS) for _ in range(setup.args.prompts)]
    fresh = [prompts.tokens(LONG_TOKENS) for _ in range(setup.args.prompts)]
    results = {mode: Measured([], [], [], [], {}) for mode in modes}
    bytes_before = {mode: setup.stored_bytes(mode) for mode in modes}
    with engines(setup, modes) as children:
        for mode, child in children.items():
            child.serve(warm_up)
            child.reset() if _has_store(mode) else child.settle()
            child.serve(warm_up)
            child.settle()
        for i, prompt in enumerate(stored):
            for mode, child in in_turn(children, i):
                results[mode].miss.append(child.serve(prompt))
                child.settle()
        for i, prompt in enumerate(stored):
            for mode, child in in_turn(children, i):
                child.reset() if _has_store(mode) else child.settle()
                results[mode].hit.append(child.serve(prompt))
                child.settle()
    num_stored = LONG_TOKENS * (1 + len(stored))
    bytes_a_token = {mode: (setup.stored_bytes(mode) - bytes_before[mode]) / num_stored for mode in modes}
    with engines(setup, modes) as children:
        for child in children.values():
            child.serve(first_reply, DECODED_TOKENS)
            child.serve(warm_up)
            child.settle()
        for i, prompt in enumerate(stored):
            for mode, child in in_turn(children, i):
                results[mode].restart.append(child.serve(prompt))
                child.settle()
        for i, prompt in enumerate(fresh):
            for mode, child in in_turn(children, i):
                results[mode].decode.append(child.serve(prompt, DECODED_TOKENS))
                child.settle()
        for mode, child in children.items():
            for name, workload in HITS.items():
                for caches in CACHES if _has_store(mode) else CACHES[1:]:
                    requests = _Requests(child, store_alone=caches == CACHES[0])
                    found = workload(Prompts.of(name + caches, prompts), requests)
                    results[mode].hits.setdefault(name, {})[caches] = found
    return results, bytes_a_token


def _has_store(mode: str) -> bool:
    return not mode.startswith("none")


class _Requests:
    """What a workload of `HITS` asks with: cached tokens and the reply."""

    def __init__(self, child: Child, store_alone: bool) -> None:
        self._child = child
        self._store_alone = store_alone

    def __call__(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]]:
        self._child.reset() if self._store_alone else self._child.settle()
        answer = self._child.serve(prompt, max_tokens)
        return int(answer["cached_tokens"]), answer["output"]


def parse_args() -> argparse.Namespace:
    def listed(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            for name in (names := text.split(",")):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two prompts where times are measured, three modes")
    parser.add_argument("--models", type=listed(tuple(engine_models.SHAPES)), default=list(MODELS))
    parser.add_argument("--modes", type=listed(MODES))
    parser.add_argument("--prompts", type=int, help="where times are measured; default: 7, with --quick 2")
    parser.add_argument("--vllm-python", default=str(HERE.parent / ".venv-vllm/bin/python"))
    parser.add_argument("--mooncake", type=Path, default=HERE.parent / ".venv-mooncake", help="where its package is")
    parser.add_argument("--timeout-s", type=float, default=300, help="for one answer of an engine")
    args = parser.parse_args()
    if not Path(args.vllm_python).exists():
        parser.error(f"{args.vllm_python} does not exist; make setup-vllm builds it, --vllm-python names another")
    intel_openmp = Path(args.vllm_python).parent.parent / "lib/libiomp5.so"
    args.preload = str(intel_openmp) if intel_openmp.exists() else ""
    args.modes = args.modes or list(QUICK_MODES if args.quick else MODES)
    args.prompts = args.prompts or (2 if args.quick else 7)
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    modes, left_out = list(args.modes), {}
    if "mooncake" in modes and (why := vllm_mooncake.why_not(args.mooncake, args.vllm_python)):
        console.print(f"mode mooncake is left out: {why}", markup=False)
        modes.remove("mooncake")
        left_out["mooncake"] = why
    records: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridkv-bench-")))
        mooncake = vllm_mooncake.Mooncake(args.mooncake, scratch) if "mooncake" in modes else None
        if mooncake is not None:
            stack.callback(mooncake.close)
        for name in args.models:
            engine_models.build(name, scratch / name, "bfloat16")
            results, bytes_a_token = measure(Setup(args, scratch, scratch / name, mooncake), modes)
            records += show(name, results, bytes_a_token, console)
    report = {"benchmark": "vllm_connector", "prompts": args.prompts, "quick": args.quick}
    print(json.dumps(report | {"records": records, "left_out": left_out}))


if __name__ == "__main__":
    main()
