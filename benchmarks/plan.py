"""How long planning takes and how much it pads, over the whole catalogue. The last line is JSON."""

from __future__ import annotations

import json
import statistics
import time

from hybridkv.errors import ParallelismError
from hybridkv.models import catalogue, load_model
from hybridkv.plan import PlanOptions, make_plan, uniform_plan

MEMORY_BYTES = 80 * 2**30


def main() -> None:
    seconds: list[float] = []
    worst_padding, worst_model = 0.0, ""
    worst_uniform, worst_uniform_model = 0.0, ""
    for name in catalogue():
        for tp in (1, 2, 4, 8):
            start = time.perf_counter()
            try:
                plan = make_plan(load_model(name, tp=tp), PlanOptions(MEMORY_BYTES))
            except ParallelismError:
                continue
            seconds.append(time.perf_counter() - start)
            worst_padding, worst_model = max((worst_padding, worst_model), (plan.padding_ratio, f"{name} TP {tp}"))
            uniform = uniform_plan(plan.model, MEMORY_BYTES).padding_ratio
            worst_uniform, worst_uniform_model = max((worst_uniform, worst_uniform_model), (uniform, f"{name} TP {tp}"))
    print(
        f"{len(seconds)} plans: median {statistics.median(seconds) * 1e3:.1f} ms, slowest {max(seconds) * 1e3:.0f} ms"
    )
    print(
        f"most padding: {worst_padding:.2%} ({worst_model}); uniform pages: {worst_uniform:.2%} ({worst_uniform_model})"
    )
    result = {
        "benchmark": "plan",
        "plans": len(seconds),
        "median_ms": round(statistics.median(seconds) * 1e3, 2),
        "slowest_ms": round(max(seconds) * 1e3, 1),
        "worst_padding_ratio": round(worst_padding, 5),
        "worst_uniform_padding_ratio": round(worst_uniform, 5),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
