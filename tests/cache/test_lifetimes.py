"""Lifetimes of breakpoints: they weigh in what is evicted, they pin nothing, and clients have equal shares."""

from __future__ import annotations

import random

import pytest

from hybridkv.cache import CacheGroup, CacheLayout, Role
from hybridkv.cache.retention.policy import PromptEndBranchesGrid
from tests.cache.sim import Sim

FULL = CacheGroup("full", Role.FULL, 8, page_bytes=1)
STATE = CacheGroup("state", Role.STATE, 1, page_bytes=8)
SHARED = 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32000), k=count)


def caches(policy: str, clock: Clock | None = None, num_slabs: int = 24) -> Sim:
    layout = CacheLayout.of([FULL, STATE], block_tokens=4, num_slabs=num_slabs, kv_bytes_per_token=1)
    return Sim(layout, policy=policy, checkpoint_policy=PromptEndBranchesGrid(None), clock=clock or Clock())


def name(sim: Sim, seed: int, lifetime_s: float | None, client: str = "a") -> int:
    """A prompt whose first part is named, with a question of its own. Returns what was cached."""
    prompt = tokens(SHARED, seed) + tokens(8, random.Random(seed).randrange(1 << 30))
    lifetimes = [] if lifetime_s is None else [(SHARED, lifetime_s)]
    return sim.serve(prompt, breakpoints=[SHARED], lifetimes=lifetimes, client=client)


def flood(sim: Sim, count: int, client: str = "b") -> None:
    for seed in range(count):
        sim.serve(tokens(24, 10_000 + seed), client=client)


def survives(sim: Sim, lifetime_s: float | None, count: int) -> bool:
    """Whether the named part outlives so many other prompts."""
    name(sim, 1, lifetime_s)
    flood(sim, count)
    return sim.cache.match([*tokens(SHARED, 1), 1, 2, 3]).num_tokens == SHARED


@pytest.mark.parametrize("policy", ["lru", "flops", "reuse"])
def test_what_has_a_lifetime_stays_longer_and_is_not_pinned(policy: str) -> None:
    lasts = {
        lifetime_s: max((n for n in range(60) if survives(caches(policy), lifetime_s, n)), default=0)
        for lifetime_s in (None, 300.0)
    }
    assert lasts[300.0] > lasts[None]
    if policy != "reuse":
        assert lasts[300.0] < 59  # it is not pinned: others do push it out


def test_a_lifetime_that_has_passed_counts_for_nothing() -> None:
    plain = max(n for n in range(60) if survives(caches("lru"), None, n))
    clock = Clock()
    sim = caches("lru", clock)
    name(sim, 1, 300.0)
    clock.now = 301.0
    flood(sim, plain + 1)
    assert sim.cache.match([*tokens(SHARED, 1), 1, 2, 3]).num_tokens == 0


def test_a_lifetime_begins_anew_when_it_is_named_again() -> None:
    clock = Clock()
    sim = caches("lru", clock)
    name(sim, 1, 300.0)
    clock.now = 200.0
    assert (
        sim.serve([*tokens(SHARED, 1), 5, 6], breakpoints=[SHARED], lifetimes=[(SHARED, 300.0)], client="a") == SHARED
    )
    clock.now = 400.0
    flood(sim, max(n for n in range(60) if survives(caches("lru"), None, n)) + 1)
    assert sim.cache.match([*tokens(SHARED, 1), 1, 2, 3]).num_tokens == SHARED


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_one_client_does_not_keep_others_out(policy: str) -> None:
    """However much one names, what another client sends is cached for its next request."""
    sim = caches(policy)
    for seed in range(40):
        name(sim, seed, 86400.0, client="greedy")
    lifetimes = sim.cache._prefixes.queue._lifetimes
    assert lifetimes is not None
    own = sum(lifetimes._by_client["greedy"].values())
    assert 0 < own <= lifetimes.share() == sim.layout.num_bytes / 2
    for seed in range(100, 110):
        prompt = tokens(24, seed)
        sim.serve(prompt, client="other")
        assert sim.cache.match([*prompt, 1]).num_tokens >= 20
    name(sim, 200, 60.0, client="other")
    assert lifetimes.share() == sim.layout.num_bytes / 4
    assert sum(lifetimes._by_client["greedy"].values()) <= lifetimes.share()


def test_removed_checkpoints_leave_no_lifetime() -> None:
    sim = caches("lru")
    name(sim, 1, 300.0)
    lifetimes = sim.cache._prefixes.queue._lifetimes
    assert lifetimes is not None
    assert lifetimes.num_clients == 1
    sim.cache.reset()
    sim.cache.check_integrity()
    assert lifetimes.num_clients == 0
