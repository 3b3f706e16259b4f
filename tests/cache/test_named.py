"""Named cases: each is one thing that must hold."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridkv.cache import CacheGroup, CacheLayout, Role
from hybridkv.cache.policy import PromptEndBranchesGrid
from tests.cache.sim import Sim

FULL = CacheGroup("full", Role.FULL, 8)
STATE = CacheGroup("state", Role.STATE, 1)


def window(size: int, name: str = "") -> CacheGroup:
    return CacheGroup(name or f"window{size}", Role.LOCAL, 8, window=size)


def sim(*groups: CacheGroup, num_slabs: int = 400, grid: int | None = None, **options: Any) -> Sim:
    layout = CacheLayout.of(groups, block_tokens=16, num_slabs=num_slabs)
    return Sim(layout, checkpoint_policy=PromptEndBranchesGrid(grid), **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32000) for _ in range(count)]


MIXES = {
    "full": [FULL],
    "full+state": [FULL, STATE],
    "full+window": [FULL, window(128)],
    "full+state+window": [FULL, STATE, window(24)],
    "state only": [STATE],
    "window only": [window(64)],
    "two states, two windows": [FULL, STATE, CacheGroup("state2", Role.STATE, 3), window(24), window(200)],
    "chunk": [FULL, CacheGroup("chunk", Role.LOCAL, 8, chunk=64)],
    "packed": [CacheGroup(f"full.{i}", Role.FULL, 8 + i) for i in range(4)] + [STATE],
    "cut state": [FULL, CacheGroup("state", Role.STATE, 2, pages_per_state=3)],
}


@pytest.fixture(params=sorted(MIXES))
def mix(request: pytest.FixtureRequest) -> list[CacheGroup]:
    return MIXES[request.param]


def test_a_prompt_repeated_resumes_at_its_last_block_boundary(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    assert cache.serve(tokens(700)) == 0
    assert cache.serve(tokens(700)) == 688
    assert cache.serve(tokens(700)) == 688


def test_a_block_aligned_prompt_resent_computes_one_block(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    cache.serve(tokens(320))
    assert cache.serve(tokens(320)) == 304


def test_a_breakpoint_is_where_the_second_sibling_resumes(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    shared = tokens(560)
    hits = [cache.serve(shared + tokens(400, seed), breakpoints=[560]) for seed in range(1, 5)]
    assert hits == [0, 560, 560, 560]


@pytest.mark.parametrize("name", ["full+state", "full+window", "full+state+window", "packed", "cut state"])
def test_without_a_breakpoint_the_second_sibling_leaves_one_at_the_branch(name: str) -> None:
    cache = sim(*MIXES[name], grid=256)
    shared = tokens(560)
    hits = [cache.serve(shared + tokens(400, seed)) for seed in range(1, 5)]
    assert hits == [0, 512, 560, 560]


def test_full_attention_alone_needs_no_checkpoint_to_branch() -> None:
    cache = sim(FULL)
    shared = tokens(560)
    assert [cache.serve(shared + tokens(400, seed)) for seed in range(1, 5)] == [0, 560, 560, 560]


def test_three_turns_reuse_prompt_and_reply_to_the_token(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    talk = tokens(408)
    # The last sampled token was never fed: the first reply of 40 tokens is computed up to 339.
    assert cache.serve(talk[:300], talk[300:340]) == 0
    assert cache.serve(talk[:354], talk[354:390]) == 339
    assert cache.serve(talk[:408]) == 389


def test_states_at_different_positions_give_no_hit() -> None:
    cache = sim(FULL, STATE, CacheGroup("state2", Role.STATE, 1))
    cache.serve(tokens(100), breakpoints=[32, 64])
    keeper = cache.cache._keeper
    (root,) = keeper.index.roots.values()
    for node in root.subtree():
        for checkpoint in node.checkpoints:
            lost = 0 if checkpoint.position == 64 else 1
            keeper.drop_state(lost, checkpoint.states[lost])
            checkpoint.states[lost] = None
    match = cache.cache.match(tokens(100))
    assert (match.num_tokens, match.matched_tokens, match.missing) == (0, 96, "state_missing")
    cache.serve(tokens(100))


def test_kv_evicted_behind_a_deeper_state_gives_no_hit() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(400), breakpoints=[160])
    keeper = cache.cache._keeper
    (root,) = keeper.index.roots.values()
    (leaf,) = root.children.values()
    keeper._free_blocks(leaf, 12)  # 192 tokens left, the state at 384 gone with the rest
    keeper.offer(leaf)
    cache.cache.check_integrity()
    assert cache.serve(tokens(400)) == 160


def test_window_24_needs_two_blocks_of_16() -> None:
    cache = sim(FULL, window(24))
    cache.serve(tokens(200))
    lease = cache.cache.begin(tokens(200))
    assert lease.cached_tokens == 192
    table = lease.tables[1]
    assert table is not None
    assert [page != 0 for page in table] == [False] * 10 + [True] * 2
    cache.cache.abort(lease)


def test_windows_release_what_they_no_longer_see() -> None:
    cache = sim(FULL, window(64))
    lease = cache.prompt(tokens(1000))
    # What the lease sees, and the tail of the checkpoint at 992.
    assert cache.cache.pages_in_use()["window64"] <= 5 + 4 + 1
    for token in tokens(200, 1):
        assert cache.compute(lease) if lease.computed < lease.num_tokens else True
        lease.tokens += token.to_bytes(4, "little")
    cache.cache.release(lease, keep=False)
    cache.cache.check_integrity()
    assert cache.cache.pages_in_use()["window64"] == 4


def test_salts_and_extra_keys_never_meet() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(100), salt="a")
    assert cache.serve(tokens(100)) == 0
    assert cache.serve(tokens(100), salt="b") == 0
    assert cache.serve(tokens(100), extra_keys=["a"]) == 0
    assert cache.serve(tokens(100), salt="a", extra_keys=["x"]) == 0
    assert cache.serve(tokens(100), salt="a") == 96


def test_in_flight_duplicates_share_one_copy() -> None:
    cache = sim(FULL, STATE, window(40))
    leases = [cache.cache.begin(tokens(200)) for _ in range(3)]
    for lease in leases:
        assert cache.extend(lease, 200) is not None
    for lease in leases:
        cache.cache.commit(lease)
        cache.cache.check_integrity()
    assert cache.cache.stats.blocks_shared == 2 * 12
    assert cache.cache.pages_in_use()["full"] == 12 + 3
    for lease in leases:
        cache.cache.release(lease)
    cache.cache.check_integrity()
    assert cache.cache.pages_in_use()["full"] == 12 + 1


def test_deep_chains_are_merged() -> None:
    cache = sim(FULL, STATE, num_slabs=4000)
    talk = tokens(4000)
    for end in range(100, 4000, 50):
        cache.serve(talk[:end], talk[end : end + 20])
    (root,) = cache.cache._keeper.index.roots.values()
    assert sum(1 for _ in root.subtree()) <= 3


def test_siblings_wait_for_a_prefix_in_flight(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    shared = tokens(560)
    prompts = [shared + tokens(400, seed) for seed in range(1, 9)]
    leader = cache.cache.begin(prompts[0])
    for prompt in prompts[1:]:
        match = cache.cache.match(prompt)
        assert (match.num_tokens, match.leader, match.leader_tokens) == (0, leader, 560)
        assert cache.cache.follow(match)
    assert cache.compute(leader, 300)
    assert cache.cache.match(prompts[1]).leader_tokens == 560
    assert cache.compute(leader, 300)
    for prompt in prompts[1:]:
        match = cache.cache.match(prompt)
        assert match.num_tokens == 560
        assert not cache.cache.follow(match)
        assert cache.serve(prompt) == 560
    cache.cache.release(leader)
    cache.cache.check_integrity()


def test_a_leader_that_ends_early_leads_nobody() -> None:
    cache = sim(FULL, STATE)
    leader = cache.cache.begin(tokens(200))
    match = cache.cache.match(tokens(200))
    cache.cache.abort(leader)
    assert not cache.cache.follow(match)
    assert cache.cache.match(tokens(200)).leader is None


def test_taps_are_only_for_those_who_ask() -> None:
    taps = [CacheGroup(f"tap{i}", Role.TAP, 4, pool="taps") for i in (3, 7)]
    cache = sim(FULL, STATE, *taps)
    cache.serve(tokens(100))
    assert cache.cache.pages_in_use()["taps"] == 0
    assert cache.cache.match(tokens(100)).num_tokens == 96
    assert cache.cache.match(tokens(100), taps=["tap3"]).missing == "tap_missing"
    assert cache.serve(tokens(100), taps=["tap3"]) == 0
    assert cache.serve(tokens(100), taps=["tap3"]) == 96
    assert cache.serve(tokens(100), taps=["tap3", "tap7"]) == 0
    assert cache.serve(tokens(100), taps=["tap7"]) == 96
    assert cache.serve(tokens(100)) == 96


def test_fork_shares_all_but_the_block_begun(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    lease = cache.prompt(tokens(100), breakpoints=[48])
    before = cache.cache.pages_in_use()
    twins = cache.cache.fork(lease, 3)
    assert isinstance(twins, list)
    after = cache.cache.pages_in_use()
    for group in cache.layout.token_groups:
        assert after[group.pool_name] == before[group.pool_name] + 3
    for group in cache.layout.state_groups:
        assert after[group.pool_name] == before[group.pool_name]
    for seed, one in enumerate([lease, *twins]):
        for token in tokens(30, seed):
            one.tokens += token.to_bytes(4, "little")
            assert cache.compute(one)
        cache.cache.check_integrity()
    for one in [lease, *twins]:
        cache.cache.release(one)
        cache.cache.check_integrity()


def test_pins_hold_a_prefix_until_their_time() -> None:
    now = [0.0]
    cache = sim(FULL, STATE, window(24), num_slabs=30, clock=lambda: now[0])
    cache.serve(tokens(100))
    pin = cache.cache.pin(tokens(96), 10)
    assert pin.num_tokens == 96
    for seed in range(1, 20):
        cache.serve(tokens(150, seed))
    assert cache.serve(tokens(100)) == 96
    now[0] = 11
    for seed in range(20, 40):
        cache.serve(tokens(150, seed))
    assert cache.serve(tokens(100)) == 0


def test_reset_begins_a_new_epoch() -> None:
    cache = sim(FULL, STATE, window(24))
    cache.serve(tokens(100))
    running = cache.prompt(tokens(60, 1))
    cache.cache.pin(tokens(96), 100)
    cache.cache.reset()
    cache.cache.check_integrity()
    assert cache.cache.match(tokens(100)).num_tokens == 0
    running.tokens += bytes(4)
    assert cache.compute(running)
    cache.cache.release(running)
    cache.cache.check_integrity()
    assert cache.cache.match(tokens(60, 1)).num_tokens == 0
    assert set(cache.cache.pages_in_use().values()) == {0}


def test_state_depth_is_kv_depth_when_a_step_is_cut_back() -> None:
    cache = sim(FULL, STATE, window(24))
    lease = cache.prompt(tokens(50))
    lease.tokens += bytes(4 * 8)
    assert cache.extend(lease, 8, may_cut=True) is not None
    assert cache.cache.commit(lease, 3) == 50  # no state at 53: the three are fed again
    assert lease.num_tokens == 53
    cache.cache.check_integrity()
    assert cache.compute(lease)
    assert lease.computed == 53
    cache.cache.release(lease)
    cache.cache.check_integrity()


def test_full_attention_takes_what_was_accepted() -> None:
    cache = sim(FULL, window(24))
    lease = cache.prompt(tokens(50))
    lease.tokens += bytes(4 * 8)
    assert cache.extend(lease, 8) is not None
    assert cache.cache.commit(lease, 3) == 53
    cache.cache.release(lease)
    cache.cache.check_integrity()


def test_a_failed_step_in_place_goes_back_to_the_last_kept_state() -> None:
    cache = sim(FULL, STATE)
    lease = cache.prompt(tokens(100))
    lease.tokens += bytes(8)
    assert cache.compute(lease, 1)
    assert cache.extend(lease, 1) is not None
    assert cache.cache.commit(lease, failed=True) == 96
    cache.cache.check_integrity()
    assert cache.compute(lease)
    assert lease.computed == 102


def test_a_failed_step_that_was_not_in_place_loses_nothing() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(100))
    lease = cache.cache.begin(tokens(100))
    assert cache.extend(lease, 4) is not None
    assert cache.cache.commit(lease, failed=True) == 96
    cache.cache.check_integrity()
    assert cache.compute(lease)


def test_preemption_keeps_the_state(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    lease = cache.cache.begin(tokens(300))
    assert cache.compute(lease, 203)
    cache.cache.release(lease)
    assert cache.serve(tokens(300)) == 203
