"""What checkpoints inside a prompt cost: prefills with checkpoints every so many tokens against prefills with none.

A model with the shape of Qwen3.5-4B (32,768 tokens in its vocabulary) and random bfloat16 weights computes new prompts,
one after the other; spacings take turns. The checkpoints are those that fill idle memory, or with --store-gib also idle
room of a store in host memory. For each spacing: the time of a prefill relative to the one without them in the same
round (quartiles over rounds), the bytes of states written for each token, what these bytes alone would take at the
speed of a copy, and the part of the states that reached the store.

    python benchmarks/checkpoint_cost.py [--tokens 8192] [--spacings 64,128,256,512] [--rounds 6] [--store-gib 16]

--quick runs a tiny model, on a CPU, too. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable

import numpy as np
import torch
from gpu_models import SHAPES, TINY_SHAPES, make_core, make_model

from hybridkv.cache import Kind, PromptFacts
from hybridkv.engine.core import EngineCore
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.store import MemoryStore


class Every:
    """Checkpoints at all multiples of a number of tokens, and at the end; 0: only at the end."""

    def __init__(self, spacing: int) -> None:
        self.spacing = spacing

    def positions(self, facts: PromptFacts) -> Iterable[tuple[int, Kind]]:
        yield (facts.prompt_tokens - 1) // facts.block_tokens * facts.block_tokens, Kind.END
        for position in range(self.spacing, facts.prompt_tokens if self.spacing else 0, self.spacing or 1):
            yield position, Kind.FILL


def prefill_seconds(core: EngineCore, prompt: np.ndarray, spacing: int, name: str) -> float:
    core.cache.reset()
    core.cache._checkpoints = Every(spacing)
    core.add(name, Prompt(prompt), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    synchronize(core)
    begin = time.perf_counter()
    while core.scheduler.waiting or core.scheduler.running:
        core.step()
    synchronize(core)
    spent = time.perf_counter() - begin
    if core.streaming is not None:  # what is still being written belongs to this prompt, not to the next
        core.streaming.streamer.drain()
    return spent


def copy_bytes_per_s(device: torch.device) -> float:
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return size / best


def synchronize(core: EngineCore) -> None:
    if core.runner.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--spacings", default="64,128,256,512,1024")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory-gib", type=float, default=40.0)
    parser.add_argument("--store-gib", type=float, default=0.0, help="a store in host memory, which is filled, too")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    args = parser.parse_args()
    device = torch.device(args.device)
    loaded = make_model((TINY_SHAPES if args.quick else SHAPES)["qwen3.5-4b"](), device)
    arena_bytes = 256 << 20 if args.quick else int(args.memory_gib * 2**30)
    store = MemoryStore(int(args.store_gib * 2**30)) if args.store_gib else None
    core = make_core(loaded, arena_bytes, 1, compile=False, graphs=False, store=store)
    drawn = np.random.default_rng(0)
    spacings = [0, *map(int, args.spacings.split(","))]
    seconds: dict[int, list[float]] = {spacing: [] for spacing in spacings}
    filled: dict[int, int] = dict.fromkeys(spacings, 0)
    for turn in range(args.rounds + 1):
        for spacing in spacings:
            prompt = drawn.integers(loaded.vocab_size, size=args.tokens, dtype=np.int32)
            if store is not None:
                store.shrink(0)
            spent = prefill_seconds(core, prompt, spacing, f"{turn}-{spacing}")
            if turn:  # the first round warms up
                seconds[spacing].append(spent)
                filled[spacing] += 0 if store is None else len({o.position for o in store.objects() if o.is_spare})
    state_bytes = core.cache.layout.checkpoint_bytes
    speed, base = copy_bytes_per_s(device), statistics.median(seconds[0])
    found = {}
    for spacing in spacings[1:]:
        written = state_bytes / spacing
        ratios = [spent / plain for spent, plain in zip(seconds[spacing], seconds[0], strict=True)]
        wanted = args.rounds * ((args.tokens - 1) // spacing)
        found[str(spacing)] = {
            "relative": [round(one, 4) for one in statistics.quantiles(ratios, n=4)],
            "bytes_per_token": round(written),
            "copy_share": round(written * args.tokens / speed / base, 5),
            **({} if store is None else {"part_in_store": round(filled[spacing] / wanted, 3)}),
        }
        print(f"every {spacing:5d} tokens: {found[str(spacing)]}", flush=True)
    facts = {"device": str(device), "tokens": args.tokens, "prefill_s": round(base, 4), "state_bytes": state_bytes}
    print(json.dumps({"benchmark": "checkpoint_cost", **facts, "copy_gb_per_s": round(speed / 1e9, 1), "every": found}))
    core.runner.close()


if __name__ == "__main__":
    main()
