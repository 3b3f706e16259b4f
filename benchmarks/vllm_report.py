"""The tables and records of vllm_connector.py, with the targets beside the figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

HIT_TTFT_TARGETS = {"qwen3-next": 0.5, "gemma-3": 0.65}
"""TTFT of a hit with HybridKVConnector, at most this share of Mooncake's."""
MISS_TARGET = 1.05
CACHES = ("store alone", "with vLLM's cache")


Hits = dict[str, dict[str, list[int]]]
"""Cached tokens of the requests of each workload, by the caches that may answer."""


class Measured(NamedTuple):
    """Answers of one mode, in the order of the prompts."""

    miss: list[dict[str, Any]]
    hit: list[dict[str, Any]]
    """In the process that stored them."""
    restart: list[dict[str, Any]]
    """In the next process."""
    decode: list[dict[str, Any]]
    hits: Hits
    bytes_a_prompt_token: float


def _median(answers: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(of, answers))


def _ttft(answer: dict[str, Any]) -> float:
    return float(answer["ttft_s"])


def _decode(answer: dict[str, Any]) -> float:
    return float(answer["finish_s"] - answer["ttft_s"])


def _cpu(answer: dict[str, Any]) -> float:
    return float(answer["cpu_s"])


def _spread(answers: list[dict[str, Any]]) -> list[float]:
    return [min(map(_ttft, answers)), max(map(_ttft, answers))]


def record(model: str, mode: str, measured: Measured) -> dict[str, Any]:
    """The figures of one mode."""
    misses = measured.miss + measured.decode
    same = sum(a["output"] == b["output"] for a, b in zip(measured.miss, measured.restart, strict=True))
    return {
        "model": model,
        "mode": mode,
        "cached_tokens": measured.hits,
        "hit_cached_tokens": _median(measured.hit, lambda answer: answer["cached_tokens"]),
        "hit_ttft_s": _median(measured.hit, _ttft),
        "hit_ttft_range_s": _spread(measured.hit),
        "restart_cached_tokens": _median(measured.restart, lambda answer: answer["cached_tokens"]),
        "restart_ttft_s": _median(measured.restart, _ttft),
        "restart_ttft_range_s": _spread(measured.restart),
        "restart_same_first_token": same / len(measured.miss),
        "miss_ttft_s": _median(misses, _ttft),
        "miss_ttft_range_s": _spread(misses),
        "miss_cpu_s": _median(measured.miss, _cpu),
        "decode_s": _median(measured.decode, _decode),
        "bytes_a_prompt_token": measured.bytes_a_prompt_token,
    }


def show(model: str, results: dict[str, Measured], console: Console) -> list[dict[str, Any]]:
    """Print the tables of one model and return their records."""
    records = [record(model, mode, measured) for mode, measured in results.items()]
    by_mode = {one["mode"]: one for one in records}
    console.print(_hits(model, by_mode), _times(model, by_mode))
    for one in records:
        one |= _ratios(one, by_mode)
    for line in _verdicts(model, by_mode):
        console.print(line, markup=False)
    return records


def _hits(model: str, by_mode: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{model}: cached tokens of each request", title_justify="left")
    table.add_column("workload")
    for mode in by_mode:
        table.add_column(mode, justify="right")
    for workload in next(iter(by_mode.values()))["cached_tokens"]:
        for caches in CACHES:
            found = [one["cached_tokens"][workload].get(caches, ()) for one in by_mode.values()]
            table.add_row(f"{workload}, {caches}", *("/".join(map(str, cached)) for cached in found))
    for name, key in (("1,500, same process", "hit"), ("1,500, after a restart", "restart")):
        table.add_row(name, *(f"{one[f'{key}_cached_tokens']:.0f}" for one in by_mode.values()))
    return table


def _times(model: str, by_mode: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{model}: 1,500-token prompts, medians (least-most)", title_justify="left")
    table.add_column("mode")
    for column in (
        "hit TTFT ms",
        "after a restart",
        "miss TTFT ms",
        "x none",
        "CPU x none",
        "decode ms",
        "x none",
        "bytes/token",
    ):
        table.add_column(column, justify="right")
    for mode, one in by_mode.items():
        ratios = _ratios(one, by_mode)
        cells = [_milliseconds(one, key) for key in ("hit_ttft", "restart_ttft", "miss_ttft")]
        cells += [_ratio(ratios["miss_x_none"]), _ratio(ratios["miss_cpu_x_none"])]
        cells += [f"{one['decode_s'] * 1000:.0f}", _ratio(ratios["decode_x_none"])]
        table.add_row(mode, *cells, f"{one['bytes_a_prompt_token']:.0f}" if not mode.startswith("none") else "")
    return table


def _milliseconds(one: dict[str, Any], key: str) -> str:
    least, most = one[f"{key}_range_s"]
    return f"{one[f'{key}_s'] * 1000:.0f} ({least * 1000:.0f}-{most * 1000:.0f})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _ratios(one: dict[str, Any], by_mode: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """A mode against none with the same threshold, if it ran, and against Mooncake; None where that did not run."""
    _, dash, chunks = one["mode"].partition("-")
    none, mooncake = by_mode.get(f"none{dash}{chunks}", by_mode.get("none")), by_mode.get("mooncake")
    return {
        "miss_x_none": one["miss_ttft_s"] / none["miss_ttft_s"] if none else None,
        "miss_cpu_x_none": one["miss_cpu_s"] / none["miss_cpu_s"] if none else None,
        "decode_x_none": one["decode_s"] / none["decode_s"] if none else None,
        "hit_x_mooncake": one["hit_ttft_s"] / mooncake["hit_ttft_s"] if mooncake else None,
        "restart_x_mooncake": one["restart_ttft_s"] / mooncake["restart_ttft_s"] if mooncake else None,
    }


def _verdicts(model: str, by_mode: dict[str, dict[str, Any]]) -> list[str]:
    """The targets, and whether each was met in this run."""
    lines = []
    if "none" in by_mode and "none-256" in by_mode:
        cost = by_mode["none-256"]["miss_ttft_s"] / by_mode["none"]["miss_ttft_s"]
        lines.append(f"noise: TTFT of a miss, none-256 x none {cost:.3f} (a request alone is not cut at the threshold)")
    for mode in (mode for mode in by_mode if mode.startswith("hybridkv")):
        one = by_mode[mode]
        checks: list[tuple[str, float | None, float]] = [
            ("TTFT of a miss, x none", one["miss_x_none"], MISS_TARGET),
            ("decode, x none", one["decode_x_none"], MISS_TARGET),
        ]
        for name, target in HIT_TTFT_TARGETS.items():
            if model.startswith(name):
                checks.append(("TTFT of a hit, x mooncake", one["hit_x_mooncake"], target))
                checks.append(("the same after a restart", one["restart_x_mooncake"], target))
        for what, value, target in checks:
            if value is not None:
                lines.append(f"{mode}: {what} {value:.3f} (target {target}): {_met(value <= target)}")
        if "mooncake" in by_mode:
            fewer = _not_more(one, by_mode["mooncake"])
            lines.append(f"{mode}: more tokens hit than mooncake's: {_met(not fewer)} {', '.join(fewer)}".rstrip())
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


def _not_more(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Workloads on which a mode hit no more tokens than the other."""
    fewer = [
        f"{workload}, {caches}"
        for workload, found in one["cached_tokens"].items()
        for caches, cached in found.items()
        if sum(cached) <= sum(other["cached_tokens"][workload][caches])
    ]
    return fewer + [key for key in ("hit_cached_tokens", "restart_cached_tokens") if one[key] <= other[key]]
