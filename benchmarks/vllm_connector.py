"""vLLM's CPU build without a connector, with its MooncakeStoreConnector and with HybridKVConnector, in one run.

Tokens that hit: a prompt repeated, siblings with a shared beginning, turns of a conversation, and prompts after a
restart of the engine. Times: to the first token of a hit and of a miss, and of 64 decoded tokens; bytes stored a prompt
token. One engine of each mode lives in a process of its own, with one thread for arithmetic. For times, each prompt
goes to all modes in turn before the next, and what is shown are medians. Modes named
-checkpoints run with CheckpointScheduler, which ends prefill chunks where states are worth saving. Those named -256 run
with `long_prefill_token_threshold=256`. vLLM 0.32 ignores it while a request is alone, as all are here: what differs
between none and none-256 is noise.

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
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import engine_models
import vllm_mooncake
from engine_profile import CpuTime
from rich.console import Console
from vllm_engines import Child, Fleet, Setup, has_store
from vllm_report import CACHES, Hits, Measured, show
from vllm_workloads import HITS, Prompts

HERE = Path(__file__).resolve().parent
MODELS = ("qwen3-next-tiny", "gemma-3-tiny")
MODES = ("none", "none-256", "mooncake", "hybridkv", "hybridkv-256", "hybridkv-checkpoints")
QUICK_MODES = ("none", "mooncake", "hybridkv", "hybridkv-checkpoints")
LONG_TOKENS = 1500
DECODED_TOKENS = 64


Answers = dict[str, list[dict[str, Any]]]
"""The answers of each mode, in the order of the prompts."""


def ask(fleet: Fleet, prompts: Sequence[list[int]], max_tokens: int = 1, store_alone: bool = False) -> Answers:
    """Each prompt to all modes in turn, before the next. An engine that has answered saves in peace."""
    answers: Answers = {mode: [] for mode in fleet.modes}
    for i, prompt in enumerate(prompts):
        for mode, child in fleet.in_turn(i):
            with fleet.leaving_out(mode):
                if store_alone and has_store(mode):
                    child.reset()
                answers[mode].append(child.serve(prompt, max_tokens))
                child.settle()
    return answers


def count_hits(fleet: Fleet, prompts: Prompts) -> dict[str, Hits]:
    """Cached tokens of every workload and mode."""
    hits: dict[str, Hits] = {mode: {} for mode in fleet.modes}
    for mode, child in fleet.in_turn():
        for name, workload in HITS.items():
            for caches in CACHES if has_store(mode) else CACHES[1:]:
                before_each = child.reset if caches == CACHES[0] else child.settle

                def request(
                    prompt: list[int],
                    max_tokens: int,
                    breakpoints: Sequence[int],
                    child: Child = child,
                    prepare: Callable[[], None] = before_each,
                ) -> tuple[int, list[int]]:
                    prepare()
                    answer = child.serve(prompt, max_tokens, breakpoints)
                    return int(answer["cached_tokens"]), answer["output"]

                with fleet.leaving_out(mode):
                    hits[mode].setdefault(name, {})[caches] = workload(prompts.of(name + caches), request)
    return hits


def measure(setup: Setup, modes: Sequence[str], failures: dict[str, str], console: Console) -> dict[str, Measured]:
    """All modes on one model: two processes of each, one after the other."""
    prompts = Prompts(engine_models.SHAPES[setup.model_dir.name].vocab_size)
    warm_up, first_reply = prompts.tokens(LONG_TOKENS), prompts.tokens(LONG_TOKENS)
    stored = [prompts.tokens(LONG_TOKENS) for _ in range(setup.args.prompts)]
    fresh = [prompts.tokens(LONG_TOKENS) for _ in range(setup.args.prompts)]
    bytes_before = {mode: setup.stored_bytes(mode) for mode in modes}
    with Fleet(setup, modes, failures) as fleet:
        console.print(f"{setup.model_dir.name}: {', '.join(fleet.modes)} are ready")
        ask(fleet, [warm_up])
        ask(fleet, [warm_up], store_alone=True)
        miss = ask(fleet, stored)
        hit = ask(fleet, stored, store_alone=True)
    num_stored = LONG_TOKENS * (1 + len(stored))
    bytes_a_token = {mode: (setup.stored_bytes(mode) - bytes_before[mode]) / num_stored for mode in modes}
    with Fleet(setup, modes, failures) as fleet:
        console.print(f"{setup.model_dir.name}: {', '.join(fleet.modes)} are ready again")
        ask(fleet, [first_reply], DECODED_TOKENS)
        ask(fleet, [warm_up])
        restart = ask(fleet, stored)
        decode = ask(fleet, fresh, DECODED_TOKENS)
        hits = count_hits(fleet, prompts)
        return {
            mode: Measured(miss[mode], hit[mode], restart[mode], decode[mode], hits[mode], bytes_a_token[mode])
            for mode in fleet.modes
        }


def parse_args() -> argparse.Namespace:
    def listed(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            for name in (names := text.split(",")):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two prompts where times are measured, four modes")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes started here end too
    console = Console(width=None if sys.stdout.isatty() else 140)
    modes, left_out = list(args.modes), {}
    if "mooncake" in modes and (why := vllm_mooncake.why_not(args.mooncake, args.vllm_python)):
        console.print(f"mode mooncake is left out: {why}", markup=False)
        modes.remove("mooncake")
        left_out["mooncake"] = why
    records: list[dict[str, Any]] = []
    failures: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridkv-bench-")))
        mooncake = vllm_mooncake.Mooncake(args.mooncake, scratch) if "mooncake" in modes else None
        if mooncake is not None:
            stack.callback(mooncake.close)
        for name in args.models:
            engine_models.build(name, scratch / name, "bfloat16")
            failed = failures.setdefault(name, {})
            before = CpuTime.now()
            results = measure(Setup(args, scratch, scratch / name, mooncake), modes, failed, console)
            records += show(name, results, console) if results else []
            console.print(f"others kept {CpuTime.now().other_cores(before):.1f} cores busy")
            for mode, why in failed.items():
                console.print(f"mode {mode} failed: {why}", markup=False)
    report = {"benchmark": "vllm_connector", "prompts": args.prompts, "quick": args.quick}
    print(json.dumps(report | {"records": records, "left_out": left_out, "failures": failures}))
    if any(failures.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
