"""What a deployment sees of the cache: how many tokens of a prompt are not computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridkv import Engine, Prompt, SamplingParams
from hybridkv.cache.retention.named import default_checkpoints, named_policy
from hybridkv.cache.retention.policy import Candidate, Kind, PromptEndBranchesGrid
from hybridkv.engine.loading.checkpoint import load
from hybridkv.models import compute_of
from hybridkv.replay import Setting, load_trace, replay
from tests.engine.drive import GREEDY
from tests.engine.zoo import FAMILIES, build, family_config, make, prompt

SHARED, OWN = 560, 400
BRIEF = replace(GREEDY, max_tokens=2)


def engine_of(name: str, **options: Any) -> Engine:
    config = family_config(name, max_position_embeddings=2048)
    return Engine(make(config, branch_scale=FAMILIES[name].branch_scale), memory="64MiB", device="cpu", **options)


def siblings(count: int, *breakpoints: int) -> list[Prompt]:
    return [Prompt(prompt(SHARED, 1) + prompt(OWN, 2 + index), breakpoints) for index in range(count)]


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "falcon_h1"])
def test_siblings_one_after_the_other(family: str) -> None:
    with engine_of(family) as engine:
        cached = [engine.generate(one, BRIEF, progress=False)[0].cached_tokens for one in siblings(4)]
        layout = engine._core.cache.layout
        policy = default_checkpoints(layout)
        assert isinstance(policy, PromptEndBranchesGrid)
        grid = 16 if layout.keeps_idle_windows else policy.fill_tokens or SHARED + 1
        assert cached[0] == 0
        assert SHARED // grid * grid <= cached[1] <= SHARED
        assert cached[2:] == [SHARED, SHARED]
        engine.check_integrity()


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "falcon_h1"])
def test_the_second_sibling_resumes_at_a_breakpoint(family: str) -> None:
    with engine_of(family) as engine:
        cached = [engine.generate(one, BRIEF, progress=False)[0].cached_tokens for one in siblings(2, SHARED)]
        assert cached == [0, SHARED]


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "falcon_h1"])
def test_a_burst_of_siblings_computes_the_prefix_once(family: str) -> None:
    """However slow the caller's thread is: the first step knows all of them."""

    def slow_numbers() -> Iterator[int]:
        for number in range(8):
            time.sleep(0.02)
            yield number

    with engine_of(family) as engine:
        engine._numbers = slow_numbers()  # type: ignore[assignment]
        results = engine.generate(siblings(8), BRIEF, progress=False)
        assert sorted(result.cached_tokens for result in results) == [0] + [SHARED] * 7
        assert engine._core.computed_tokens == SHARED + 8 * (OWN + 1)
        assert engine._core.scheduler.followed == 7


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "falcon_h1", "llama"])
def test_replay_and_engine_report_the_same_hits(family: str, tmp_path: Path) -> None:
    """Conversations of an engine become a trace; replayed through the same layout it hits the same tokens."""
    records: list[dict[str, Any]] = []
    hits: list[int] = []
    with engine_of(family) as engine:
        for index in range(6):
            history = prompt(40, index % 2)
            for turn in range(3):
                history = history + prompt(23, 100 * index + turn)
                result = engine.generate(history, SamplingParams(max_tokens=11, seed=index), progress=False)[0]
                records.append({"timestamp": len(records), "token_ids": history, "output_token_ids": result.token_ids})
                hits.append(result.cached_tokens)
                history = history + result.token_ids
        layout = engine._core.cache.layout
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    setting = Setting("trace", family, 1, 64 << 20, 16, serial=True)
    report = replay(load_trace(path), layout, setting)
    assert report.hit_tokens == sum(hits)
    assert report.hit_tokens > 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_engine_weighs_the_flops_of_its_model_as_a_replay_does(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.config.save_pretrained(tmp_path)
    flops = load(model, device="cpu").compute().flops
    assert flops(0, 64) == compute_of(tmp_path).flops(0, 64) > 64
    assert flops(32, 64) < flops(0, 64)


def test_the_policy_of_an_engine_asks_for_the_flops_of_its_model() -> None:
    end = Candidate(Kind.END, False, 0, 64, 0, start=0, end=64, num_bytes=1)
    with engine_of("qwen3_next", policy="flops") as engine:
        rated = engine._core.cache._prefixes.queue.policy.rate(end)
        compute = load(make(family_config("qwen3_next", max_position_embeddings=2048)), device="cpu").compute()
    assert rated == named_policy("flops", lambda: compute.flops).rate(end)
    assert rated != named_policy("flops").rate(end)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "falcon_h1"])
def test_a_burst_after_a_first_sibling_computes_the_prefix_once_more_at_most(family: str) -> None:
    """The first could not know where the others would leave it: one of them finds out, the others wait for it."""
    with engine_of(family) as engine:
        first, *burst = siblings(6)
        engine.generate(first, BRIEF, progress=False)
        cached = sorted(result.cached_tokens for result in engine.generate(burst, BRIEF, progress=False))
        assert cached[1:] == [SHARED] * 4
