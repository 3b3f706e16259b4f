"""Small traces, and the cache of a small model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.cache import DEFAULT_POLICY, CacheLayout
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.replay import ReplayReport, ServiceModel, Setting, Trace, load_trace, parse_tier, replay
from hybridkv.stream import Catalogue

MODEL = "qwen3.5-0.8b"
MIB = 2**20


class FlopsOfTokens:
    """A stand-in for a model's FLOPs: 1 a token, and 1 for each pair of tokens."""

    def flops(self, start: int, end: int) -> float:
        return float(end - start) + (end * (end + 1) - start * (start + 1)) / 2


def numbers(packed: bytes) -> list[int]:
    """Token ids."""
    return [int(token) for token in np.frombuffer(packed, dtype="<i4")]


def write_trace(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def blocks(ids: Sequence[int], length: int, output: int = 0, at_ms: float = 0, size: int = 16) -> dict[str, Any]:
    """A line of a Mooncake trace."""
    return {
        "timestamp": at_ms,
        "input_length": length,
        "output_length": output,
        "hash_ids": list(ids),
        "block_size": size,
    }


@lru_cache
def layout(memory_mib: int, model: str = MODEL) -> CacheLayout:
    return CacheLayout.from_plan(make_plan(load_model(model), PlanOptions(memory_mib * MIB)))


@lru_cache
def catalogue(memory_mib: int, model: str = MODEL, tp: int = 1) -> Catalogue:
    """What is stored of a model."""
    plan = make_plan(load_model(model, tp=tp), PlanOptions(memory_mib * MIB))
    return Catalogue(plan, CacheLayout.from_plan(plan), model)


def run(
    trace: Trace,
    *,
    memory_mib: int = 2048,
    model: str = MODEL,
    serial: bool = True,
    prompts_only: bool = False,
    speed: float = 1.0,
    service: ServiceModel | None = None,
    tiers: Sequence[str] = (),
    tier_loads: str = "all",
    breakpoints: bool = True,
    tier_fill: bool = False,
) -> ReplayReport:
    """A replay, with the cache's books checked at its end. `tiers`: as on the command line."""
    setting = Setting(
        trace.name,
        model,
        1,
        memory_mib * MIB,
        16,
        policy=DEFAULT_POLICY,
        serial=serial,
        prompts_only=prompts_only,
        speed=speed,
        tiers=tuple(map(parse_tier, tiers)),
        tier_loads=tier_loads,
        breakpoints=breakpoints,
        tier_fill=tier_fill,
    )
    service = service or ServiceModel(decode_tokens_per_s=100, prefill_tokens_per_s=10_000)
    ended = []
    report = replay(
        trace,
        layout(memory_mib, model),
        setting,
        service=service,
        compute=FlopsOfTokens(),
        catalogue=catalogue(memory_mib, model) if tiers else None,
        progress=lambda: ended.append(1),
        check=True,
    )
    assert len(ended) == report.requests == len(trace)
    assert sum(report.misses.values()) + report.hit_tokens == report.input_tokens
    assert report.input_tokens == sum(record.prompt_tokens for record in trace.records)
    assert report.memory_tokens + sum(tier.hit_tokens for tier in report.tiers) == report.hit_tokens
    assert all(tier.peak_bytes <= tier.size_bytes for tier in report.tiers)
    assert 0 < report.peak_bytes <= report.arena_bytes or report.refused == report.requests
    return report


def mooncake(path: Path, lines: Sequence[Mapping[str, Any]]) -> Trace:
    return load_trace(write_trace(path / "trace.jsonl", lines))


def chats(
    num_chats: int, turns: int, *, gap_ms: float = 1000, size: int = 512, output: int = 300
) -> list[dict[str, Any]]:
    """Conversations that share a first block: each turn adds two blocks, and ends in a partial one of its own."""
    lines, fresh = [], 1000
    for turn in range(turns):
        for chat in range(num_chats):
            own = [100_000 * (chat + 1) + i for i in range(2 + 2 * turn)]
            fresh += 1
            length = size * (1 + len(own)) + 100
            at_ms = (turn * num_chats + chat) * gap_ms
            lines.append(blocks([0, *own, fresh], length, output, at_ms, size))
    return lines
