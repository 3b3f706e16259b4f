"""One request at a time: where every token comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridkv.errors import HybridKVError
from hybridkv.replay import Setting, load_trace, replay
from tests.replay.traces import MIB, blocks, chats, layout, mooncake, run, write_trace

MODELS = ["qwen3.5-0.8b", "gemma-3-1b", "lfm2-1.2b", "mamba2-2.7b"]


def test_a_repeated_prompt_is_supplied_up_to_its_last_block(tmp_path: Path) -> None:
    report = run(mooncake(tmp_path, [blocks(range(5), 75)] * 2), prompts_only=True)
    assert (report.input_tokens, report.hit_tokens) == (150, 64)
    assert report.misses["never_seen"] == 75
    assert report.misses["below_block"] == 11
    assert report.recomputed_tokens == 11
    assert report.hit_ratio == 64 / 150
    assert report.checkpoints_hit == 1
    assert report.refused == report.preempted == report.output_tokens == 0
    assert [report.simulated_s, report.ttft_s, report.queue_wait_s] == [None] * 3


def test_flops_are_those_of_what_was_computed_and_saved(tmp_path: Path) -> None:
    report = run(mooncake(tmp_path, [blocks(range(4), 64)] * 2), prompts_only=True)
    all_of_one = 64 + 64 * 65 / 2
    assert report.hit_tokens == 48
    assert report.saved_flops == 48 + 48 * 49 / 2
    assert report.computed_flops == 2 * all_of_one - report.saved_flops


def test_a_second_turn_resumes_where_the_reply_ended(tmp_path: Path) -> None:
    lines = [blocks([1, 2, 3], 40, 30), blocks([1, 2, 4, 5, 6, 7], 90)]
    report = run(mooncake(tmp_path, lines))
    assert report.hit_tokens == 40 + 30 - 1, "the last token of a reply was never fed"
    assert report.continued == 1
    assert report.output_tokens == 30
    assert run(mooncake(tmp_path, lines), prompts_only=True).hit_tokens == 32


def test_a_prefix_that_parts_where_no_state_is_lacks_a_state(tmp_path: Path) -> None:
    shared = list(range(7))  # short of where the grid begins
    lines = [blocks([*shared, 100 + i, 200 + i], 9 * 16) for i in range(3)]
    report = run(mooncake(tmp_path, lines), prompts_only=True)
    assert report.misses["state_missing"] == 7 * 16, "the second finds out, and leaves a state for the third"
    assert report.hit_tokens == 7 * 16


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize("prompts_only", [True, False])
def test_tokens_are_conserved_on_every_kind_of_model(
    model: str, serial: bool, prompts_only: bool, tmp_path: Path
) -> None:
    trace = mooncake(tmp_path, chats(4, 3))
    report = run(trace, memory_mib=4096, model=model, serial=serial, prompts_only=prompts_only)
    assert report.hit_tokens > 0
    assert report.refused == 0
    assert report.output_tokens == (0 if prompts_only else 12 * 300)


def test_what_was_evicted_is_not_called_new(tmp_path: Path) -> None:
    lines = [blocks(range(1000 * i, 1000 * i + 20), 20 * 512, size=512) for i in range(12)]
    report = run(mooncake(tmp_path, lines * 2), memory_mib=512, prompts_only=True)
    assert report.refused == 0
    assert report.misses["never_seen"] == 12 * 20 * 512
    assert report.misses["kv_evicted"] > 0
    assert report.recomputed_tokens == report.input_tokens - report.hit_tokens - report.misses["never_seen"]


def test_what_can_never_fit_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    lines = [blocks([1, 2], 1024, size=512), blocks(range(10, 1010), 512_000, size=512), blocks([1, 2], 1024, size=512)]
    report = run(mooncake(tmp_path, lines), memory_mib=512)
    assert report.refused == 1
    assert report.misses["refused"] == 512_000
    assert report.hit_tokens == 1008


def test_token_traces(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"token_ids": list(range(100)), "output_token_ids": list(range(200, 220))},
        {"token_ids": [*range(100), *range(200, 220), *range(300, 340)], "output_length": 0},
    ]
    report = run(load_trace(write_trace(tmp_path / "t.jsonl", lines)))
    assert report.hit_tokens == 119
    assert report.input_tokens == 260


def test_samples_show_each_group_over_time(tmp_path: Path) -> None:
    report = run(mooncake(tmp_path, chats(40, 5)))
    assert len(report.bytes_by_group) == 100
    assert set(report.bytes_by_group[0]) == {"t", "full", "state"}
    assert [sample["t"] for sample in report.bytes_by_group] == sorted(sample["t"] for sample in report.bytes_by_group)
    assert 0 < report.prefill_saved["p10"] < report.prefill_saved["p90"] < 1


def test_nonsense_is_refused(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1], 9)])
    with pytest.raises(HybridKVError, match="no policy 'best': choose one of"):
        replay(trace, layout(512), Setting("t", "m", 1, 512 * MIB, 16, policy="best", serial=True))
    with pytest.raises(HybridKVError, match="speed 0"):
        run(trace, speed=0)
