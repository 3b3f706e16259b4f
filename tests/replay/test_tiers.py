"""Stores below the memory: what they supply, what they hold, and how long it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridkv.errors import InputError
from hybridkv.replay import ReplayReport, ServiceModel, Setting, Trace, parse_tier, replay
from tests.replay.traces import MIB, MODEL, FlopsOfTokens, blocks, chats, layout, mooncake, run

MODELS = ["qwen3.5-0.8b", "gemma-3-1b", "lfm2-1.2b", "mamba2-2.7b", "llama-3.1-8b"]
LARGE = "900TiB@1000GB/s"
"""Everything is kept, and a load takes no time to speak of."""
LENGTH = 20 * 512
"""Tokens of a prompt of `rounds`; the memory of `SMALL_MIB` holds two or three of them."""
SMALL_MIB = 512
KV = 12 * 1024
"""Bytes of a token in `MODEL`: 6 layers of full attention, K and V, 2 heads of 256 numbers of 2 bytes."""
HEADER = 4096
"""A header, padded to the first row."""


def rounds(num_prompts: int, num_rounds: int, *, gap_ms: float = 0, output: int = 0) -> list[dict[str, Any]]:
    """Prompts that share nothing, one after the other, again and again."""
    return [
        blocks(range(1000 * i, 1000 * i + 20), LENGTH, output, gap_ms * (num_prompts * r + i), 512)
        for r in range(num_rounds)
        for i in range(num_prompts)
    ]


def numbers_of(report: ReplayReport) -> dict[str, Any]:
    """All that a report says but of tiers, and how long it took."""
    left_out = ("seconds", "tiers", "tier_loads", "memory_tokens")
    return {key: value for key, value in report.as_dict().items() if key not in left_out}


# --- what is supplied -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_tier_without_room_is_no_tier(model: str, serial: bool, tmp_path: Path) -> None:
    trace = mooncake(tmp_path, chats(4, 3))
    without = run(trace, memory_mib=4096, model=model, serial=serial)
    report = run(trace, memory_mib=4096, model=model, serial=serial, tiers=["0@1GB/s,1ms"])
    assert numbers_of(report) == numbers_of(without)
    assert report.tiers[0].hit_tokens == report.tiers[0].written_bytes == report.tiers[0].peak_bytes == 0
    assert report.tiers[0].dropped > 0
    assert "tiers" not in without.as_dict()


@pytest.mark.parametrize("serial", [True, False])
def test_an_unlimited_tier_supplies_every_prompt_that_was_seen(serial: bool, tmp_path: Path) -> None:
    trace = mooncake(tmp_path, rounds(12, 3))
    report = run(trace, memory_mib=SMALL_MIB, serial=serial, prompts_only=True, tiers=[LARGE])
    assert report.hit_tokens == 24 * (LENGTH - 16), "up to the last full block, but for the last token"
    assert report.tiers[0].hit_tokens > report.memory_tokens
    assert report.misses["never_seen"] == 12 * LENGTH
    assert report.tiers[0].evicted == 0
    assert report.computed_flops == sum(
        12 * FlopsOfTokens().flops(start, LENGTH) for start in (0, LENGTH - 16, LENGTH - 16)
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("serial", [True, False])
def test_a_large_tier_replaces_memory(model: str, serial: bool, tmp_path: Path) -> None:
    """Chats with little memory and a tier hit nearly what they hit in a large memory, which keeps more states."""
    trace = mooncake(tmp_path, chats(6, 4, gap_ms=60_000))
    large = run(trace, memory_mib=16384, model=model, serial=serial)
    small = run(trace, memory_mib=2048, model=model, serial=serial)
    tiered = run(trace, memory_mib=2048, model=model, serial=serial, tiers=[LARGE])
    assert large.hit_tokens >= tiered.hit_tokens >= max(small.hit_tokens, 0.8 * large.hit_tokens)


def test_a_next_turn_resumes_at_the_end_of_a_reply_to_the_token(tmp_path: Path) -> None:
    turns = [blocks([1, 2, 3], 40, 30), blocks([1, 2, 4, 5, 6, 7], 90)]
    others = [{**one, "block_size": 512} for one in rounds(8, 1)]
    trace = mooncake(tmp_path, [turns[0], *others, turns[1]])
    report = run(trace, memory_mib=SMALL_MIB, tiers=[LARGE])
    assert report.continued == 1
    assert report.hit_tokens == report.tiers[0].hit_tokens == 40 + 30 - 1
    assert run(trace, memory_mib=SMALL_MIB).hit_tokens == 0


@pytest.mark.parametrize("serial", [True, False])
def test_what_was_loaded_is_in_memory(serial: bool, tmp_path: Path) -> None:
    lines = [*rounds(8, 1, gap_ms=5000), *(blocks(range(20), LENGTH, 0, 50_000 + 9000 * i, 512) for i in range(3))]
    report = run(mooncake(tmp_path, lines), memory_mib=SMALL_MIB, serial=serial, prompts_only=True, tiers=[LARGE])
    assert report.tiers[0].hit_tokens == LENGTH - 16
    assert report.memory_tokens == 2 * (LENGTH - 16)


def test_hits_never_fall_when_a_tier_grows(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, chats(8, 5))
    sizes = ["0", "100M", "300M", "1G", "2G", "4G", "20G"]
    reports = [run(trace, memory_mib=300, tiers=[f"{size}@10GB/s"]) for size in sizes]
    hits = [report.hit_tokens for report in reports]
    assert hits == sorted(hits)
    assert hits[0] < hits[3] < hits[-1]
    assert reports[3].tiers[0].evicted > reports[-1].tiers[0].evicted == 0


@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize("tiers", [[LARGE], ["100M@1GB/s"], ["200M@10GB/s", "2G@1GB/s,5ms"], ["1G@10MB/s"]])
@pytest.mark.parametrize("model", MODELS[:3])
def test_tokens_are_conserved(model: str, tiers: Sequence[str], serial: bool, tmp_path: Path) -> None:
    """`run` adds up: memory, tiers and misses are all tokens of prompts."""
    trace = mooncake(tmp_path, [*chats(5, 4), *rounds(12, 2), *chats(5, 5)[20:]])
    report = run(trace, memory_mib=400, model=model, serial=serial, tiers=tiers)
    assert report.refused == 0
    assert report.tier_loads is not None
    assert (report.tier_loads.loads > 0) == any(tier.hit_tokens > 0 for tier in report.tiers)
    assert report.tier_loads.loads > 0 or tiers[0] not in (LARGE, "200M@10GB/s")


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_by_hand(tmp_path: Path) -> None:
    """512 tokens: objects of KV end at 256, at the last full block but one, 496, and at 512; a state at 496."""
    report = run(mooncake(tmp_path, [blocks([1], 512, size=512)]), prompts_only=True, tiers=[LARGE])
    [tier] = report.tiers
    state = tier.written_bytes - KV * (256 + 240 + 256) - 3 * HEADER
    assert state == pytest.approx(18.6 * MIB, rel=0.01)
    assert (tier.peak_bytes, tier.read_bytes) == (tier.written_bytes, 0)
    lines = [blocks([1], 512, size=512), *rounds(8, 1), blocks([1], 512, size=512)]
    report = run(mooncake(tmp_path, lines), memory_mib=SMALL_MIB, prompts_only=True, tiers=[LARGE])
    assert report.tiers[0].read_bytes == KV * (256 + 240) + 2 * HEADER + state


def test_tiers_are_read_in_order_and_promote_what_is_read(tmp_path: Path) -> None:
    """The upper tier has forgotten the first prompts. What is read from the lower one is written to it again."""
    trace = mooncake(tmp_path, rounds(8, 2))
    report = run(trace, memory_mib=SMALL_MIB, prompts_only=True, tiers=["400M@10GB/s", LARGE])
    upper, lower = report.tiers
    assert report.hit_tokens == 8 * (LENGTH - 16)
    assert lower.hit_tokens > 0
    assert upper.evicted > lower.evicted == 0
    last_stretches = 8 * (256 * KV + HEADER)  # computed again, and still in the lower tier
    assert upper.written_bytes - lower.written_bytes == lower.read_bytes + last_stretches
    lines = [*rounds(8, 1), blocks(range(20), LENGTH, size=512), *rounds(3, 1)[1:], *rounds(1, 1)]
    report = run(mooncake(tmp_path, lines), memory_mib=300, prompts_only=True, tiers=["1G@10GB/s", LARGE])
    assert report.tiers[0].hit_tokens > 0


@pytest.mark.parametrize("serial", [True, False])
def test_idle_room_of_host_memory_is_filled(serial: bool, tmp_path: Path) -> None:
    """Prompts leave earlier ones in their middle. With room in the first tier, they resume nearer to that place."""
    rng = random.Random(3)
    lines = [*rounds(8, 1)]
    for number in range(8):
        kept = rng.randrange(9, 19)
        ids = [*range(1000 * number, 1000 * number + kept), *range(50_000 + 100 * number, 50_020 + 100 * number - kept)]
        lines.append(blocks(ids, LENGTH, size=512))
    trace = mooncake(tmp_path, lines)

    def ran(*tiers: str, tier_fill: bool) -> ReplayReport:
        return run(trace, memory_mib=SMALL_MIB, serial=serial, prompts_only=True, tiers=tiers, tier_fill=tier_fill)

    plain, filled = (ran("8GiB@1000GB/s", "1TiB@1000GB/s", tier_fill=one) for one in (False, True))
    assert filled.hit_tokens > plain.hit_tokens
    assert filled.tiers[0].spare_bytes > plain.tiers[0].spare_bytes == 0
    assert filled.tiers[1].spare_bytes == 0
    assert filled.tiers[1].peak_bytes <= plain.tiers[1].peak_bytes * 1.1, "a lower tier gets none of it"
    assert filled.tiers[0].evicted == 0
    full = [ran("300M@1000GB/s", tier_fill=one).hit_tokens for one in (False, True)]
    assert full[1] >= 0.97 * full[0]
    window = [run(trace, model="gemma-3-1b", tiers=[LARGE], tier_fill=one).as_dict() for one in (False, True)]
    assert window[0]["tiers"] == window[1]["tiers"], "models without states have nothing to fill it with"


# --- time -------------------------------------------------------------------------------------------------------------


def timed(trace: Trace, *tiers: str, tier_loads: str = "all", memory_mib: int = SMALL_MIB) -> ReplayReport:
    """10,000 tokens of a prompt take a second."""
    return run(trace, memory_mib=memory_mib, serial=False, prompts_only=True, tiers=tiers, tier_loads=tier_loads)


def test_the_clock(tmp_path: Path) -> None:
    """The first prompt comes back after all others have been served: it waits for its load, and for 16 tokens."""
    again = blocks(range(20), LENGTH, 0, 100_000, 512)
    trace = mooncake(tmp_path, [*rounds(8, 1), again])
    report = timed(trace, "900TiB@0.1GB/s,250ms")
    [tier] = report.tiers
    seconds = tier.read_bytes / 1e8 + 0.25
    assert report.tier_loads is not None
    assert report.tier_loads.seconds is not None
    assert report.tier_loads.seconds["p50"] == pytest.approx(seconds)
    assert report.simulated_s == pytest.approx(100 + seconds + 16 / 10_000)
    assert report.tier_loads.slower == 1, "0.1 GB/s is slower than 10,000 tokens a second"
    fast = timed(trace, "900TiB@1GB/s")
    assert fast.simulated_s == pytest.approx(100 + tier.read_bytes / 1e9 + 16 / 10_000)
    assert fast.tier_loads is not None
    assert fast.tier_loads.slower == 0


def test_loads_share_the_bandwidth_and_others_compute_meanwhile(tmp_path: Path) -> None:
    back = [blocks(range(1000 * i, 1000 * i + 20), LENGTH, 0, 100_000, 512) for i in range(2)]
    new = blocks(range(50_000, 50_020), LENGTH, 0, 100_000, 512)
    trace = mooncake(tmp_path, [*rounds(8, 1), *back, new])
    report = timed(trace, "900TiB@0.05GB/s", memory_mib=768)
    one = report.tiers[0].read_bytes / 2 / 5e7
    assert report.tiers[0].hit_tokens == 2 * (LENGTH - 16)
    assert report.simulated_s == pytest.approx(100 + 2 * one + 16 / 10_000)
    assert report.queue_wait_s is not None
    assert one > LENGTH / 10_000, "the new prompt is computed while the others load"


def test_requests_wait_for_the_one_that_loads_their_prefix(tmp_path: Path) -> None:
    again = blocks(range(20), LENGTH, 0, 100_000, 512)
    alone = timed(mooncake(tmp_path, [*rounds(8, 1), again]), "900TiB@0.1GB/s")
    report = timed(mooncake(tmp_path, [*rounds(8, 1), again, again, again]), "900TiB@0.1GB/s")
    assert report.tiers[0].read_bytes == alone.tiers[0].read_bytes > 0
    assert report.memory_tokens == 2 * (LENGTH - 16)


def test_a_load_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """As in an engine: after 30 s the request computes by itself."""
    again = blocks(range(20), LENGTH, 0, 100_000, 512)
    trace = mooncake(tmp_path, [*rounds(8, 1), again])
    report = timed(trace, "900TiB@1KB/s")
    assert report.hit_tokens == 0
    assert report.tier_loads is not None
    assert (report.tier_loads.loads, report.tier_loads.timeouts) == (0, 1)
    assert report.simulated_s == pytest.approx(100 + 30 + LENGTH / 10_000)
    serial = run(trace, memory_mib=SMALL_MIB, prompts_only=True, tiers=["900TiB@1KB/s"])
    assert numbers_of(serial) == numbers_of(run(trace, memory_mib=SMALL_MIB, prompts_only=True))
    assert serial.tier_loads is not None
    assert serial.tier_loads.timeouts == 1


def test_slow_loads_can_be_left_out(tmp_path: Path) -> None:
    again = blocks(range(20), LENGTH, 0, 100_000, 512)
    trace = mooncake(tmp_path, [*rounds(8, 1), again])
    for tier in ("900TiB@1KB/s", "900TiB@0.1GB/s"):
        report = timed(trace, tier, tier_loads="faster")
        assert numbers_of(report) == numbers_of(timed(trace))
        assert report.tier_loads is not None
        assert (report.tier_loads.loads, report.tier_loads.declined) == (0, 1)
    assert timed(trace, "900TiB@1GB/s", tier_loads="faster").hit_tokens == LENGTH - 16


def test_a_reply_without_room_waits_for_loads_to_end(tmp_path: Path) -> None:
    """Three slow loads hold most of the memory. The only request that decodes waits: it is not refused."""
    back = [blocks(range(1000 * i, 1000 * i + 20), LENGTH, 0, 100_000, 512) for i in range(3)]
    long = blocks([90_000], 512, 20_000, 100_001, 512)
    trace = mooncake(tmp_path, [*rounds(8, 1), *back, long])
    fast = ServiceModel(decode_tokens_per_s=1e5, prefill_tokens_per_s=1e4)
    report = run(trace, memory_mib=SMALL_MIB, serial=False, service=fast, tiers=["900TiB@20MB/s"])
    assert report.tiers[0].hit_tokens == 3 * (LENGTH - 16)
    assert report.preempted > 0
    assert report.refused == 0
    assert report.output_tokens == 20_000


@pytest.mark.parametrize("model", MODELS[:3])
@pytest.mark.parametrize("seed", range(4))
def test_everything_ends_in_tiny_memory(seed: int, model: str, tmp_path: Path) -> None:
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = chats(5, 4, gap_ms=rng.choice([0, 10, 400]), output=rng.randrange(2500))
    for number in range(30):
        pieces = rng.randrange(1, 60)
        ids = range(10_000 * (number % 7) + 5000, 10_000 * (number % 7) + 5000 + pieces)
        lines.append(blocks(ids, 512 * pieces, rng.randrange(3000), rng.randrange(3000), 512))
    tiers = rng.choice([[LARGE], ["3G@50MB/s,10ms"], ["300M@2GB/s", "5G@200MB/s"], ["1T@5MB/s"]])
    memory_mib = rng.choice([300, 400, 600])
    report = run(mooncake(tmp_path, lines), memory_mib=memory_mib, model=model, serial=False, tiers=tiers)
    assert report.refused < len(lines)
    assert report.tier_loads is not None
    assert report.tier_loads.loads + report.tier_loads.timeouts > 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_tiers_need_a_catalogue_and_a_rule(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1], 9)])
    setting = Setting("t", MODEL, 1, SMALL_MIB * MIB, 16, serial=True, tiers=(parse_tier("1G@1GB/s"),))
    with pytest.raises(InputError, match="tiers without a catalogue"):
        replay(trace, layout(SMALL_MIB), setting)
    with pytest.raises(InputError, match="choose one of all, faster"):
        run(trace, tiers=["1G@1GB/s"], tier_loads="some")


def test_a_rule_that_compares_needs_a_service_model(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks(range(5), 75)] * 2)
    report = run(trace, tiers=["1G@1GB/s"], tier_loads="faster", service=ServiceModel(100, 1e9))
    assert report.hit_tokens == 64
