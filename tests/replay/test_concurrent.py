"""Requests side by side: everything ends, whatever the memory, and the clock says what it should."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cache import CacheGroup, CacheLayout, Role
from hybridkv.errors import HybridKVError
from hybridkv.replay import ServiceModel, Setting, replay
from tests.replay.traces import MIB, FlopsOfTokens, blocks, chats, layout, mooncake, run


def test_the_clock(tmp_path: Path) -> None:
    """10,000 prompt tokens take a second, and the 101 tokens of a reply one more: the first comes with the prompt."""
    lines = [blocks(range(20), 10_000, 101, size=512), blocks(range(50, 70), 10_000, 101, size=512)]
    report = run(mooncake(tmp_path, lines), serial=False)
    assert report.simulated_s == pytest.approx(3)
    assert report.queue_wait_s is not None
    assert report.ttft_s is not None
    assert report.queue_wait_s["p50"] == pytest.approx(0.5)
    assert report.ttft_s["p50"] == pytest.approx(1.5)
    by_flops = ServiceModel(decode_tokens_per_s=100, flops_per_s=1e8, compute=FlopsOfTokens())
    report = run(mooncake(tmp_path, lines[:1]), serial=False, service=by_flops)
    assert report.simulated_s == pytest.approx((10_000 + 10_000 * 10_001 / 2) / 1e8 + 1)


def test_speed_brings_requests_closer(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1], 16), blocks([2], 16, at_ms=10_000)])
    slow, fast = run(trace, serial=False), run(trace, serial=False, speed=10)
    assert slow.simulated_s == pytest.approx(10.0016)
    assert fast.simulated_s == pytest.approx(1.0016)


def test_a_turn_waits_for_the_reply_it_contains(tmp_path: Path) -> None:
    lines = [blocks([1, 2, 3], 40, 30), blocks([1, 2, 4, 5, 6, 7], 90, at_ms=1)]
    report = run(mooncake(tmp_path, lines), serial=False)
    assert report.hit_tokens == 69
    assert report.queue_wait_s is not None
    assert report.queue_wait_s["p99"] == 0, "it arrives when the reply is there"


def test_siblings_follow_the_first(tmp_path: Path) -> None:
    """While one prompt keeps the prefill busy, siblings gather: the first of them leaves a state where they part."""
    shared = list(range(20))
    siblings = [blocks([*shared, 100 + i, 200 + i], 22 * 16, at_ms=1) for i in range(4)]
    report = run(mooncake(tmp_path, [blocks(range(500, 600), 1600), *siblings]), serial=False, prompts_only=True)
    assert report.followed == 3
    assert report.hit_tokens == 3 * 20 * 16
    assert report.misses["state_missing"] == 0


def test_no_room_for_replies_preempts_the_youngest(tmp_path: Path) -> None:
    lines = [blocks(range(100 * i, 100 * i + 10), 5120, 4000, size=512) for i in range(8)]
    report = run(mooncake(tmp_path, lines), memory_mib=512, serial=False)
    assert report.preempted > 0
    assert report.refused == 0
    assert report.output_tokens == 8 * 4000


def test_a_request_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    lines = [blocks([1], 500, 10, size=512), blocks(range(10, 1010), 512_000, 10, size=512)]
    lines.append(blocks([2], 500, 512_000, size=512))
    report = run(mooncake(tmp_path, lines), memory_mib=512, serial=False)
    assert report.refused == 2
    assert report.output_tokens == 10


@pytest.mark.parametrize("model", ["qwen3.5-0.8b", "gemma-3-1b", "lfm2-1.2b"])
@pytest.mark.parametrize("seed", range(4))
def test_everything_ends_in_tiny_memory(seed: int, model: str, tmp_path: Path) -> None:
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = chats(5, 4, gap_ms=rng.choice([0, 10, 400]), output=rng.randrange(2500))
    for number in range(30):
        pieces = rng.randrange(1, 60)
        ids = range(10_000 * (number % 7) + 5000, 10_000 * (number % 7) + 5000 + pieces)
        lines.append(blocks(ids, 512 * pieces, rng.randrange(3000), rng.randrange(3000), 512))
    report = run(mooncake(tmp_path, lines), memory_mib=rng.choice([300, 400, 600]), model=model, serial=False)
    assert report.refused < len(lines)


def test_a_service_model_is_needed(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1], 9)])
    with pytest.raises(HybridKVError, match="needs a service model"):
        replay(trace, layout(512), Setting("t", "m", 1, 512 * MIB, 16, policy="lru"))
    for decode, prefill in ((0.0, 1.0), (1.0, -1.0)):
        with pytest.raises(HybridKVError, match="more than 0"):
            ServiceModel(decode, prefill)
    with pytest.raises(HybridKVError, match="no way to time a prefill"):
        ServiceModel(1.0)


def test_the_youngest_waits_instead_of_being_refused(tmp_path: Path) -> None:
    """Two replies grow until one finds no room: it goes on when the other has ended."""
    trace = mooncake(tmp_path, [blocks([1], 16, 33), blocks([2], 16, 33, at_ms=1)])
    group = CacheGroup("full", Role.FULL, 1, page_bytes=1000)
    small = CacheLayout.of([group], block_tokens=16, num_slabs=5)
    setting = Setting("t", "m", 1, 5000, 16)
    report = replay(trace, small, setting, service=ServiceModel(100.0, 1e5), check=True)
    assert report.refused == 0
    assert report.preempted > 0
    assert report.output_tokens == 66


@pytest.mark.parametrize("serial", [True, False])
def test_what_a_request_resumes_from_may_have_to_go_for_it(tmp_path: Path, serial: bool) -> None:
    """The tail it would resume from and its copy do not fit both: it starts from the beginning."""
    trace = mooncake(tmp_path, [blocks([1, 2], 20, 5), blocks([1, 2], 20, 5, at_ms=10_000)])
    small = CacheLayout.of([CacheGroup("full", Role.FULL, 1, page_bytes=1000)], block_tokens=16, num_slabs=3)
    setting = Setting("t", "m", 1, 3000, 16, serial=serial)
    report = replay(trace, small, setting, service=ServiceModel(100.0, 1e5), check=True)
    assert report.refused == 0
    assert report.output_tokens == 10


def test_output_tokens_are_those_of_the_trace(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1], 16, 1), blocks([2], 16, 0), blocks([3], 16, 7)])
    assert [run(trace, serial=serial).output_tokens for serial in (True, False)] == [8, 8]
