"""Copies between pages and the stored form against plain copies of the same bytes. The last line is JSON.

A plain copy moves each page's row as it lies in the page: what a store would hold if its bytes were those of one plan.
The stored form cuts rows by layer and puts heads outermost, whatever the plan. Both sides copy the same pages in turn,
several times; ratios are of medians. Pages are in CPU memory, or on a GPU with `--device cuda`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hybridkv.cache import CacheLayout
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.stream import Catalogue
from hybridkv.stream.boxes import Span
from hybridkv.stream.form import Chunk, StoredGroup
from hybridkv.stream.torch_io import page_bytes

MODELS = ("qwen3.5-4b", "gemma-3-4b", "deepseek-v3")
STRETCH_BLOCKS = 16


class Plan(NamedTuple):
    """What the stored form must not depend on."""

    tp: int
    row_layers: int
    row_order: str


PLANS = (Plan(1, 1, "hlkt"), Plan(1, 4, "hlkt"), Plan(2, 4, "hlkt"), Plan(1, 1, "tklh"))


class Bench:
    """One plan of one model, with pages in random order."""

    def __init__(self, model: str, plan: Plan, memory_bytes: int, device: str) -> None:
        options = PlanOptions(memory_bytes, row_layers=plan.row_layers, row_order=plan.row_order)
        self.plan = make_plan(load_model(model, tp=plan.tp, rank=0), options)
        self.catalogue = Catalogue(self.plan, CacheLayout.from_plan(self.plan), "benchmark")
        self.buffer = torch.zeros(self.plan.arena_bytes, dtype=torch.uint8, device=device)
        self.pages = page_bytes(self.buffer)

    def compare(self, group: StoredGroup, repeats: int) -> dict[str, Any]:
        chunk = max(group.chunks, key=lambda one: one.row.nbytes)
        span = self._span(group, chunk)
        staged = self.pages.stage(chunk.nbytes(span.num_tokens))
        plain = _plain_copies(self.buffer, chunk, [page for page in span.pages if page is not None])
        tries: dict[str, Callable[[], None]] = {
            "out": lambda: self.pages.copy_out(chunk, span).wait(),
            "plain_out": plain.out,
            "in": lambda: self.pages.copy_in(chunk, span, staged),
            "plain_in": plain.into,
        }
        seconds: dict[str, list[float]] = {name: [] for name in tries}
        for _ in range(repeats + 1):
            for name, run in tries.items():
                start = time.perf_counter()
                run()
                self.pages.settle()
                seconds[name].append(time.perf_counter() - start)
        gib = {name: len(staged) / statistics.median(times[1:]) / 2**30 for name, times in seconds.items()}
        return {
            "group": group.name,
            "row_bytes": len(staged),
            **{f"{name}_gib_s": round(value, 2) for name, value in gib.items()},
            "out_to_plain": round(gib["out"] / gib["plain_out"], 2),
            "in_to_plain": round(gib["in"] / gib["plain_in"], 2),
        }

    def _span(self, group: StoredGroup, chunk: Chunk) -> Span:
        first, last = chunk.grid.pages_per_slab, self.plan.num_slabs * chunk.grid.pages_per_slab
        if group.is_state:
            return Span([first], 1, 1)
        size = self.catalogue.block_tokens
        pages = random.Random(1).sample(range(first, last), STRETCH_BLOCKS)
        return Span(pages, STRETCH_BLOCKS * size, size)


class Plain(NamedTuple):
    out: Callable[[], None]
    into: Callable[[], None]


def _plain_copies(buffer: torch.Tensor, chunk: Chunk, pages: Sequence[int]) -> Plain:
    """The row of each page, as it lies there: on a CPU one copy a page, on a GPU one kernel and one transfer."""
    nbytes, cuda = chunk.row.nbytes, buffer.device.type == "cuda"
    starts = [chunk.grid.page_offset(page) + chunk.row.offset_bytes for page in pages]
    if not cuda:
        whole = memoryview(buffer.numpy())
        staged = memoryview(bytearray(nbytes * len(pages)))

        def out() -> None:
            target = memoryview(torch.empty(nbytes * len(pages), dtype=torch.uint8).numpy())
            for number, start in enumerate(starts):
                target[number * nbytes : (number + 1) * nbytes] = whole[start : start + nbytes]

        def into() -> None:
            for number, start in enumerate(starts):
                whole[start : start + nbytes] = staged[number * nbytes : (number + 1) * nbytes]

        return Plain(out, into)
    words, stride = buffer.view(torch.int64), chunk.grid.stride_bytes // 8
    rows = words.as_strided((len(words) // stride, nbytes // 8), (stride, 1), chunk.row.offset_bytes // 8)
    host = torch.empty((len(pages), nbytes // 8), dtype=torch.int64, pin_memory=True)

    def gather() -> None:
        fresh = torch.empty(host.shape, dtype=torch.int64, pin_memory=True)
        fresh.copy_(rows[torch.tensor(pages, device=buffer.device)], non_blocking=True)
        torch.cuda.synchronize()

    def scatter() -> None:
        rows[torch.tensor(pages, device=buffer.device)] = host.to(buffer.device, non_blocking=True)
        torch.cuda.synchronize()

    return Plain(gather, scatter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory", type=int, default=2, help="Size of the arena in GiB.")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    results = []
    for model in MODELS:
        for plan in PLANS:
            bench = Bench(model, plan, args.memory << 30, args.device)
            for group in bench.catalogue.groups:
                result = {"model": model, **plan._asdict(), **bench.compare(group, args.repeats)}
                print(result)
                results.append(result)
    usual = [one for one in results if one["row_order"] == "hlkt"]
    report = {
        "benchmark": "stored_form",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "results": results,
        "median_out_to_plain": statistics.median(one["out_to_plain"] for one in usual),
        "median_in_to_plain": statistics.median(one["in_to_plain"] for one in usual),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
