"""Where the time of a call goes, by kind of operation, from torch's profiler. The same for every peer.

All threads that call operations are looked at, and one of them has a model: the time of a parallel operation is the
time it held that thread. What no operation accounts for is Python: the scheduler, the cache's books, the model's own
code, dispatch. The profiler costs a few microseconds an operation, so code of many small operations looks slower here
than it is.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

KINDS = (
    ("states", ("gated_delta", "gdn", "recurrent", "scan", "chunk_", "conv1d", "convolution")),
    ("attention", ("attention", "flash", "sdpa", "reshape_and_cache", "softmax")),
    ("experts", ("expert", "moe", "grouped_mm", "topk", "bincount", "histc")),
    (
        "matmul",
        (
            "::linear",
            "::mm",
            "::addmm",
            "::bmm",
            "::baddbmm",
            "::matmul",
            "einsum",
            "packed_linear",
            "onednn",
            "gemm",
            "mkldnn",
        ),
    ),
    (
        "copy and gather",
        ("copy", "index", "gather", "scatter", "::cat", "clone", "embedding", "select", "slice", "fill"),
    ),
    ("compiled", ("compiledfxgraph", "torch-compiled")),
    ("pointwise", ("::",)),
)
"""First match wins, by a part of the operation's name."""


def kind_of(operation: str) -> str:
    name = operation.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")


def breakdown(call: Callable[[], object], top: int = 12) -> dict[str, Any]:
    """Shares of the wall time by kind, and the operations that took most."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    everyone = _ExperimentalConfig(profile_all_threads=True)  # an engine computes on a thread of its own
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everyone) as prof:
        begin = time.perf_counter()
        call()
        wall_s = time.perf_counter() - begin
    operations = sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)
    seconds: dict[str, float] = defaultdict(float)
    for event in operations:
        seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    seconds["Python"] = max(0.0, wall_s - sum(seconds.values()))
    return {
        "wall_s": wall_s,
        "shares": {kind: s / wall_s for kind, s in sorted(seconds.items(), key=lambda item: -item[1])},
        "operations": sum(e.count for e in operations),
        "top": [(e.key, e.count, e.self_cpu_time_total / 1e6) for e in operations[:top]],
    }


class CpuTime(NamedTuple):
    """The machine's clocks at one instant. What others burnt in between is how far a measurement can be trusted."""

    wall_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuTime:
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:  # not a Linux: nothing is known of the others
            return cls(time.perf_counter(), own_s, own_s)
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        busy = user + nice + system + irq + softirq + steal
        return cls(time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), own_s)

    def other_cores(self, before: CpuTime) -> float:
        """The cores others kept busy since `before`, on average."""
        others_s = (self.machine_s - before.machine_s) - (self.own_s - before.own_s)
        return max(0.0, others_s / max(1e-9, self.wall_s - before.wall_s))
