"""Named cases: each is one thing that must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybridkv.cache import CacheError, CacheGroup, CacheLayout, Lease, Role, ZeroPage, lookup_key
from hybridkv.cache.index.tree import State
from hybridkv.cache.retention.policy import PromptEndBranchesGrid
from hybridkv.errors import HybridKVError, PlanError
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.sight import Sight
from hybridkv.spec import LayerSpec
from tests.cache.sim import Sim

FULL = CacheGroup("full", Role.FULL, 8)
STATE = CacheGroup("state", Role.STATE, 1)


def window(size: int, name: str = "") -> CacheGroup:
    return CacheGroup(name or f"window{size}", Role.LOCAL, 8, sight=Sight(window=size))


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
    "chunk": [FULL, CacheGroup("chunk", Role.LOCAL, 8, sight=Sight(chunk=64))],
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
    first = 560 if name == "full+window" else 512  # idle memory keeps the blocks of windows
    assert hits == [0, first, 560, 560]


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
    (root,) = cache.cache._prefixes.index.roots.values()
    for node in root.subtree():
        for checkpoint in node.checkpoints:
            lost = 0 if checkpoint.position == 64 else 1
            gone: list[State | None] = [None, None]
            gone[lost], checkpoint.states[lost] = checkpoint.states[lost], None
            cache.cache._groups.drop_states(gone)
    match = cache.cache.match(tokens(100))
    assert (match.num_tokens, match.matched_tokens, match.missing) == (0, 96, "state_missing")
    cache.serve(tokens(100))


def test_kv_evicted_behind_a_deeper_state_gives_no_hit() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(400), breakpoints=[160])
    prefixes = cache.cache._prefixes
    (root,) = prefixes.index.roots.values()
    (leaf,) = root.children.values()
    prefixes.free_blocks(leaf, 12)  # 192 tokens left, the state at 384 gone with the rest
    prefixes.tidy(leaf)
    cache.cache.check_integrity()
    assert cache.serve(tokens(400)) == 160


def test_window_24_needs_two_blocks_of_16() -> None:
    cache = sim(FULL, window(24))
    cache.serve(tokens(200))
    lease = cache.cache.begin(tokens(200))
    assert lease.cached_tokens == 192
    table = lease.pages.tables[1]
    assert table is not None
    assert [page != 0 for page in table] == [False] * 10 + [True] * 2
    cache.cache.abort(lease)


def test_windows_release_what_they_no_longer_see() -> None:
    cache = sim(FULL, window(64))
    pool = cache.cache._groups.arena.pools["window64"]
    lease = cache.prompt(tokens(1000))
    # What the lease sees, and the tail of the checkpoint at 992. The others only fill idle memory.
    assert cache.cache.pages_in_use()["window64"] - pool.num_idle <= 5 + 4 + 1
    assert pool.num_idle == 1000 // 16 - 4
    for token in tokens(200, 1):
        assert cache.compute(lease) if lease.computed < lease.num_tokens else True
        lease.append([token])
    cache.cache.release(lease, keep=False)
    cache.cache.check_integrity()
    assert cache.cache.pages_in_use()["window64"] - pool.num_idle == 4
    with_state = sim(FULL, STATE, window(64))
    with_state.prompt(tokens(1000))
    assert with_state.cache.pages_in_use()["window64"] <= 5 + 4 + 1, "no request could resume at the others"


def test_salts_and_extra_keys_never_meet() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(100), key=lookup_key("a"))
    assert cache.serve(tokens(100)) == 0
    assert cache.serve(tokens(100), key=lookup_key("b")) == 0
    assert cache.serve(tokens(100), key=lookup_key(extra_keys=["a"])) == 0
    assert cache.serve(tokens(100), key=lookup_key("a", ["x"])) == 0
    assert cache.serve(tokens(100), key=lookup_key("a")) == 96


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
    talk = tokens(1600)
    for end in range(100, 1600, 50):
        cache.serve(talk[:end], talk[end : end + 20])
    (root,) = cache.cache._prefixes.index.roots.values()
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


def test_who_computes_a_known_prefix_again_leads_those_who_lack_the_same_state() -> None:
    """The first sibling left KV but no state where the others leave it. The second finds out; the others wait."""
    cache = sim(FULL, STATE)
    prompts = [tokens(560) + tokens(400, seed) for seed in range(1, 4)]
    cache.serve(prompts[0])
    stranger = cache.cache.begin(tokens(300, 99))
    assert cache.cache.match(prompts[1]).leader is None
    second = cache.cache.begin(prompts[1])
    match = cache.cache.match(prompts[2])
    assert (match.num_tokens, match.matched_tokens, match.leader, match.leader_tokens) == (0, 560, second, 560)
    assert cache.cache.follow(match)
    assert cache.compute(second, 600)
    match = cache.cache.match(prompts[2])
    assert match.num_tokens == 560
    assert not cache.cache.follow(match)
    cache.cache.abort(second)
    cache.cache.abort(stranger)


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
    assert cache.cache.match(tokens(100), lookup_key(taps=["tap3"])).missing == "tap_missing"
    assert cache.serve(tokens(100), key=lookup_key(taps=["tap3"])) == 0
    assert cache.serve(tokens(100), key=lookup_key(taps=["tap3"])) == 96
    assert cache.serve(tokens(100), key=lookup_key(taps=["tap3", "tap7"])) == 0
    assert cache.serve(tokens(100), key=lookup_key(taps=["tap7"])) == 96
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
            one.append([token])
            assert cache.compute(one)
        cache.cache.check_integrity()
    for one in [lease, *twins]:
        cache.cache.release(one)
        cache.cache.check_integrity()


def test_reset_begins_a_new_epoch() -> None:
    cache = sim(FULL, STATE, window(24))
    cache.serve(tokens(100))
    running = cache.prompt(tokens(60, 1))
    pin = cache.cache.pin(tokens(96), 100)
    cache.cache.reset()
    cache.cache.check_integrity()
    assert cache.cache.match(tokens(100)).num_tokens == 0
    running.append([0])
    assert cache.compute(running)
    cache.cache.release(running)
    cache.cache.check_integrity()
    assert cache.cache.match(tokens(60, 1)).num_tokens == 0
    cache.cache.unpin(pin)
    assert set(cache.cache.pages_in_use().values()) == {0}


def test_state_depth_is_kv_depth_when_a_step_is_cut_back() -> None:
    cache = sim(FULL, STATE, window(24))
    lease = cache.prompt(tokens(50))
    assert cache.extend(lease, 8, drafts=[0] * 8) is not None
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
    assert cache.extend(lease, 8, drafts=[0] * 8) is not None
    assert cache.cache.commit(lease, 3, sampled=[5]) == 53
    assert lease.num_tokens == 54
    cache.cache.release(lease)
    cache.cache.check_integrity()


def test_a_failed_step_in_place_goes_back_to_the_last_kept_state() -> None:
    cache = sim(FULL, STATE)
    lease = cache.prompt(tokens(100))
    lease.append([0, 0])
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


@pytest.mark.parametrize("pack", [1, 2, 3, 4, None])
def test_a_prompt_repeated_hits_at_every_pack_size(pack: int | None) -> None:
    plan = make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(8 * 2**30, attn_pack_size=pack))
    cache = Sim(CacheLayout.from_plan(plan))
    assert cache.serve(tokens(700)) == 0
    assert cache.serve(tokens(700)) == 688


class Dilated(LayerSpec):
    """A kind that the cache has never heard of."""

    kind = "dilated"
    group = "dilated"

    def held_blocks(self, num_tokens: int, block_tokens: int) -> int:
        return 1

    def checkpoint_blocks(self, block_tokens: int) -> int:
        return 1


def test_layers_of_an_unknown_kind_are_refused() -> None:
    model = load_model("qwen3-next-80b-a3b")
    strange = Dilated(3, model.layers[3].parts)
    plan = make_plan(replace(model, layers=(*model.layers[:3], strange)), PlanOptions(2**30))
    with pytest.raises(PlanError, match="group 'dilated' has layers of kind Dilated"):
        CacheLayout.from_plan(plan)


def test_a_plan_becomes_a_layout() -> None:
    plan = make_plan(load_model("gemma-3-27b", taps=[3, 7]), PlanOptions(20 * 2**30))
    layout = CacheLayout.from_plan(plan)
    assert [(g.name, g.role, g.pool_name, g.sight.window) for g in layout.token_groups] == [
        ("full", Role.FULL, "full", None),
        ("window1024", Role.LOCAL, "window1024", 1024),
    ]
    assert [(g.name, g.role, g.pool_name) for g in layout.tap_groups] == [
        ("tap3", Role.TAP, "taps"),
        ("tap7", Role.TAP, "taps"),
    ]
    assert layout.num_slabs == plan.num_slabs
    small = make_plan(load_model("qwen3.5-397b-a17b", tp=2), PlanOptions(5 * 2**30))
    assert CacheLayout.from_plan(small).state_groups[0].pages_per_state == 3
    llama4 = make_plan(load_model("llama-4-scout-17b-16e"), PlanOptions(20 * 2**30))
    assert {g.sight.chunk for g in CacheLayout.from_plan(llama4).token_groups} == {None, 8192}
    with pytest.raises(PlanError, match="block of 0 tokens"):
        CacheLayout.of([FULL], block_tokens=0, num_slabs=4)
    with pytest.raises(PlanError, match="without groups"):
        CacheLayout.of([], block_tokens=16, num_slabs=4)


def test_rollback_goes_to_the_last_place_that_can_be_resumed(mix: list[CacheGroup]) -> None:
    cache = sim(*mix)
    lease = cache.prompt(tokens(300), breakpoints=[96, 160])
    for limit, position in ((299, 288), (200, 160), (100, 96)):
        if not cache.layout.state_groups:
            position = max(position, limit // 16 * 16 if not cache.cache._groups.local else position)
        assert cache.cache.rollback(lease, limit) >= position
        assert lease.computed <= limit
        cache.cache.check_integrity()
    assert cache.compute(lease)
    assert lease.computed == 300
    assert cache.cache.rollback(lease, 0) == 0
    assert cache.cache.stats.rolled_back_tokens >= 300
    cache.cache.release(lease)
    cache.cache.check_integrity()


def test_requests_that_share_an_invalid_page_all_go_back() -> None:
    cache = sim(FULL, STATE)
    shared = tokens(160)
    first = cache.prompt(shared + tokens(60, 1), breakpoints=[64, 160])
    second = cache.prompt(shared + tokens(60, 2))
    stranger = cache.prompt(tokens(100, 3))
    table = second.pages.tables[0]
    assert table is not None
    assert second.cached_tokens == 160
    moved = cache.cache.invalidate({"full": [table[6], table[8]]})  # tokens 96 to 112, and later ones
    assert moved == {first.id: 64, second.id: 64}
    assert stranger.computed == 100
    cache.cache.check_integrity()
    assert cache.cache.stats.invalid_pages == 2
    assert cache.cache.stats.rolled_back_tokens == (220 - 64) * 2
    assert cache.cache.match(shared).num_tokens == 64
    assert cache.cache.match(shared).matched_tokens == 96
    for lease in (first, second):
        assert cache.compute(lease)
        cache.cache.release(lease)
    cache.cache.check_integrity()


def test_a_step_in_flight_with_an_invalid_page_is_thrown_away() -> None:
    cache = sim(FULL, STATE, window(40))
    cache.serve(tokens(200), breakpoints=[64])
    lease = cache.cache.begin(tokens(200))
    assert cache.extend(lease, 5) is not None
    table = lease.pages.tables[0]
    assert table is not None
    assert cache.cache.invalidate({"full": [table[5]]}) == {}
    assert cache.cache.match(tokens(200)).matched_tokens == 80
    assert cache.cache.commit(lease, sampled=[1]) == 64
    cache.cache.check_integrity()
    assert cache.compute(lease)


def test_an_invalid_state_takes_what_was_computed_from_it() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(200), breakpoints=[64, 128])
    lease = cache.cache.begin(tokens(150))
    assert lease.cached_tokens == 128
    state = lease.pages.states[0]
    assert state is not None
    assert cache.cache.invalidate({"state": state.pages}) == {lease.id: 64}
    assert cache.cache.match(tokens(200)).num_tokens == 64
    assert cache.cache.match(tokens(200)).matched_tokens == 128
    cache.cache.check_integrity()


def test_recycled_pages_never_show_old_content(mix: list[CacheGroup]) -> None:
    """Every read of every step is checked by the simulation; here pages are recycled as hard as can be."""
    cache = sim(*mix, num_slabs=40)
    for seed in range(60):
        length = 20 + seed % 90
        assert cache.serve(tokens(length, seed % 7), tokens(seed % 5, seed)) < length


def test_events_tell_what_was_stored_and_removed() -> None:
    cache = sim(FULL, STATE, num_slabs=12, event_limit=100, policy="lru")
    cache.serve(tokens(100))
    events = cache.cache.take_events()
    assert [(event.kind, len(event.keys), event.tokens) for event in events] == [
        ("hit", 0, 0),
        ("missed", 0, 100),
        ("stored", 6, 0),
    ]
    stored = set(events[-1].keys)
    cache.serve(tokens(100))
    assert [event.tokens for event in cache.cache.take_events()][:2] == [96, 4]
    for seed in range(1, 12):
        cache.serve(tokens(100, seed))
    removed = {key for event in cache.cache.take_events() if event.kind == "removed" for key in event.keys}
    assert stored <= removed
    assert not cache.cache.take_events()


def test_block_names_depend_on_everything_before_them() -> None:
    one, two = sim(FULL, event_limit=9), sim(FULL, event_limit=9)
    names = []
    for cache, text, salt in ((one, tokens(64), ""), (two, tokens(64), ""), (two, tokens(64), "x")):
        cache.serve(text, key=lookup_key(salt))
        names.append([key for event in cache.cache.take_events() for key in event.keys])
    assert names[0] == names[1]
    assert set(names[0]).isdisjoint(names[2])
    two.serve([7, *tokens(64)[1:]])
    assert set(names[0]).isdisjoint(key for event in two.cache.take_events() for key in event.keys)


def test_misuse_is_refused_with_a_reason() -> None:
    cache = sim(FULL, STATE, CacheGroup("tap", Role.TAP, 4))
    lease = cache.cache.begin(tokens(40))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: cache.cache.begin([]), "at least one token"),
        (lambda: cache.cache.begin([1], lookup_key(taps=["full"])), "no tap 'full'"),
        (lambda: cache.cache.extend(lease, 41), "cannot extend by 41"),
        (lambda: cache.cache.extend(lease, 0), "cannot extend by 0"),
        (lambda: cache.cache.commit(lease), "nothing to commit"),
        (lambda: cache.cache.rollback(lease, -1), "cannot roll back to -1"),
        (lambda: cache.cache.invalidate({"nope": [1]}), "no group 'nope'"),
        (lambda: cache.cache.begin([2**31]), "token ids"),
        (lambda: cache.cache.begin(b"123"), "4 bytes each"),
        (lambda: cache.cache.begin(np.array([1, 2])), "int32"),
    ]
    for call, reason in calls:
        with pytest.raises(HybridKVError, match=reason):
            call()
    assert cache.extend(lease, 4) is not None
    calls = [
        (lambda: cache.cache.extend(lease, 4), "step in flight"),
        (lambda: cache.cache.release(lease), "step in flight"),
        (lambda: cache.cache.commit(lease, 5), "5 tokens accepted of a step of 4"),
    ]
    for call, reason in calls:
        with pytest.raises(CacheError, match=reason):
            call()
    cache.cache.abort(lease)
    cache.cache.commit(lease)
    cache.cache.abort(lease)
    with pytest.raises(CacheError, match="has ended"):
        cache.cache.extend(lease, 1)


def test_salts_leave_no_roots_behind() -> None:
    cache = sim(FULL, STATE, num_slabs=14)
    for number in range(200):
        cache.serve(tokens(60), key=lookup_key(str(number)))
    assert len(cache.cache._prefixes.index.roots) < 12


def test_arrays_and_lists_of_tokens_are_the_same() -> None:
    cache = sim(FULL)
    cache.serve(tokens(100))
    assert cache.cache.match(np.array(tokens(100), dtype=np.int32)).num_tokens == 96


def test_an_aborted_leader_leads_nobody_even_in_flight() -> None:
    cache = sim(FULL, STATE)
    leader = cache.cache.begin(tokens(200))
    assert cache.extend(leader, 50) is not None
    cache.cache.abort(leader)
    assert cache.cache.match(tokens(200)).leader is None
    cache.cache.commit(leader)
    assert not cache.cache.leases


def test_forks_keep_the_checkpoints_that_were_wanted() -> None:
    cache = sim(FULL, STATE)
    lease = cache.cache.begin(tokens(200), breakpoints=[160])
    assert cache.compute(lease, 100)
    twins = cache.cache.fork(lease, 1)
    assert isinstance(twins, list)
    cache.cache.abort(lease)
    assert cache.compute(twins[0])
    cache.cache.abort(twins[0])
    assert cache.cache.match(tokens(170)).num_tokens == 160


def test_a_checkpoint_that_was_held_can_be_evicted_afterwards() -> None:
    cache = sim(FULL, STATE, num_slabs=9)
    cache.serve(tokens(20), tokens(6, 1))  # ends inside a block, at 25
    text = tokens(20) + tokens(6, 1)
    lease = cache.cache.begin([*text, 1])
    assert lease.cached_tokens == 25
    held = lease.pages.tail
    assert held is not None
    while cache.cache._reclaimer.evict_least({}):  # all that may go, goes
        pass
    assert held.node is not None
    cache.cache.abort(lease)
    while cache.cache._reclaimer.evict_least({}):
        pass
    assert held.node is None
    assert set(cache.cache.pages_in_use().values()) == {0}
    assert not cache.cache._prefixes.index.roots


def test_a_repeat_waits_for_room_without_losing_its_place() -> None:
    """A lease that resumed and found no room still stands where it resumed."""
    cache = sim(FULL, STATE, num_slabs=8)
    cache.serve(tokens(40))
    lease = cache.cache.begin(tokens(40))
    hog = cache.prompt(tokens(20, 1))
    others: list[Lease] = []
    while (other := cache.cache.begin(tokens(4, 9 + len(others)))) and cache.compute(other):
        others.append(other)
    assert cache.extend(lease, 8) is None
    assert lease.computed == lease.cached_tokens == 32
    cache.cache.check_integrity()
    for one in (hog, *others):
        cache.cache.release(one, keep=False)
    assert cache.compute(lease)


def test_an_invalid_state_that_a_step_writes_over_and_keeps_is_noticed() -> None:
    cache = sim(FULL, STATE)
    lease = cache.cache.begin(tokens(64))
    assert cache.compute(lease, 20)
    state = lease.pages.states[0]
    assert state is not None
    assert cache.extend(lease, 44) is not None  # [20, 48) in place, kept there; [48, 64) in a new page
    cache.cache.invalidate({"state": state.pages})
    assert cache.cache.commit(lease, sampled=[7]) == 0
    assert lease.num_tokens == 64
    assert cache.cache.match(tokens(64)).matched_tokens == 16
    cache.cache.check_integrity()


def test_what_a_bad_or_failed_step_sampled_is_forgotten() -> None:
    cache = sim(FULL, STATE)
    lease = cache.prompt(tokens(50))
    assert cache.extend(lease, 4, drafts=[1, 2, 3, 4]) is not None
    assert cache.cache.commit(lease, sampled=[5], failed=True) == 50
    assert lease.num_tokens == 50
    table = lease.pages.tables[0]
    assert table is not None
    lease.append([9])
    assert cache.extend(lease, 1, may_cut=True) is not None
    cache.cache.invalidate({"full": [table[0]]})
    assert cache.cache.commit(lease, sampled=[777]) == 0
    assert lease.num_tokens == 51


def test_a_fork_of_a_bad_block_is_bad() -> None:
    cache = sim(FULL, STATE, window(40))
    lease = cache.prompt(tokens(50), breakpoints=[32])
    for name in ("full", "window40"):
        twins = cache.cache.fork(lease, 1)
        assert isinstance(twins, list)
        table = lease.pages.tables[cache.cache._token_group[name]]
        assert table is not None
        moved = cache.cache.invalidate({name: [table[3]]})
        assert moved[lease.id] == moved[twins[0].id] == 48
        cache.cache.check_integrity()
        assert cache.compute(lease)


def test_a_bad_page_that_holds_nothing_yet_costs_nothing() -> None:
    cache = sim(FULL, STATE)
    lease = cache.prompt(tokens(48))
    lease.append([1])
    assert cache.extend(lease, 1, may_cut=True) is not None
    table = lease.pages.tables[0]
    assert table is not None
    cache.cache.invalidate({"full": [table[3]]})
    assert cache.cache.commit(lease) == 48
    assert len(table) == 3
    assert cache.extend(lease, 1, may_cut=True) is not None
    cache.cache.commit(lease, failed=True)
    cache.cache.invalidate({"full": [table[3]]})
    assert (lease.computed, len(table)) == (48, 3)
    cache.cache.check_integrity()
    assert cache.compute(lease)


def test_checkpoints_are_kept_again_after_a_rollback() -> None:
    cache = sim(FULL, STATE)
    lease = cache.prompt(tokens(100))
    table = lease.pages.tables[0]
    assert table is not None
    cache.cache.invalidate({"full": [table[0]]})
    assert (lease.computed, lease.cached_tokens) == (0, 0)
    assert cache.compute(lease)
    cache.cache.release(lease)
    assert cache.serve(tokens(100)) == 96


def test_tables_are_the_callers_to_keep() -> None:
    cache = sim(FULL, STATE)
    lease = cache.cache.begin(tokens(200))
    step = cache.extend(lease, 10)
    assert step is not None
    view = np.asarray(step.tables["full"])
    cache.cache.commit(lease)
    assert cache.compute(lease)
    assert len(view) == 1
    cache.cache.check_integrity()


def test_events_tell_what_an_invalid_page_and_a_reset_removed() -> None:
    cache = sim(FULL, STATE, event_limit=99)
    cache.serve(tokens(100))
    stored = [key for event in cache.cache.take_events() for key in event.keys]
    (root,) = cache.cache._prefixes.index.roots.values()
    (node,) = root.children.values()
    assert node.pages[0] is not None
    cache.cache.invalidate({"full": [node.pages[0][4]], "state": [0, -1]})
    assert [key for event in cache.cache.take_events() for key in event.keys] == stored[4:]
    cache.cache.reset()
    assert [key for event in cache.cache.take_events() for key in event.keys] == stored[:4]


def test_a_follower_does_not_wait_for_a_checkpoint_that_will_not_be() -> None:
    cache = sim(FULL, STATE)
    shared = tokens(100)
    leader = cache.cache.begin(shared + tokens(100, 1))
    assert cache.extend(leader, 200) is not None
    assert not cache.cache.follow(cache.cache.match(shared + tokens(100, 2)))
    only_full = sim(FULL)
    leader = only_full.cache.begin(shared + tokens(100, 1))
    assert only_full.extend(leader, 200) is not None
    assert only_full.cache.follow(only_full.cache.match(shared + tokens(100, 2)))


def test_the_books_do_not_grow_with_the_number_of_requests() -> None:
    cache = sim(FULL, STATE, num_slabs=200)
    cache.serve(tokens(40))
    for number in range(3000):
        cache.cache.abort(cache.cache.begin(tokens(40), lookup_key(str(number % 3))))
    prefixes = cache.cache._prefixes
    assert len(prefixes.queue) < 10
    assert len(prefixes.history.log) == 0
    assert len(prefixes.index.roots) == 1


def test_two_invalidations_in_flight_go_back_to_the_earlier() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(200), breakpoints=[32, 96])
    lease = cache.cache.begin(tokens(200))
    assert cache.extend(lease, 5) is not None
    table = lease.pages.tables[0]
    assert table is not None
    cache.cache.invalidate({"full": [table[4]]})
    cache.cache.invalidate({"full": [table[8]]})
    assert cache.cache.commit(lease) == 32


def test_layouts_that_make_no_sense_are_refused() -> None:
    for groups, reason in (
        ([FULL, FULL], "same name"),
        ([FULL, CacheGroup("a", Role.TAP, 4, pool="p"), CacheGroup("b", Role.TAP, 5, pool="p")], "one pool"),
        ([FULL, CacheGroup("w", Role.LOCAL, 4)], "'w' of role local has .* a local group has a window or a chunk"),
        (
            [CacheGroup("f", Role.FULL, 4, sight=Sight(window=8))],
            "'f' of role full has .*window=8.* no other group has",
        ),
    ):
        with pytest.raises(PlanError, match=reason):
            CacheLayout.of(groups, block_tokens=16, num_slabs=4)
    with pytest.raises(PlanError, match="at least 2"):
        CacheLayout.of([FULL], block_tokens=16, num_slabs=1)


@pytest.mark.parametrize(("sight", "num_blocks"), [(Sight(window=64), 4), (Sight(chunk=64), 3), (Sight(chunk=63), 4)])
def test_a_layout_weighs_checkpoints_by_what_they_keep(sight: Sight, num_blocks: int) -> None:
    """A chunk of whole blocks is never seen whole from a block boundary: where it ends, the next one begins."""
    groups = [FULL, CacheGroup("local", Role.LOCAL, 8, page_bytes=100, sight=sight), STATE]
    layout = CacheLayout.of(groups, block_tokens=16, num_slabs=4)
    assert layout.checkpoint_bytes == num_blocks * 100 + STATE.page_bytes


def test_invalid_pages_are_cleared_before_anyone_has_them_again() -> None:
    cache = sim(FULL, STATE, at_once=False)
    lease = cache.prompt(tokens(50))
    cache.acknowledge_all()
    table = lease.pages.tables[0]
    assert table is not None
    bad = table[1]
    cache.cache.invalidate({"full": [bad], "state": [10**6]})
    batch = cache.cache.take_operations()
    assert batch is not None
    assert batch.operations == (ZeroPage("full", bad),)
    assert bad not in cache.cache._groups.arena.pools["full"].slabs[bad // 8].free
    cache.cache.acknowledge(batch.id)
    cache.cache.check_integrity()
