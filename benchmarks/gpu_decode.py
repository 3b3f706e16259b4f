"""A decoding step on a GPU against its floor: what the weights, states and keys of the step take at the least.

Models have the shapes of Qwen3.5-4B and Gemma-3-4B with 32,768 tokens in their vocabulary, and random bfloat16 weights.
For each number of requests and of tokens in their prompts, in one run:

- step_ms: `EngineCore.step`, one token of each request, mean of --steps steps. Prompts are admitted, extended and
  committed without running the model: what their pages hold does not change the speed. `split` is the host's time in
  each part of a step; on a GPU "sample" waits for what "model" has only launched.
- floor_ms: all weight matrices as plain products in one CUDA graph, the states read and written once at the speed of a
  copy, and the keys and values that the tokens see read once at the speed of a reduction. All are measured here.
- gpu_ms: from the start to the end of the model's work on the GPU, gaps between kernels included. host_share: the part
  of a step outside of it.
- kernels: attention and delta rule for decoding, as shares of a copy's bandwidth.
- profile, with --profile: how many kernels a step has, how long the GPU is busy with them, and which take most of it.

    python benchmarks/gpu_decode.py [--models qwen3.5-4b] [--requests 1,64] [--tokens 512] [--no-graphs] [--compile]

Cases that do not fit into the GPU's memory are skipped. --quick runs tiny models, on a CPU, too. One JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_floor import Bandwidths, kernel_shares, measure_floor
from gpu_models import BLOCK_TOKENS, MAX_TOKENS, SHAPES, TINY_SHAPES, make_core, make_model

from hybridkv.engine.core import EngineCore
from hybridkv.engine.loading.checkpoint import LoadedModel
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.results import Update
from hybridkv.engine.runner import Work
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.errors import HybridKVError

WARM_STEPS = 5
PROFILED_STEPS = 4
MOST_KERNELS = 16
ARENA_SHARE = 0.8
"""Of the GPU's free memory. The rest is for what a step allocates."""


class CaseError(Exception):
    """A case that could not be measured."""


def measure_model(name: str, args: argparse.Namespace, speeds: Bandwidths) -> dict[str, Any]:
    device = torch.device(args.device)
    loaded = make_model((TINY_SHAPES if args.quick else SHAPES)[name](), device)
    graphs = not args.no_graphs and device.type == "cuda"
    core = make_core(loaded, arena_bytes(device), max(args.requests), compile=args.compile, graphs=graphs)
    gc.collect()
    gc.freeze()  # as the server does
    found = {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "arena_bytes": core.runner.memory.plan.arena_bytes,
        "graph_bytes": core.runner.decoder.graph_bytes if core.runner.decoder is not None else None,
        "cases": [],
    }
    for num_requests in args.requests:
        for num_tokens in args.tokens:
            case: dict[str, Any] = {"requests": num_requests, "tokens": num_tokens}
            try:
                case |= measure_case(core, loaded, num_requests, num_tokens, args.steps, speeds)
                if args.profile and device.type == "cuda":
                    case["profile"] = profile(core, num_requests)
            except (CaseError, HybridKVError, torch.OutOfMemoryError) as error:
                case["skipped"] = str(error).splitlines()[0]
            tell(f"{name}: {case}")
            found["cases"].append(case)
            abort_all(core)
    core.runner.close()
    gc.unfreeze()
    return found


def measure_case(
    core: EngineCore, loaded: LoadedModel, num_requests: int, num_tokens: int, steps: int, speeds: Bandwidths
) -> dict[str, Any]:
    # Prompts that are ready early decode while others are not: many more steps, with room to spare.
    reply_tokens = WARM_STEPS + steps + PROFILED_STEPS + 4 * num_requests + BLOCK_TOKENS
    if num_tokens + reply_tokens > MAX_TOKENS:
        raise CaseError(f"prompts of {num_tokens} tokens: choose at most {MAX_TOKENS - reply_tokens}")
    most = core.runner.memory.plan.max_requests(num_tokens + reply_tokens)
    if most < num_requests:
        raise CaseError(f"only {most} requests fit into the memory of {core.runner.device}")
    fill(core, loaded.vocab_size, num_requests, num_tokens, reply_tokens)
    for _ in range(WARM_STEPS):
        step(core, num_requests)
    before = dict(core.seconds)
    with gpu_times(core) as gpu_ms:
        synchronize(core)
        begin = time.perf_counter()
        for _ in range(steps):
            step(core, num_requests)
        synchronize(core)
        step_ms = 1e3 * (time.perf_counter() - begin) / steps
    position = max(sample.lease.computed for sample in core.scheduler.running if sample.lease is not None)
    floor = measure_floor(loaded.model, loaded.spec, num_requests, position - steps // 2, speeds)
    found: dict[str, Any] = {
        "step_ms": round(step_ms, 3),
        "floor_ms": round(floor.total_ms, 3),
        "ratio": round(step_ms / floor.total_ms, 2),
        "tokens_per_s": round(1e3 * num_requests / step_ms, 1),
        "split": {name: round(1e3 * (core.seconds[name] - before[name]) / steps, 3) for name in before},
        "floor": {name: round(value, 3) for name, value in floor._asdict().items()},
    }
    if gpu_ms:
        mean_ms = sum(ms() for ms in gpu_ms) / len(gpu_ms)
        found |= {"gpu_ms": round(mean_ms, 3), "host_share": round(max(0.0, 1 - mean_ms / step_ms), 3)}
    return found


def fill(core: EngineCore, vocab_size: int, num_requests: int, num_tokens: int, reply_tokens: int) -> None:
    """Bring requests to the point where each has one token to compute, without running the model."""
    drawn = np.random.default_rng(num_requests * num_tokens)
    params = SamplingParams(max_tokens=reply_tokens, temperature=0, ignore_eos=True)
    for number in range(num_requests):
        prompt = drawn.integers(vocab_size, size=num_tokens, dtype=np.int32)
        core.add(f"{num_requests}-{num_tokens}-{number}", Prompt(prompt), params)

    def not_run(work: Sequence[Work]) -> torch.Tensor:
        rows = sum(one.wants_logits for one in work)
        return torch.zeros(rows, vocab_size, device=core.runner.device)

    begin = time.perf_counter()
    with patch.object(core.runner, "run", not_run):
        while core.scheduler.waiting or any(sample.remaining != 1 for sample in core.scheduler.running):
            check(core.step())
    tell(f"{num_requests} prompts of {num_tokens} tokens took {time.perf_counter() - begin:.1f} s without the model")


def step(core: EngineCore, num_requests: int) -> None:
    updates = core.step() or core.step()  # a captured step is told of by the next call
    check(updates)
    if len(updates) != num_requests:
        raise CaseError(f"a step had {len(updates)} of {num_requests} requests: the others lack memory")


def check(updates: Sequence[Update]) -> None:
    for update in updates:
        if update.result is not None:
            ended = update.result.completions[0]
            raise CaseError(f"a request ended early ({ended.finish_reason}): {ended.error}")


@contextmanager
def gpu_times(core: EngineCore) -> Iterator[list[Callable[[], float]]]:
    """Milliseconds of the runner's work on the GPU in each step; none on a CPU. To be read after synchronizing."""
    found: list[Callable[[], float]] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def timed_run(*work: Any) -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = run(*work)
            end.record()
            found.append(lambda: float(start.elapsed_time(end)))
            return result

        return timed_run

    if core.runner.device.type != "cuda":
        yield found
        return
    with ExitStack() as stack:
        for name in ("run", "decode", "decode_on"):
            stack.enter_context(patch.object(core.runner, name, timed(getattr(core.runner, name))))
        yield found


def profile(core: EngineCore, num_requests: int) -> dict[str, Any]:
    """The GPU's kernels in a step, by the time they take together."""
    from torch.profiler import ProfilerActivity

    synchronize(core)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step(core, num_requests)
        synchronize(core)
    kernels = [one for one in profiler.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    return {
        "kernels": round(sum(one.count for one in kernels) / PROFILED_STEPS),
        "busy_ms": round(sum(one.self_device_time_total for one in kernels) / PROFILED_STEPS / 1e3, 3),
        "most": [
            {
                "name": one.key[:80],
                "ms": round(one.self_device_time_total / PROFILED_STEPS / 1e3, 4),
                "calls": round(one.count / PROFILED_STEPS, 1),
            }
            for one in kernels[:MOST_KERNELS]
        ],
    }


def abort_all(core: EngineCore) -> None:
    for sample in [*core.scheduler.running, *core.scheduler.waiting]:
        core.abort(sample.request.id)
    core.cache.reset()


def synchronize(core: EngineCore) -> None:
    if core.runner.device.type == "cuda":
        torch.cuda.synchronize()


def arena_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 256 << 20
    gc.collect()
    torch.cuda.empty_cache()
    return int(ARENA_SHARE * torch.cuda.mem_get_info()[0])


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"torch": torch.__version__}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = None
    return found


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--requests", type=numbers, help="Default: 1,16,64,256; 1,4 with --quick.")
    parser.add_argument("--tokens", type=numbers, help="Of each prompt. Default: 512,8192; 40,100 with --quick.")
    parser.add_argument("--steps", type=int, help="Steps that are timed. Default: 50; 5 with --quick.")
    parser.add_argument("--no-graphs", action="store_true", help="Launch every kernel from the host.")
    parser.add_argument("--compile", action="store_true", help="Compile decoder layers with torch.")
    parser.add_argument("--profile", action="store_true", help="Tell which kernels take the time of a step.")
    parser.add_argument("--quick", action="store_true", help="Tiny models, to see that the benchmark works.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.requests = args.requests or ([1, 4] if args.quick else [1, 16, 64, 256])
    args.tokens = args.tokens or ([40, 100] if args.quick else [512, 8192])
    args.steps = args.steps or (5 if args.quick else 50)
    unknown = [name for name in args.models if name not in SHAPES]
    if unknown:
        parser.error(f"--models {unknown[0]}: choose some of {', '.join(SHAPES)}")
    if args.device == "cpu" and not args.quick:
        parser.error("there is no GPU: --quick runs tiny models on a CPU")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # how long capturing takes
    device = torch.device(args.device)
    speeds = Bandwidths.measure(device)
    report: dict[str, Any] = {
        "benchmark": "gpu_decode",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **versions(),
        "quick": args.quick,
        "compile": args.compile,
        "copy_gb_s": round(speeds.copy / 1e9, 1),
        "read_gb_s": round(speeds.read / 1e9, 1),
        "kernels": kernel_shares(device, speeds),
        "models": {},
    }
    tell(f"{report['device']}: copy {report['copy_gb_s']} GB/s, kernels {report['kernels']}")
    for name in args.models:
        report["models"][name] = measure_model(name, args, speeds)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
