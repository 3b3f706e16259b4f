"""Hidden states of four layers: what extracting them costs, what they hold, and what they change for other requests.

One run, the same prompts for all of them:

- the engine, with and without hidden states, in turn; stock transformers with `output_hidden_states`, one prompt at a
  time, in a process of its own. Stock computes no logits. Both keep the rows of all prompts.
- pages of hidden states against the exact bytes of their rows. All prompts are whole blocks.
- samples that begin with the same system prompt: tokens that were computed against rows that came back.
- plain requests on this engine against an engine that was built without taps: the same plan, the same hits, speed.

    python benchmarks/hidden_states.py [--model DIRECTORY] [--device cuda]

On a CPU times are seconds of CPU, with one thread unless --threads says more: other programs that run beside it count
for little then. On a GPU they are seconds. Peak memory is that of the process, or on a GPU what torch has allocated
there; the engine's has its arena in it. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from hybridkv import Engine, SamplingParams
from hybridkv.demo import demo_model
from hybridkv.engine.runner import find_decoder
from hybridkv.spec import HiddenTap

BLOCK_TOKENS = 16
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
NUM_DECODING = 8
LONG_TOKENS = 2048
"""Length of the requests that capacity is counted in."""
Prompts = list[list[int]]


class Workload:
    """The same prompts in every process."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = AutoConfig.from_pretrained(args.model).get_text_config()
        drawn = random.Random(7)

        def tokens(count: int) -> list[int]:
            return [drawn.randrange(shape.vocab_size) for _ in range(count)]

        self.prompts = [tokens(args.tokens) for _ in range(args.prompts)]
        system = tokens(args.system)
        self.shared = [system + tokens(drawn.randint(30, 120)) for _ in range(2 * args.prompts)]
        self.short = [tokens(BLOCK_TOKENS) for _ in range(NUM_DECODING)]
        n = shape.num_hidden_layers
        self.layers = sorted({min(2, n), n // 2, max(n - 3, 0), n})
        """Those that speculators chooses for EAGLE-3, and the output of the last layer."""


def stock(args: argparse.Namespace) -> dict[str, Any]:
    """Stock transformers, a prompt at a time."""
    prepare(args)
    work = Workload(args)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(args.device).eval()
    decoder, _ = find_decoder(model)

    def rows(prompt: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([prompt], device=args.device)
        with torch.no_grad():
            states = decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        return torch.stack([states[layer][0] for layer in work.layers], dim=1).cpu()

    first = rows(work.prompts[0])
    seconds = [timed(args.device, lambda: [rows(prompt) for prompt in work.prompts]) for _ in range(args.repeats)]
    return {
        "tokens_per_s": rate(work.prompts, seconds),
        "peak_bytes": peak_bytes(args.device),
        "rows": first[:, :-1].float().numpy(),  # the last layer's is after the norm here
    }


def prepare(args: argparse.Namespace) -> None:
    disable_progress_bar()
    torch.set_num_threads(args.threads)


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Everything on the engine."""
    prepare(args)
    work = Workload(args)
    asked = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, hidden_layers=work.layers)
    warm_up(args, work)
    with open_engine(args) as engine:
        extract: list[float] = []
        plain: list[float] = [run(engine, work.prompts, ONE_TOKEN)]
        plain_peak = peak_bytes(args.device)
        run(engine, work.prompts, asked)
        for _ in range(args.repeats):
            plain.append(run(engine, work.prompts, ONE_TOKEN))
            extract.append(run(engine, work.prompts, asked))
        extract_peak = peak_bytes(args.device)
        found = {
            "device": str(engine.device),
            "layers": work.layers,
            "arena_bytes": engine.plan.arena_bytes,
            "extract": {"tokens_per_s": rate(work.prompts, extract), "peak_bytes": extract_peak},
            "plain": {"tokens_per_s": rate(work.prompts, plain[1:]), "peak_bytes": plain_peak},
            "held": held(engine, work),
            "shared": shared(engine, work.shared, asked),
            "rows": rows_of(engine, work.prompts[0], asked)[:, :-1].float().numpy(),
        }
        with patch("hybridkv.engine.assembly.with_all_taps", lambda spec: spec), open_engine(args) as bare:
            assert not any(isinstance(spec, HiddenTap) for spec in bare.plan.model.layers)
            found["others"] = others(engine, bare, work, args.repeats)
    return found


def warm_up(args: argparse.Namespace, work: Workload) -> None:
    """The first engine of a process is slower than those after it."""
    with open_engine(args) as engine:
        run(engine, work.prompts, ONE_TOKEN)
    del engine
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def open_engine(args: argparse.Namespace) -> Engine:
    return Engine(args.model, memory=args.memory, device=args.device, dtype=args.dtype, block_size=BLOCK_TOKENS)


def run(engine: Engine, prompts: Prompts, params: SamplingParams) -> float:
    """Seconds for prompts of which nothing is cached."""
    engine.reset_cache()
    return timed(engine.device.type, lambda: engine.generate(prompts, params, progress=False))


def held(engine: Engine, work: Workload) -> dict[str, float]:
    """What pages of hidden states take, after a run over prompts of whole blocks.

    A page takes its part of a slab, with the bytes that are left over at the slab's end.
    """
    assert all(len(prompt) % BLOCK_TOKENS == 0 for prompt in work.prompts)
    plan, memory = engine.plan, engine.stats().memory
    [group] = [group for group in plan.groups if group.kind == HiddenTap.kind]
    pages = memory.used_bytes[group.name] / group.page_bytes
    num_tokens = count(work.prompts)
    exact = len(work.layers) * plan.model.hidden_size * plan.model.dtype.nbytes
    assert pages == num_tokens // BLOCK_TOKENS * len(work.layers), "some hidden states were evicted: raise --memory"
    per_token = pages * group.slab_bytes / group.pages_per_slab / num_tokens
    return {"bytes_per_token": per_token, "exact": exact, "ratio": round(per_token / exact, 4)}


def shared(engine: Engine, prompts: Prompts, asked: SamplingParams) -> dict[str, float]:
    engine.reset_cache()
    before = engine.stats().computed_tokens
    results = engine.generate(prompts, asked, progress=False)
    computed = engine.stats().computed_tokens - before
    rows = sum(len(result.hidden_states) for result in results if result.hidden_states is not None)
    assert rows == count(prompts)
    return {"samples": len(prompts), "rows": rows, "computed_tokens": computed, "ratio": round(computed / rows, 4)}


def rows_of(engine: Engine, prompt: list[int], asked: SamplingParams) -> torch.Tensor:
    [result] = engine.generate([prompt], asked, progress=False)
    assert result.hidden_states is not None
    return result.hidden_states


def others(engine: Engine, bare: Engine, work: Workload, repeats: int) -> dict[str, Any]:
    """Plain requests on an engine that has extracted before, and on one without taps, in turn."""
    decode = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    figures = []
    for one in (engine, bare):
        before = one.stats().cache.hit_tokens
        run(one, work.shared, ONE_TOKEN)
        stats = one.stats()
        figures.append(
            {
                "block_tokens": one.plan.options.block_tokens,
                "slab_bytes": one.plan.slab_bytes,
                "slabs": one.plan.num_slabs,
                "used_bytes": sum(stats.memory.used_bytes.values()),
                "slab_bytes_in_use": sum(stats.memory.slab_bytes.values()),
                "hit_tokens": stats.cache.hit_tokens - before,
                "long_requests": one.plan.max_requests(LONG_TOKENS),
                "max_model_len": one.max_model_len,
            }
        )
    prefill: dict[Engine, list[float]] = {engine: [], bare: []}
    decoding: dict[Engine, list[float]] = {engine: [], bare: []}
    for number in range(-1, 4 * repeats):
        for one in (engine, bare) if number % 2 else (bare, engine):
            prefill[one].append(run(one, work.prompts[: len(work.prompts) // 2], ONE_TOKEN))
            decoding[one].append(run(one, work.short, decode))
    return {
        "with_taps": figures[0],
        "without_taps": figures[1],
        "same": {name: figures[0][name] == figures[1][name] for name in figures[0]},
        "prefill_speed_ratio": quartiles(prefill[bare][1:], prefill[engine][1:]),
        "decode_speed_ratio": quartiles(decoding[bare][1:], decoding[engine][1:]),
    }


def quartiles(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Quartiles of the ratios of paired measurements `one[i] / other[i]`. The second quartile is the median."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4, method="inclusive")]


def timed(device: str, work: Callable[[], object]) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    work()
    return clock() - start


def count(prompts: Prompts) -> int:
    return sum(map(len, prompts))


def rate(prompts: Prompts, seconds: Sequence[float]) -> float:
    return round(count(prompts) / statistics.median(seconds), 1)


def peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated())
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        theirs, found = processes.submit(stock, args).result(), processes.submit(ours, args).result()
    wanted, rows = theirs.pop("rows"), found.pop("rows")
    norms = torch.from_numpy(wanted).norm(dim=-1)
    difference = float((torch.from_numpy(rows - wanted).norm(dim=-1) / norms).max())
    extract, plain = found["extract"], found["plain"]
    return {
        "benchmark": "hidden_states",
        "model": args.model.name,
        "cores": os.cpu_count(),
        "threads": args.threads,
        "prompts": args.prompts,
        "prompt_tokens": args.tokens,
        "stock": theirs,
        **found,
        "extract_to_plain_speed": round(extract["tokens_per_s"] / plain["tokens_per_s"], 3),
        "extract_to_stock_speed": round(extract["tokens_per_s"] / theirs["tokens_per_s"], 3),
        "extract_to_plain_memory": round(extract["peak_bytes"] / plain["peak_bytes"], 3),
        "extract_to_stock_memory": round(extract["peak_bytes"] / theirs["peak_bytes"], 3),
        "largest_difference_of_a_row": round(difference, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model(), help="A checkpoint; default: the demo model.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="Of torch, on a CPU.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="256MiB", help="Of the engine's cache.")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="Of a prompt: whole blocks of 16.")
    parser.add_argument("--system", type=int, default=600, help="Tokens of the system prompt that samples share.")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.tokens % BLOCK_TOKENS:
        parser.error(f"--tokens {args.tokens}: choose a multiple of {BLOCK_TOKENS}")
    report = measure(args)
    device = f"{report['device']}, {args.threads} of {report['cores']} cores"
    print(f"{report['model']} on {device}, {args.dtype}, layers {report['layers']}")
    for name in ("extract", "plain", "stock"):
        print(
            f"{name}: {report[name]['tokens_per_s']:,.0f} tokens/s, peak {report[name]['peak_bytes'] / 2**20:,.0f} MiB"
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
