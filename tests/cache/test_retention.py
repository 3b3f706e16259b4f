"""What is kept, and what goes first."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from hybridkv.cache import CacheGroup, CacheLayout, Candidate, EvictionPolicy, Kind, Rating, Role, named_policy
from hybridkv.cache.index.tree import Checkpoint
from hybridkv.cache.retention.eviction_log import Eviction, EvictionLog
from hybridkv.cache.retention.named import default_checkpoints
from hybridkv.cache.retention.policy import Numbers, PromptEndBranchesGrid, PromptFacts, RecencyAndFlops
from hybridkv.cache.retention.reuse import _AGE_ENDS, _CHANCES, PredictedReuse, _age_index, worth_by_age
from hybridkv.errors import HybridKVError
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.sight import Sight
from tests.cache.sim import Sim

FULL = CacheGroup("full", Role.FULL, 8, page_bytes=1)
STATE = CacheGroup("state", Role.STATE, 1, page_bytes=8)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(32000), k=count)


def sim(*groups: CacheGroup, num_slabs: int, policy: str | EvictionPolicy = "reuse") -> Sim:
    layout = CacheLayout.of(groups, block_tokens=4, num_slabs=num_slabs, kv_bytes_per_token=1)
    return Sim(layout, policy=policy, checkpoint_policy=PromptEndBranchesGrid(None))


def end_of(turn: int, new_tokens: int = 100, length: int = 1000, num_bytes: int = 1000) -> Candidate:
    return Candidate(Kind.END, False, turn, new_tokens, 0, 0, length, num_bytes)


# --- the policy that learns -------------------------------------------------------------------------------------------


def test_ages_are_filed_where_their_widths_say() -> None:
    for age in itertools.chain(range(300), (5000, 123_456)):
        index = _age_index(age)
        assert age < _AGE_ENDS[index]
        assert index == 0 or age >= _AGE_ENDS[index - 1]
    assert _age_index(2**40) == len(_AGE_ENDS) - 1


def test_the_worth_of_waiting_is_the_best_ratio_of_reuses_to_time() -> None:
    reuses = np.zeros(len(_AGE_ENDS))
    reuses[7] = 1.0  # all reuse at ages 16 to 23
    worth = worth_by_age(reuses)
    chance = _CHANCES.index(0.45)
    waited = 16 + (24 - 16) * (1 - 0.45 / 2)
    assert worth[chance, 0] == pytest.approx(0.45 / waited)
    assert np.all(np.diff(worth[chance, :8]) > 0)  # the nearer, the better
    assert worth[chance, 8] == 0  # too late
    assert np.all(np.diff(worth[:, 0]) > 0)  # the likelier, the better


def test_what_went_on_before_is_expected_to_go_on() -> None:
    policy = PredictedReuse()
    groups = [policy.rate(end_of(turn)).cohort for turn in range(6)]
    assert [policy.chance(group) for group in groups] == pytest.approx([(1 + t) / (4 + t) for t in range(6)])


def test_chances_are_learned_and_forgotten() -> None:
    policy = PredictedReuse()
    short, long = policy.rate(end_of(1, 100)).cohort, policy.rate(end_of(1, 9000)).cohort
    for _ in range(300):
        policy.learn_kept(short, 1)
        policy.learn_kept(long, 1)
        policy.learn_reused(short, 10)
    assert policy.chance(short) > 0.9
    assert policy.chance(long) < 0.1
    unseen = policy.rate(end_of(1, 3000)).cohort
    assert 0.4 < policy.chance(unseen) < 0.6  # what all of this turn do
    for _ in range(20_000):
        policy.learn_kept(long, 1)
    for _ in range(600):
        policy.learn_kept(long, 1)
        policy.learn_reused(long, 10)
    assert policy.chance(long) > 0.04  # 600 of 20,900 would be 0.03, had nothing been forgotten


def test_values_follow_all_that_was_learned() -> None:
    """Only distributions that have changed are valued again: also those that were halved without a reuse."""
    policy, source = PredictedReuse(), random.Random(0)
    cohorts = [policy.rate(end_of(0)).cohort, (1, Kind.GRID, 0), (1, Kind.GRID, 3), (1, Kind.BRANCH, 0)]
    for _ in range(90):
        for cohort in source.sample(cohorts, source.randrange(3)):
            policy.learn_reused(cohort, source.choice([1, 10, 1000]))
        for _ in range(256):
            policy.learn_kept(cohorts[0], 1)
        if policy._num_kept:  # else it has just forgotten
            assert policy._worth == [worth_by_age(ages).tolist() for ages in policy._ages]


def value(policy: PredictedReuse, candidate: Candidate, age: int) -> float:
    return policy.value(policy.rate(candidate).lane, age, age)


def test_value_is_chance_times_tokens_a_byte() -> None:
    policy = PredictedReuse()
    assert value(policy, end_of(3), 50) > value(policy, end_of(0), 50)
    assert value(policy, end_of(0, length=8000), 50) == pytest.approx(8 * value(policy, end_of(0), 50))
    assert value(policy, end_of(0, num_bytes=4000), 50) == pytest.approx(value(policy, end_of(0), 50) / 4)
    superseded = end_of(3)._replace(is_superseded=True)
    assert value(policy, superseded, 50) < value(policy, end_of(0), 50)


class Recorder:
    """Has a policy rather than being one: where the core is compiled, its classes have no interpreted subclasses."""

    def __init__(self) -> None:
        self.policy = PredictedReuse()
        self.rate, self.value = self.policy.rate, self.policy.value
        self.reused: list[tuple[Numbers, int]] = []
        self.kept: Counter[Numbers] = Counter()

    def learn_kept(self, group: Numbers, count: int) -> None:
        self.kept[group] += count
        self.policy.learn_kept(group, count)

    def learn_reused(self, group: Numbers, age: int) -> None:
        self.reused.append((group, age))
        self.policy.learn_reused(group, age)


# --- in the cache -----------------------------------------------------------------------------------------------------


def test_a_conversation_outlives_a_flood_of_single_prompts() -> None:
    """Under LRU the flood takes everything; who has come back three times is expected again."""
    found = {}
    for policy in ("lru", "reuse"):
        cache = sim(FULL, STATE, num_slabs=24, policy=policy)
        chat = tokens(40)
        for turn in range(4):
            cache.serve(chat)
            chat = chat + tokens(8, 100 + turn)
        for seed in range(1, 25):
            cache.serve(tokens(40, seed))
        found[policy] = cache.serve(chat)
        cache.cache.check_integrity()
    assert found["lru"] == 0
    assert found["reuse"] >= 60


def test_what_a_conversation_has_left_behind_goes_first() -> None:
    cache = sim(FULL, STATE, num_slabs=12)
    chat = tokens(24)
    cache.serve(chat)
    longer = chat + tokens(24, 1)
    cache.serve(longer)
    for seed in range(2, 5):
        cache.serve(tokens(24, seed))
    assert cache.cache.match(longer + tokens(8, 9)).num_tokens >= 44
    assert cache.cache.match(chat + tokens(8, 9)).num_tokens == 0  # its state has gone, though it had just been used
    cache.cache.check_integrity()


def test_blocks_that_no_checkpoint_needs_go_before_everything_else() -> None:
    cache = sim(FULL, STATE, num_slabs=10)
    cache.serve(tokens(28))
    lease = cache.cache.begin(tokens(60, 1))
    assert cache.compute(lease, 48)
    cache.cache.release(lease, keep=False)  # 12 blocks and no state
    other = cache.cache.begin(tokens(90, 2))
    assert cache.compute(other)
    assert cache.cache.match(tokens(60, 1)).matched_tokens < 48
    assert cache.cache.match(tokens(28)).num_tokens == 24
    assert cache.cache.stats.checkpoints_evicted == 0


def test_what_was_evicted_is_missed_when_it_is_asked_for_again() -> None:
    policy = Recorder()
    cache = sim(FULL, STATE, num_slabs=8, policy=policy)
    chat = tokens(41)
    cache.serve(chat)
    for seed in range(1, 8):
        cache.serve(tokens(41, seed))
    assert cache.cache.match(chat).num_tokens == 0
    assert not policy.reused
    longer = chat + tokens(20, 99)
    lease = cache.cache.begin(longer)
    assert cache.compute(lease)
    assert lease.lineage.turn == 1
    assert lease.lineage.continued_from == 40
    assert [age for _, age in policy.reused] == [8]


def test_what_is_asked_for_again_must_be_what_ended_there() -> None:
    policy = Recorder()
    cache = sim(FULL, STATE, num_slabs=8, policy=policy)
    cache.serve(tokens(41))
    for seed in range(1, 8):
        cache.serve(tokens(41, seed))
    cache.serve(tokens(41)[:36] + tokens(20, 99))  # all but its last block
    assert not policy.reused


def test_a_conversation_is_counted_turn_by_turn() -> None:
    """Each end is kept once; when the next turn is there, it counts among what was left behind."""
    policy = Recorder()
    cache = sim(FULL, STATE, num_slabs=100, policy=policy)
    chat = tokens(41)
    for turn in range(3):
        lease = cache.cache.begin(chat)
        assert lease.lineage.turn == turn
        assert cache.compute(lease)
        cache.cache.release(lease)  # the prompt's end at 40 and so on is superseded by the very end
        chat = chat + tokens(20, 100 + turn)
    ends = {group[1]: count for group, count in policy.kept.items() if not group[0] and count}
    left = {group[2]: count for group, count in policy.kept.items() if group[0] and count}
    assert ends == {0: 1, 1: 1, 2: 1}
    assert left == {0: 3, 1: 2}  # three ends of prompts that nobody used, two very ends that were used once
    assert [(group[:2], age) for group, age in policy.reused] == [((0, 0), 1), ((0, 1), 1)]


def test_a_fork_is_the_same_turn_and_counts_nothing_twice() -> None:
    policy = Recorder()
    cache = sim(FULL, STATE, num_slabs=100, policy=policy)
    cache.serve(tokens(41))
    lease = cache.cache.begin(tokens(41) + tokens(20, 1))
    twins = cache.cache.fork(lease, 1)
    assert isinstance(twins, list)
    assert lease.lineage.turn == twins[0].lineage.turn == 1
    assert lease.lineage.continued_from == twins[0].lineage.continued_from == lease.computed > 0
    assert cache.compute(lease)
    assert cache.compute(twins[0])
    assert len(policy.reused) == 1


def test_a_lease_that_ended_holds_no_pages() -> None:
    cache = sim(FULL, STATE, num_slabs=100)
    lease = cache.cache.begin(tokens(41))
    assert cache.compute(lease)
    assert lease.pages.tables
    assert lease.pages.slabs
    cache.cache.release(lease)
    assert not lease.pages.tables
    assert not lease.pages.named_tables
    assert not lease.pages.states
    assert not lease.pages.slabs


def test_a_state_that_went_while_its_blocks_stayed_is_missed_too() -> None:
    policy = Recorder()
    cache = sim(FULL, STATE, num_slabs=100, policy=policy)
    cache.serve(tokens(40))
    prefixes = cache.cache._prefixes
    popped = prefixes.queue.pop(prefixes.history.clock)
    while popped is not None:
        item, rating = popped
        assert isinstance(item, Checkpoint)
        prefixes.history.evicted(item, rating)
        prefixes.drop_checkpoint(item)
        popped = prefixes.queue.pop(prefixes.history.clock)
    lease = cache.cache.begin(tokens(40) + tokens(20, 1))
    assert lease.computed == 0
    assert lease.matched_tokens == 40
    assert lease.lineage.turn == 1
    assert len(policy.reused) == 1


def test_what_loses_its_successor_is_an_end_again() -> None:
    policy = Recorder()
    cache = sim(FULL, STATE, num_slabs=100, policy=policy)
    chat = tokens(40)
    for _ in range(2):
        lease = cache.cache.begin(chat)
        assert cache.compute(lease)
        cache.cache.release(lease)
        chat = chat + tokens(20, 1)
    prefixes = cache.cache._prefixes
    (node,) = (node for node in prefixes.all_nodes(()) if node.checkpoints)
    last = node.checkpoints[-1]
    prefixes.queue.withdraw(last)
    cache.cache._reclaimer.evict_checkpoint(last)
    deepest = node.checkpoints[-1]
    assert deepest.is_news
    assert deepest.rating is not None
    assert deepest.rating.cohort[0] == 0
    cache.cache.check_integrity()


def test_who_found_no_room_has_used_nothing() -> None:
    cache = sim(FULL, STATE, num_slabs=30)
    cache.serve(tokens(41))
    (checkpoint, *_) = (c for node in cache.cache._prefixes.all_nodes(()) for c in node.checkpoints)
    for _ in range(10):
        cache.cache.abort(cache.cache.begin(tokens(41)))
    assert checkpoint.num_hits == 0
    cache.serve(tokens(41))
    assert checkpoint.num_hits == 1


def test_what_went_piece_by_piece_is_missed_once() -> None:
    policy = Recorder()
    cache = sim(FULL, num_slabs=12, policy=policy)
    cache.serve(tokens(160))
    for seed in range(1, 5):
        other = cache.cache.begin(tokens(160, seed))
        while other.computed < 160:
            assert cache.compute(other, 32)
        cache.cache.release(other)
    policy.reused.clear()
    lease = cache.cache.begin(tokens(160))
    while lease.computed < 160:
        assert cache.compute(lease, min(16, 160 - lease.computed))
    assert len(policy.reused) == 1


def test_books_do_not_keep_what_is_gone() -> None:
    cache = sim(FULL, num_slabs=600, policy="lru")
    for number in range(100):
        shared = tokens(8, number)
        cache.serve(shared)
        one, other = (cache.cache.begin(shared + tokens(8, seed)) for seed in (1000, 2000))
        assert cache.compute(one)
        cache.cache.release(one)
        cache.cache.abort(other)
        cache.cache.check_integrity()
    cache.cache.reset()
    assert len(cache.cache._prefixes.queue) == 0


def test_evictions_are_bounded_and_recalled_once() -> None:
    log = EvictionLog(limit=2)
    for number in range(3):
        log.remember(bytes([number]), Eviction(number, 0, (0, 0, 0), 0, False))
    assert len(log) == 2
    assert log.recall([b"\0"]) is None
    deepest = log.recall([b"\1", b"x", b"\2", b"y"])
    assert deepest is not None
    assert deepest.position == 2
    assert log.recall([b"\2"]) is None
    log.clear()
    assert len(log) == 0


def test_popular_prefixes_of_full_attention_outlive_a_flood() -> None:
    """Where no checkpoint is needed, runs of blocks are what is kept."""
    hits = {}
    for policy in ("lru", "reuse"):
        cache, seeds = sim(FULL, num_slabs=12, policy=policy), iter(range(10, 10_000))
        for number in range(200):
            cache.serve(tokens(64, number % 3) + tokens(8, next(seeds)))
            for _ in range(2):
                cache.serve(tokens(64, next(seeds)))
        cache.cache.check_integrity()
        hits[policy] = cache.cache.stats.hit_tokens
    assert hits["reuse"] > 2 * hits["lru"]


# --- the other policies -----------------------------------------------------------------------------------------------


def test_flops_weighs_recency_against_what_is_saved() -> None:
    policy = RecencyAndFlops(flops=lambda start, end: float(end - start) ** 2)
    short = policy.rate(end_of(0, length=100)).lane
    long = policy.rate(end_of(0, length=1000)).lane
    assert policy.value(long, 90, 100) > policy.value(short, 50, 100)
    assert policy.value(long, 99, 100) < policy.value(long, 1, 100)
    assert policy.value(short, 0, 100) > policy.value(short, 100, 100)


def test_policies_have_names() -> None:
    with pytest.raises(HybridKVError, match="no policy 'lur': choose one of reuse, lru, flops; did you mean lru"):
        named_policy("lur")
    assert isinstance(named_policy("reuse"), PredictedReuse)
    assert isinstance(named_policy("flops", lambda: lambda start, end: 1.0).rate(end_of(0)), Rating)


def test_prompt_ends_near_a_named_place_are_not_kept_twice() -> None:
    policy = PromptEndBranchesGrid(None, near_tokens=64)
    near = dict(policy.positions(PromptFacts(1000, 0, 0, (960,), 16)))
    assert near == {960: Kind.BREAKPOINT} or near == {960: Kind.END}
    far = {position for position, _ in policy.positions(PromptFacts(1000, 0, 0, (512,), 16))}
    assert far == {512, 992}
    at_end = {position for position, _ in policy.positions(PromptFacts(1000, 0, 0, (1000,), 16))}
    assert at_end == {992, 1000}


def test_the_more_idle_memory_the_denser_is_the_grid_in_it() -> None:
    policy = PromptEndBranchesGrid(512, fill_tokens=128)
    for num_spare, spacing in ((1000, 128), (64, 128), (40, 256), (16, 512), (7, 2000)):
        kinds: dict[int, Kind] = {}
        for position, kind in policy.positions(PromptFacts(1000, 0, 0, (), 16, (), num_spare)):
            kinds.setdefault(position, kind)
        filled = {position for position, kind in kinds.items() if kind is Kind.FILL}
        assert filled == {p for p in range(spacing, 992 - spacing // 2, spacing) if p != 512}, num_spare
        assert [position for position, kind in kinds.items() if kind is Kind.GRID] == [512]


def test_a_long_prompt_gets_no_more_checkpoints_in_idle_memory_than_a_short_one() -> None:
    """Of a model with states. In the room of a store they are so far apart that it makes no difference."""
    plan = make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(80 * 2**30))
    policy = default_checkpoints(CacheLayout.from_plan(plan))
    for prompt_tokens, spacing in ((4096, 512), (8192, 512), (8704, 512), (8705, 1024), (20_000, 2048), (60_000, 4096)):
        facts = PromptFacts(prompt_tokens, 0, 0, (), 16, num_spare=2000)
        filled = [position for position, kind in policy.positions(facts) if kind is Kind.FILL]
        assert filled[1] - filled[0] == spacing, prompt_tokens
        assert len(filled) <= 16
        in_store = policy.positions(facts._replace(num_spare=0, store_room=2000))
        assert [position for position, kind in in_store if kind is Kind.FILL][:1] in ([], [4096])


def test_idle_room_of_a_store_adds_a_sparser_grid_and_changes_nothing_else() -> None:
    policy = PromptEndBranchesGrid(1000, fill_tokens=32)
    facts = PromptFacts(5000, 0, 0, (), 16, (320,))
    plain = dict(policy.positions(facts))
    for store_room, spacing in ((2000, 256), (300, 256), (200, 256), (100, 512), (40, 1024), (7, 0)):
        found: dict[int, Kind] = {}
        for position, kind in policy.positions(facts._replace(store_room=store_room, less_likely=(700,))):
            found.setdefault(position, kind)
        filled = {position for position, kind in found.items() if kind is Kind.FILL}
        is_dense = 0 < spacing < 1000
        grid = set(range(spacing, 4992 - spacing // 2, spacing)) if is_dense else set()
        assert filled == (grid | {700} if is_dense else set()) - plain.keys(), store_room
        assert {position: kind for position, kind in found.items() if kind is not Kind.FILL} == plain
    both = facts._replace(store_room=2000, num_spare=2000)
    assert set(policy.positions(both)) == set(policy.positions(both._replace(store_room=0))), (
        "memory has the denser one"
    )


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b", "gemma-3-27b"])
@pytest.mark.parametrize("memory_gib", [2, 80])
def test_the_cache_manages_exactly_the_bytes_that_the_plan_reports(name: str, memory_gib: int) -> None:
    plan = make_plan(load_model(name), PlanOptions(memory_gib * 2**30))
    layout = CacheLayout.from_plan(plan)
    assert layout.num_slabs == plan.num_slabs
    for group in layout.groups:
        assert layout.num_slabs * group.pages_per_slab * group.page_bytes == plan.arena_bytes


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b"])
def test_an_arena_of_many_slabs_has_enough_blocks_in_each(name: str) -> None:
    """Books are kept by slab. Slabs of one or two pages would make them long, so the plan joins such slabs."""
    plan = make_plan(load_model(name), PlanOptions(80 * 2**30))
    assert plan.num_slabs > 4096
    assert min(group.pages_per_slab for group in plan.groups) >= 16
    assert plan.arena_bytes > 0.999 * plan.options.memory_bytes


def windowed(num_slabs: int, windows: Sequence[int], pages_per_slab: int = 8) -> Sim:
    """A cache of full attention and windows, with the default policies."""
    groups = [CacheGroup("full", Role.FULL, pages_per_slab)]
    groups += [CacheGroup(f"window{size}", Role.LOCAL, pages_per_slab, sight=Sight(window=size)) for size in windows]
    layout = CacheLayout.of(groups, block_tokens=16, num_slabs=num_slabs, kv_bytes_per_token=1)
    return Sim(layout, checkpoint_policy=default_checkpoints(layout))


@pytest.mark.parametrize("windows", [[256], [192, 640], [48]])
def test_idle_memory_keeps_all_blocks_of_windows(windows: list[int]) -> None:
    """Wherever another prompt leaves a known one, it resumes there; the blocks are kept, not the boundaries."""
    cache = windowed(2000, windows)
    prompt = tokens(2048)
    cache.serve(prompt)
    assert cache.cache.stats.kept_by_kind["fill"] == 0
    for shared in (16, 130, 700, 1333, 2040):
        assert cache.cache.match([*prompt[:shared], *tokens(40, seed=1)]).num_tokens == shared // 16 * 16


@pytest.mark.parametrize("shared", [300, 560, 1500])
def test_the_first_sibling_hits_at_any_block(shared: int) -> None:
    """Also if the prompt is computed in steps, which let blocks slide out of windows one after the other."""
    for step in (4096, 64):
        cache = windowed(2000, [512])
        for number in range(4):
            lease = cache.cache.begin([*tokens(shared), *tokens(60, seed=number + 1)])
            assert lease.cached_tokens == (shared // 16 * 16 if number else 0)
            while lease.computed < lease.num_tokens:
                assert cache.compute(lease, min(step, lease.num_tokens - lease.computed))
            cache.cache.release(lease)
            cache.cache.check_integrity()
        assert cache.cache.stats.kept_by_kind["branch"] == 1, "where the first sibling left the prompt"


def test_idle_windows_deny_nothing_and_go_before_checkpoints() -> None:
    """A prompt that needs all the room that no lease and no checkpoint has finds it, and nothing else is evicted."""
    cache = windowed(33, [64], pages_per_slab=4)  # 32 slabs: 128 pages
    cache.serve(tokens(640))  # 40 pages of full attention, 40 of the window: checkpoints need 13 of these
    pool, stats = cache.cache._groups.arena.pools["window64"], cache.cache.stats
    assert pool.num_idle == 27
    kept = stats.checkpoints_kept
    lease = cache.prompt(tokens(560, seed=1))  # 35 pages of each: 70, where 48 were free
    assert stats.checkpoints_evicted == 0
    assert stats.checkpoints_kept > kept
    cache.cache.release(lease)
    cache.cache.check_integrity()
    assert cache.cache.match([*tokens(640), 1]).num_tokens == 640
    big = cache.prompt(tokens(1000, seed=2))  # 63 pages of each: nearly all there is
    assert stats.checkpoints_evicted > 0
    cache.cache.release(big)
    cache.cache.check_integrity()


def test_the_end_of_idle_windows_goes_first() -> None:
    """What is left of a prompt can be resumed: blocks go from its end, and not all of them."""
    cache = windowed(33, [640], pages_per_slab=4)
    first = tokens(640)
    cache.serve(first)
    cache.serve(tokens(448, seed=1))  # 56 pages, where 48 were free
    assert cache.cache.stats.checkpoints_evicted > 0
    assert 0 < cache.cache.match([*first, 1]).num_tokens < 640
    cache.cache.check_integrity()


def test_a_reuse_of_idle_windows_counts_as_one_of_the_evicted_checkpoint() -> None:
    """The policy learns from it as if the blocks had been evicted, too."""
    cache = windowed(33, [640], pages_per_slab=4)
    cache.cache.release(cache.prompt(tokens(305)), keep=False)
    while cache.cache.stats.checkpoints_evicted < cache.cache.stats.checkpoints_kept:
        assert cache.cache._reclaimer.evict_least({})
    lease = cache.prompt([*tokens(305), *tokens(40, seed=1)])
    assert lease.cached_tokens == 304
    assert lease.lineage.turn == 1
    assert lease.lineage.has_recalled
