"""Time to the first token of a long prompt whose beginning is in a store: computed again, loaded first, or layerwise.

The store is throttled to several bandwidths, chosen from what was measured in the same run: loading takes a quarter, a
half, the same, twice and four times what computing the rest takes. The bound is max(compute, I/O): what a perfect
overlap would take. Its parts are measured in the same run: `compute` with the beginning in memory, I/O as the time of
the loads that were waited for whole. The throttle sleeps, it does not spin: loading costs next to no processor time.

    python benchmarks/stream.py [--model qwen3-next] [--plot timeline.png]

One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engine_models
import numpy as np
from throttle import RowTime, ThrottledStore

from hybridkv import Engine, SamplingParams
from hybridkv.store import MemoryStore

SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class LayerTimes:
    """When each layer of the last step began and ended."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[float, float]] = {}

    def before_layer(self, layer: int, frame: Any) -> None:
        self.spans[layer] = (time.perf_counter(), 0.0)

    def after_layer(self, layer: int, frame: Any, hidden: Any) -> None:
        self.spans[layer] = (self.spans[layer][0], time.perf_counter())


class Prompts:
    """The same beginning, and always another end."""

    def __init__(self, num_stored: int, num_new: int, vocab_size: int) -> None:
        self._random = np.random.default_rng(7)
        self._vocab_size = vocab_size
        self._num_new = num_new
        self.stored = self._tokens(num_stored)

    def next(self) -> list[int]:
        return self.stored + self._tokens(self._num_new)

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocab_size, count)]


class Bench:
    """One model, one store, engines that come and go."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.prompts = Prompts(args.stored, args.new, engine_models.SHAPES[args.model].vocab_size)
        self.objects = MemoryStore(8 * 2**30)

    def engine(self, stream: str = "auto", bytes_per_s: float | None = None) -> tuple[Engine, ThrottledStore]:
        store = ThrottledStore(self.objects, bytes_per_s)
        engine = Engine(
            self.directory,
            memory=self.args.memory,
            store=store,
            stream=stream,
            max_num_batched_tokens=self.args.new,
            row_layers=self.args.row_layers,
        )
        return engine, store

    def fill(self) -> None:
        """Leave the beginning in the store: objects up to its end, since a prompt of just that is served."""
        engine, _ = self.engine()
        with engine:
            engine.generate([[*self.prompts.stored, 0]], ONE_TOKEN, progress=False)

    def recompute(self) -> list[float]:
        with Engine(self.directory, memory=self.args.memory, max_num_batched_tokens=self.args.new) as engine:
            return [_ttft(engine, self.prompts.next(), reset=True) for _ in range(self.args.repeats)]

    def compute(self) -> list[float]:
        """The beginning in memory."""
        with Engine(self.directory, memory=self.args.memory, max_num_batched_tokens=self.args.new) as engine:
            _ttft(engine, self.prompts.next(), reset=True)
            _ttft(engine, self.prompts.next())
            return [_ttft(engine, self.prompts.next()) for _ in range(self.args.repeats)]

    def streamed(self, stream: str, bytes_per_s: float) -> Streamed:
        engine, store = self.engine(stream, bytes_per_s)
        layers = LayerTimes()
        with engine:
            engine.observe_layers(layers)
            _ttft(engine, self.prompts.next(), reset=True)
            seconds, io, cached = [], [], 0
            for _ in range(self.args.repeats):
                before = engine.stats().stream
                store.rows.clear()
                seconds.append(_ttft(engine, self.prompts.next(), reset=True))
                after = engine.stats().stream
                assert before is not None
                assert after is not None
                io.append(after.load_seconds - before.load_seconds)
                cached = after.loaded_tokens - before.loaded_tokens
            return Streamed(seconds, io, cached, list(store.rows), dict(layers.spans))


class Streamed(NamedTuple):
    seconds: list[float]
    io_seconds: list[float]
    loaded_tokens: int
    rows: list[RowTime]
    layers: dict[int, tuple[float, float]]


def _ttft(engine: Engine, prompt: Sequence[int], *, reset: bool = False) -> float:
    if reset:
        engine.reset_cache()
    engine.flush_store()
    return engine.generate([prompt], ONE_TOKEN, progress=False)[0].metrics.ttft_s


def plot(path: Path, streamed: Streamed, title: str) -> None:
    """Rows on their way above, layers below, on one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    start = min(row.began for row in streamed.rows)
    figure, axes = plt.subplots(figsize=(9, 6))
    colours = {group: f"C{i}" for i, group in enumerate(sorted({row.group for row in streamed.rows}))}
    for number, row in enumerate(sorted(streamed.rows, key=lambda row: row.ended)):
        label = row.group if number == 0 or row.group not in axes.get_legend_handles_labels()[1] else None
        left, width = (row.began - start) * 1000, (row.ended - row.began) * 1000
        axes.barh(number, width, left=left, color=colours[row.group], label=label)
    base = len(streamed.rows) + 1
    for layer, (began, ended) in streamed.layers.items():
        axes.barh(base + layer, (ended - began) * 1000, left=(began - start) * 1000, color="0.35")
    axes.set_yticks([len(streamed.rows) / 2, base + len(streamed.layers) / 2], ["rows", "layers"])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the first row was asked for")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    engine_models.build(args.model, directory, args.dtype)
    bench = Bench(args, directory)
    bench.fill()
    compute = statistics.median(bench.compute())
    recompute = statistics.median(bench.recompute())
    nbytes = sum(one.nbytes for one in bench.objects.objects() if (one.position or 0) <= args.stored)
    print(f"{args.model}: compute {compute:.3f} s, recompute all {recompute:.3f} s, {nbytes / 2**20:.0f} MiB stored")
    results = []
    for share in SHARES:
        bytes_per_s = nbytes / (share * compute)
        whole = bench.streamed("async", bytes_per_s)
        layered = bench.streamed("layerwise", bytes_per_s)
        io = statistics.median(whole.io_seconds)
        bound = max(compute, io)
        result = {
            "io_share": share,
            "mib_per_s": round(bytes_per_s / 2**20, 1),
            "loaded_tokens": layered.loaded_tokens,
            "io_s": round(io, 4),
            "bound_s": round(bound, 4),
            "load_all_s": round(statistics.median(whole.seconds), 4),
            "layerwise_s": round(statistics.median(layered.seconds), 4),
        }
        result["layerwise_to_bound"] = round(result["layerwise_s"] / result["bound_s"], 3)
        result["layerwise_to_load_all"] = round(result["layerwise_s"] / result["load_all_s"], 3)
        print(result)
        results.append(result)
        if args.plot and share == 1.0:
            plot(args.plot, layered, f"{args.model}: I/O takes as long as computing")
    return {
        "benchmark": "stream",
        "model": args.model,
        "stored_tokens": args.stored,
        "new_tokens": args.new,
        "stored_bytes": nbytes,
        "compute_s": round(compute, 4),
        "recompute_s": round(recompute, 4),
        "results": results,
        "worst_layerwise_to_bound": max(result["layerwise_to_bound"] for result in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(engine_models.SHAPES), default="qwen3-next")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--stored", type=int, default=2048, help="Tokens that are in the store.")
    parser.add_argument("--new", type=int, default=512, help="Tokens after them.")
    parser.add_argument("--row-layers", type=int, help="Layers that are loaded together; default: the device's usual.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="Draw rows against layers, where I/O takes as long as computing.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run(args, Path(directory) / args.model)
    assert threading.active_count() < 64, "threads are left behind"
    print(json.dumps(report))


if __name__ == "__main__":
    main()
