"""Checkpoints where prompts will probably part, and in idle memory."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.cache import Cache, CacheGroup, CacheLayout, Candidate, EvictionPolicy, Kind, Lease, Rating, Role
from hybridkv.cache.index.tree import Checkpoint
from hybridkv.cache.retention.partings import _FEW_PROMPTS, Parting, Partings, Place, _Tally
from hybridkv.cache.retention.policy import Numbers, PromptEndBranchesGrid
from hybridkv.cache.retention.reuse import PredictedReuse
from hybridkv.cache.tokens import PLAIN_KEY, lookup_key, pack_tokens
from tests.cache.placement_oracle import Sample, _row_maxima, best_places, tokens_saved
from tests.cache.sim import Sim

FULL = CacheGroup("full", Role.FULL, 8, page_bytes=1)
STATE = CacheGroup("state", Role.STATE, 1, page_bytes=8)
BLOCK_TOKENS = 4


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32000), k=count)


def sim(
    num_slabs: int,
    *,
    fill_tokens: int | None = None,
    policy: str | EvictionPolicy = "reuse",
    groups: Sequence[CacheGroup] = (FULL, STATE),
) -> Sim:
    layout = CacheLayout.of(list(groups), block_tokens=BLOCK_TOKENS, num_slabs=num_slabs, kv_bytes_per_token=1)
    return Sim(layout, policy=policy, checkpoint_policy=PromptEndBranchesGrid(None, fill_tokens=fill_tokens))


def opening_of(prompt: list[int]) -> bytes:
    return PLAIN_KEY.root + pack_tokens(prompt[:BLOCK_TOKENS])


def checkpoints(cache: Sim) -> list[Checkpoint]:
    leaves = [lease.leaf for lease in cache.cache.leases]
    return [c for node in cache.cache._prefixes.all_nodes(leaves) for c in node.checkpoints]


def positions(cache: Sim, kind: Kind) -> list[int]:
    return sorted(c.position for c in checkpoints(cache) if c.kind is kind)


# --- the oracle -------------------------------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[Sample], int]:
    starts = st.just(draw(st.integers(0, 6))) if draw(st.booleans()) else st.integers(0, 11)
    samples = st.builds(lambda start, more: Sample(start, start + more), starts, st.integers(1, 6))
    offsets = draw(st.lists(st.integers(1, 14), max_size=8))
    return offsets, draw(st.lists(samples, max_size=8)), draw(st.integers(0, 5))


@given(placements())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_oracle_is_as_good_as_the_best_of_all_subsets(given: tuple[list[int], list[Sample], int]) -> None:
    offsets, samples, budget = given
    best = best_places(offsets, samples, budget)
    sizes = range(min(budget, len(offsets)) + 1)
    subsets = itertools.chain.from_iterable(itertools.combinations(sorted(set(offsets)), size) for size in sizes)
    assert best.saved == max(tokens_saved(subset, samples) for subset in subsets)
    assert best.saved == tokens_saved(best.places, samples)
    assert best.places == sorted(set(best.places) & set(offsets))
    assert len(best.places) <= budget


def test_the_oracle_looks_at_few_entries_of_each_row() -> None:
    """The number of entries grows with the number of rows, not with its square."""
    looked_at = Counter[int]()
    for num in (64, 256, 1024):

        def value(b: int, a: int, num: int = num) -> int:
            looked_at[num] += 1
            return a * (b - a) if a < b else -1 - a

        found = _row_maxima(range(1, num + 1), range(num), value)
        assert all(found[b] == b // 2 for b in range(1, num + 1))
        assert looked_at[num] <= 10 * num


def distance(chance: random.Random, *, one_start: bool) -> float:
    """What the places that were learned save, relative to the most that as many can save of the same partings."""
    end, samples = 4 * 33, list[Sample]()
    for _ in range(chance.randint(2, 16)):
        block = chance.randint(1, 32)
        samples += [Sample(0 if one_start else 4 * chance.randrange(block), 4 * block)] * 2  # each is frequent enough
    chance.shuffle(samples)
    tally = _Tally()
    for sample in samples:
        tally.num_prompts += 1
        tally.parted(Parting(sample.position, sample.start, end))
    tally._learn()
    assert len(tally.places) <= 3
    saved = tokens_saved((place.position(end) for place in tally.places), samples)
    return saved / best_places([sample.position for sample in samples], samples, 3).saved


@pytest.mark.parametrize(("one_start", "mean", "worst"), [(True, 0.9979, 0.928), (False, 0.9974, 0.926)])
def test_learned_places_save_nearly_the_most_possible(one_start: bool, mean: float, worst: float) -> None:
    """A choice of one place after the other saves 1 - 1/e of the best: what is saved is monotone and submodular."""
    chance = random.Random(25)
    ratios = [distance(chance, one_start=one_start) for _ in range(1000)]
    assert min(ratios) >= 1 - 1 / math.e
    assert max(ratios) <= 1
    assert min(ratios) >= worst
    assert sum(ratios) / len(ratios) >= mean


# --- learning ---------------------------------------------------------------------------------------------------------


def learn(partings: Partings, opening: bytes, parting: Parting, count: int = 1) -> None:
    for _ in range(count):
        partings.begun(opening)
        partings.parted(opening, parting)


def test_a_tail_behind_all_conversations_is_left_out_of_what_is_kept() -> None:
    """Each conversation goes on before the template that closed its last prompt."""
    cache, tail = sim(400), tokens(8, 0)
    cached = []
    for number in range(1, 9):
        chat = tokens(24 + 8 * number, number)
        cache.serve(chat + tail)
        cached.append(cache.serve([*chat, *tokens(12, 100 + number), *tail]) - len(chat))
    assert all(distance < 0 for distance in cached[:2])
    assert cached[2:] == [0] * 6
    assert set(positions(cache, Kind.PARTING)) >= {24 + 8 * number for number in range(3, 9)}


def test_a_part_of_the_same_length_at_the_start_of_prompts_is_kept() -> None:
    """Documents of one length, each with several questions of different lengths: they have no block in common."""
    cache, cached = sim(400), []
    for number in range(1, 9):
        document = tokens(40, number)
        cache.serve([*document, *tokens(8 + 4 * number, 100 + number)])
        cached.append(cache.serve([*document, *tokens(9, 200 + number)]))
    assert cached == [0, 0, 40, 40, 40, 40, 40, 40]


def test_partings_of_an_opening_count_when_it_has_had_enough_prompts() -> None:
    partings = Partings()
    for number in range(20):
        learn(partings, bytes([number, 1]), Parting(100, 0, 400 + 4 * number))
    assert [place.offset for place in partings.places(b"\x00\x01")] == [100]
    own = b"own"
    learn(partings, own, Parting(60, 0, 80), _FEW_PROMPTS - 1)
    assert partings.places(own) is partings._all.places
    learn(partings, own, Parting(60, 0, 80))
    assert {place.position(80) for place in partings.places(own)} == {60}
    assert 100 in [place.offset for place in partings.places(b"\x00\x01")]


def test_the_chance_is_the_part_of_the_prompts_that_are_left_there() -> None:
    partings = Partings()
    for number in range(32):
        partings.begun(b"one")
        if number % 4 == 0:
            partings.parted(b"one", Parting(40, 0, 100 + number))
    (place,) = partings.places(b"one")
    assert place.offset == 40
    assert place.chance == pytest.approx(8 / 29)  # from the first parting to the last one
    rare = Partings()
    for number in range(400):
        rare.begun(b"one")
        if number % 50 == 0:
            rare.parted(b"one", Parting(40, 0, 100 + number))
    assert rare.places(b"one") == []


def test_memory_for_partings_is_bounded() -> None:
    partings, chance = Partings(), random.Random(3)
    for number in range(300):
        opening = number.to_bytes(2)
        for _ in range(40 if number % 50 == 0 else 2):
            position = 4 * chance.randint(1, 200)
            learn(partings, opening, Parting(position, 0, position + 4 * chance.randint(1, 50)))
        assert len(partings.places(opening)) <= 3
    assert len(partings._by_opening) == 256
    assert (43).to_bytes(2) not in partings._by_opening
    assert (44).to_bytes(2) in partings._by_opening
    assert max(len(tally._last) for tally in partings._by_opening.values()) == 32
    assert len(partings._all._last) == 32


def test_openings_that_were_used_are_not_forgotten_first() -> None:
    partings = Partings()
    for number in range(300):
        partings.begun(b"often")
        partings.begun(number.to_bytes(2))
    assert partings._by_opening[b"often"].num_prompts == 300


def test_known_branches_say_nothing_of_other_prompts() -> None:
    cache, shared = sim(400), tokens(40, 0)
    for number in range(1, 20):
        cache.serve(shared + tokens(20, number))
    partings = cache.cache._prefixes.history.partings
    assert len(partings._all._last) == 1  # the first prompt was left once where it went on alone
    assert partings._all.places == []
    assert [place.position(60) for place in partings.places(opening_of(shared))] == [40]
    lease = cache.cache.begin(tokens(60, 99))
    assert set(lease.wanted) == {56}


def parting_of(cache: Sim, prompt: list[int]) -> Parting | None:
    return cache.cache.match(prompt).found.parting(BLOCK_TOKENS)


def test_what_is_a_parting() -> None:
    cache, prompt = sim(400), tokens(60, 0)
    assert parting_of(cache, prompt) is None
    cache.serve(prompt, reply=tokens(20, 1))
    assert parting_of(cache, prompt[:30]) is None  # it ends inside
    assert parting_of(cache, prompt[:33]) is None
    assert parting_of(cache, prompt + tokens(20, 1) + tokens(20, 2)) is None  # it continues
    assert parting_of(cache, tokens(60, 3)) is None
    assert parting_of(cache, prompt[:43] + tokens(30, 4)) == Parting(40, 0, 60)
    in_reply = prompt + tokens(20, 1)[:9] + tokens(30, 4)
    assert parting_of(cache, in_reply) == Parting(68, 0, 0)  # after the prompt
    cache.serve(prompt[:43] + tokens(30, 4))
    assert parting_of(cache, prompt[:41] + tokens(30, 5)) == Parting(40, 0, 0)  # known
    assert parting_of(cache, prompt[:52] + tokens(30, 5)) == Parting(52, 40, 60)
    assert parting_of(cache, prompt[:22] + tokens(30, 5)) == Parting(20, 0, 60)


def test_what_breakpoints_save_is_not_learned() -> None:
    """Breakpoints of the prompt that parts: up to there, the earlier prompt had the same."""
    parting = Parting(40, 8, 60)
    for points, start in (((), 8), ((8, 44), 8), ((11,), 8), ((12,), 12), ((20, 39, 50), 36), ((5, 39), 36)):
        assert parting.after_breakpoints(points, BLOCK_TOKENS) == Parting(40, start, 60), points
    for points in ((40,), (43,), (8, 42, 60)):  # rounded down to whole blocks, the last of them is where it parts
        assert parting.after_breakpoints(points, BLOCK_TOKENS) is None, points


def test_chats_that_part_at_breakpoints_need_no_other_places() -> None:
    """Questions of different lengths about documents: without breakpoints, a place before the shortest is learned."""
    kept = {}
    for has_breakpoints in (False, True):
        cache, chance = sim(4000), random.Random(1)
        for number in range(20):
            document = tokens(chance.randrange(40, 80), number)
            points = [len(document)] if has_breakpoints else []
            for seed in (100 + number, 200 + number):
                cache.serve(document + tokens(chance.randrange(12, 24), seed), breakpoints=points)
        kept[has_breakpoints] = len(positions(cache, Kind.PARTING))
        assert bool(cache.cache._prefixes.history.partings._all.places) != has_breakpoints
    assert kept[False] > 10
    assert kept[True] == 0


def test_prompts_that_end_inside_others_teach_nothing() -> None:
    cache = sim(400)
    for number in range(6):
        prompt = tokens(60, number)
        cache.serve(prompt)
        cache.serve(prompt[:30])
    assert not cache.cache._prefixes.history.partings._all._last
    assert positions(cache, Kind.PARTING) == []


def test_places_follow_when_the_habit_changes() -> None:
    partings, lengths = Partings(), itertools.count(200, 4)
    for offset in (-8, -20, -48):
        for _ in range(40):
            end = next(lengths)
            learn(partings, b"one", Parting(end + offset, 0, end))
        assert partings.places(b"one")[0] == Place(offset, 1.0)
    for _ in range(40):
        learn(partings, b"one", Parting(64, 0, next(lengths)))
    assert partings.places(b"one")[0] == Place(64, 1.0)


def test_a_habit_that_changes_is_followed_in_the_cache() -> None:
    cache, seeds = sim(600), itertools.count(1000)
    for number, tail_tokens in enumerate([8] * 36 + [24] * 72):
        chat, tail = tokens(32 + 4 * (number % 16), number), tokens(tail_tokens, -1)
        cache.serve(chat + tail)
        found = cache.serve([*chat, *tokens(12, next(seeds)), *tail])
        if number == 36:
            assert found < len(chat)
        elif 2 <= number < 36 or number > 90:
            assert found == len(chat), number


# --- idle memory ------------------------------------------------------------------------------------------------------


def kept(cache: Sim) -> set[tuple[bytes, int, Kind]]:
    """Checkpoints other than those in idle memory."""
    found = set[tuple[bytes, int, Kind]]()
    for c in checkpoints(cache):
        if c.kind is not Kind.FILL:
            assert c.node is not None
            found.add((c.node.keys[c.position // BLOCK_TOKENS - 1 - c.node.start], c.position, c.kind))
    return found


def unused(cache: Sim) -> list[Checkpoint]:
    """Checkpoints that only fill idle memory."""
    return [c for c in checkpoints(cache) if c.kind is Kind.FILL and not c.num_hits]


def compute_all(cache: Sim, lease: Lease) -> None:
    while lease.computed < lease.num_tokens:
        assert cache.compute(lease, min(64, lease.num_tokens - lease.computed))
        cache.cache.check_integrity()
    cache.cache.release(lease)
    cache.cache.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_nothing_is_evicted_for_checkpoints_in_idle_memory(policy: str) -> None:
    """What else is kept is the same with and without them, even if memory becomes scarce after they were planned.

    The arena is so small that nothing is evicted ahead.
    """
    caches = [sim(31, fill_tokens=fill, policy=policy) for fill in (8, None)]
    chance, planned, num_filled = random.Random(5), 0, 0
    for number in range(48):
        long = tokens(chance.randint(20, 200), 1000 + number)
        leases = [cache.cache.begin(long) for cache in caches]
        planned += Kind.FILL in leases[0].wanted.values()
        for other in range(chance.choice((0, 1, 15))):
            for cache in caches:
                cache.serve(tokens(21, 100 * number + other))
        for cache, lease in zip(caches, leases, strict=True):
            compute_all(cache, lease)
        num_filled += bool(unused(caches[0]))
        assert kept(caches[0]) == kept(caches[1]), number
        if number % 4 == 3:
            for cache in caches:
                cache.cache.reset()
    assert planned > 5
    assert num_filled > 3
    assert caches[1].cache.stats.checkpoints_evicted > 100


@pytest.mark.parametrize("num_before", [0, 40], ids=["empty", "filled"])
@pytest.mark.parametrize("groups", [(FULL, STATE), (STATE,)], ids=["hybrid", "states"])
def test_a_fill_takes_no_page_that_another_prompt_of_the_same_step_needs(
    groups: Sequence[CacheGroup], num_before: int
) -> None:
    """A burst of prompts that fits into one step without fills fits with them, whatever memory held before."""
    num_filled = 0
    for num_slabs in range(60, 240, 12) if FULL in groups else range(14, 140, 6):
        fitting = []
        for fill_tokens in (None, 8):
            cache = sim(num_slabs, fill_tokens=fill_tokens, groups=groups)
            for number in range(num_before):
                cache.serve(tokens(60, 1000 + number))
            leases = [cache.cache.begin(tokens(100 + number, number)) for number in range(12)]
            fitting.append([cache.extend(lease, lease.num_tokens) is not None for lease in leases])
            cache.cache.check_integrity()
            if fill_tokens:
                steps = [lease.step for lease in leases if lease.step is not None]
                num_filled += any(len(step.kept) > 1 for step in steps)
        assert sum(fitting[1]) >= sum(fitting[0]), num_slabs
    assert num_filled > 3


def test_no_end_goes_for_a_fill_that_was_planned_while_there_was_room() -> None:
    cache = sim(40, fill_tokens=8)
    long = cache.cache.begin(tokens(120, 0))
    num_planned = sum(kind is Kind.FILL for kind in long.wanted.values())
    assert num_planned > 2
    arena, seeds = cache.cache._groups.arena, itertools.count(1)
    while arena.num_free_slabs > 8:
        cache.serve(tokens(5, next(seeds)))
    assert 6 <= arena.num_free_slabs < 6 + num_planned  # four slabs of blocks, one state inside, one at the end
    ends = kept(cache)
    assert cache.compute(long)
    cache.cache.check_integrity()
    assert ends <= kept(cache)
    assert cache.cache.stats.checkpoints_evicted == 0
    assert 0 < len(unused(cache)) < num_planned
    assert max(c.position for c in unused(cache)) == 96  # the last ones: they save the most


def popped(cache: Sim) -> Iterator[Checkpoint]:
    queue, clock = cache.cache._prefixes.queue, cache.cache._prefixes.history.clock
    while (one := queue.pop(clock)) is not None:
        if isinstance(one[0], Checkpoint):
            yield one[0]


@pytest.mark.parametrize("policy", ["lru", "flops", "reuse"])
def test_unused_fills_go_before_all_others(policy: str) -> None:
    cache = sim(200, fill_tokens=8, policy=policy)
    for number in range(6):
        cache.serve(tokens(100, number))
    queue, clock = cache.cache._prefixes.queue, cache.cache._prefixes.history.clock
    num_spare = queue.num_spare
    assert num_spare == len(unused(cache)) > 10
    first = [item for item, _ in queue.first(len(queue), clock)]
    order = list(popped(cache))
    for items in (first, order):
        kinds = [item.kind for item in items if isinstance(item, Checkpoint)]
        assert kinds[:num_spare] == [Kind.FILL] * num_spare
        assert Kind.FILL not in kinds[num_spare:]
        assert len(kinds) > num_spare
    assert queue.num_spare == 0


def test_bare_blocks_go_before_fills() -> None:
    cache = sim(60, fill_tokens=8)
    cache.serve(tokens(100, 0))
    cache.serve(tokens(100, 1))
    num_fills = len(unused(cache))
    assert num_fills > 3
    first = next(c for c in checkpoints(cache) if c.node is not None and c.position == 100)
    node = first.node
    assert node is not None
    for checkpoint in reversed(list(node.checkpoints)):
        cache.cache._reclaimer.evict_checkpoint(checkpoint)
    num_left, num_blocks = len(unused(cache)), cache.cache.stats.blocks_evicted
    assert 0 < num_left < num_fills
    assert cache.cache._reclaimer._evict_spare({}, 1)
    assert cache.cache.stats.blocks_evicted > num_blocks
    assert len(unused(cache)) == num_left
    cache.cache.check_integrity()


@pytest.mark.parametrize("num_slabs", [60, 300])
def test_as_long_as_a_fill_is_left_nothing_else_goes(num_slabs: int) -> None:
    """In the larger arena eight are evicted at a time."""
    cache, num_gone, lost = sim(num_slabs, fill_tokens=8), 0, False
    for number in range(num_slabs // 30):
        cache.serve(tokens(300, 1000 + number))
    assert len(unused(cache)) > 3
    for number in range(2, num_slabs):
        before, fills = kept(cache), len(unused(cache))
        cache.serve(tokens(5, number))
        num_gone += fills > len(unused(cache))
        if before - kept(cache):
            assert not unused(cache)
            lost = True
    assert num_gone > 3
    assert lost


def test_several_fills_are_evicted_at_once_or_as_many_as_there_are() -> None:
    cache = sim(60, fill_tokens=8)
    cache.serve(tokens(100, 0))
    reclaimer, num_fills = cache.cache._reclaimer, len(unused(cache))
    assert num_fills > 3
    assert reclaimer._evict_spare({}, 2)
    assert len(unused(cache)) == num_fills - 2
    assert reclaimer._evict_spare({}, 100)
    assert not unused(cache)
    assert not reclaimer._evict_spare({}, 100)
    cache.cache.check_integrity()


def test_without_fills_several_items_of_value_are_evicted_at_once() -> None:
    """So that most requests of a full cache find room without an eviction."""
    cache, evicted = sim(300), list[int]()
    for number in range(400):
        before = cache.cache.stats.checkpoints_evicted
        cache.serve(tokens(5, number))
        evicted.append(cache.cache.stats.checkpoints_evicted - before)
    some = [count for count in evicted if count]
    assert len(some) > 10
    assert min(some) >= 3


class Recorder:
    """Has a policy rather than being one: where the core is compiled, its classes have no interpreted subclasses."""

    def __init__(self) -> None:
        self.policy = PredictedReuse()
        self.rate, self.value = self.policy.rate, self.policy.value
        self.kept: Counter[Numbers] = Counter()
        self.reused: list[Numbers] = []

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        self.kept[cohort] += count
        self.policy.learn_kept(cohort, count)

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        self.reused.append(cohort)
        self.policy.learn_reused(cohort, age)


def test_a_fill_that_was_used_is_kept_like_others() -> None:
    policy = Recorder()
    cache, prompt = sim(80, fill_tokens=8, policy=policy), tokens(200, 0)
    cache.serve(prompt)
    assert not any(cohort[:2] == (1, Kind.FILL) for cohort in policy.kept)
    (deep, *_) = sorted(unused(cache), key=lambda c: -c.position)
    assert cache.serve([*prompt[: deep.position + 2], *tokens(20, 1)]) == deep.position
    assert deep.num_hits == 1
    assert deep.rating is not None
    assert not deep.rating.is_spare
    assert policy.kept[1, Kind.FILL, 1] == 1
    assert policy.reused == []  # nothing had been learned of it, so nothing counts as its reuse
    assert cache.serve([*prompt[: deep.position + 2], *tokens(20, 2)]) == deep.position
    assert policy.reused == [(1, Kind.FILL, 1)]
    for number in range(3, 60):
        cache.serve(tokens(5, number))
        if not unused(cache):
            break
    assert not unused(cache)
    assert deep.node is not None
    assert cache.cache.match([*prompt[: deep.position + 2], *tokens(20, 4)]).num_tokens == deep.position


def test_a_fill_whose_request_found_no_room_is_not_used() -> None:
    cache, prompt = sim(80, fill_tokens=8), tokens(200, 0)
    cache.serve(prompt)
    (deep, *_) = sorted(unused(cache), key=lambda c: -c.position)
    for _ in range(3):
        lease = cache.cache.begin([*prompt[: deep.position + 2], *tokens(20, 1)])
        assert lease.computed == deep.position
        cache.cache.abort(lease)
        cache.cache.check_integrity()
    assert deep.rating is not None
    assert deep.rating.is_spare


def test_idle_memory_that_appears_later_is_used_again() -> None:
    cache, seeds = sim(80, fill_tokens=8), itertools.count(1)

    def num_filled() -> int:
        before = {*unused(cache)}
        cache.serve(tokens(100, next(seeds)))
        return len({*unused(cache)} - before)

    def exhaust() -> None:
        for _ in range(100):
            cache.serve(tokens(21, next(seeds)))
        assert not unused(cache)
        assert cache.cache._reclaimer.num_spare_checkpoints() == 0
        assert num_filled() == 0

    assert num_filled() > 2
    exhaust()
    cache.cache.reset()
    cache.cache.check_integrity()
    assert num_filled() > 2
    exhaust()
    holder = cache.cache.begin(tokens(1200, 0))
    assert cache.extend(holder, 1200) is not None
    cache.cache.check_integrity()
    assert num_filled() == 0
    cache.cache.abort(holder)
    cache.cache.check_integrity()
    assert num_filled() == 0  # the step in flight still writes to its pages
    cache.cache.commit(holder)
    cache.cache.check_integrity()
    assert num_filled() > 1


def test_new_prompts_take_the_memory_of_older_fills() -> None:
    cache, seeds = sim(100, fill_tokens=8), itertools.count(1)
    while cache.cache._groups.arena.num_free_slabs:
        cache.serve(tokens(60, next(seeds)))
    before, others = {*unused(cache)}, kept(cache)
    assert len(before) >= 16
    cache.serve(tokens(60, next(seeds)))
    assert {*unused(cache)} - before
    assert before - {*unused(cache)}
    assert others <= kept(cache)


def test_unused_fills_are_not_in_the_log_of_evictions() -> None:
    cache = sim(60, fill_tokens=8)
    cache.serve(tokens(300, 0))
    fills, others = len(unused(cache)), kept(cache)
    assert fills > 3
    for number in range(1, 60):
        cache.serve(tokens(5, number))
        if not unused(cache):
            break
        assert len(cache.cache._prefixes.history.log) == 0
    assert cache.cache.stats.checkpoints_evicted >= fills
    assert others <= kept(cache)
    before = len(cache.cache._prefixes.history.log)
    for number in range(100, 130):
        cache.serve(tokens(5, number))
    assert len(cache.cache._prefixes.history.log) > before


def test_fill_at_the_end_of_a_step_evicts_no_end() -> None:
    """Chunk ends on the fill grid: the FILL there makes the next step need a fresh state."""
    kept_by = {}
    for fill in (8, None):
        cache = sim(31, fill_tokens=fill, policy="lru")
        lease = cache.cache.begin(tokens(111, 1000))
        for other in range(15):
            cache.serve(tokens(21, other))
        while lease.computed < lease.num_tokens:
            assert cache.compute(lease, min(64, lease.num_tokens - lease.computed))
        kept_by[fill] = kept(cache)
    assert kept_by[8] >= kept_by[None]


@pytest.mark.parametrize("num_loaded", [8, 11, 12, 13, 15])
def test_fill_at_the_end_of_a_step_is_not_kept_in_what_the_step_loads(num_loaded: int) -> None:
    """A fill at the end, 16, is kept a block before it. Up to where the step loads, it computes no states."""
    cache, prompt = sim(400, fill_tokens=8), tokens(60, 0)
    lease = cache.cache.begin(prompt)
    assert lease.wanted[16] is Kind.FILL
    assert cache.extend(lease, 16, num_loaded=num_loaded) is not None
    assert lease.step is not None
    inside = [kept.position for kept in lease.step.kept]
    assert inside == sorted(set(inside))
    assert (12 in inside) == (num_loaded <= 12), "12 itself ends the load, so a checkpoint is kept there anyway"
    cache.cache.commit(lease)
    cache.cache.check_integrity()
    assert cache.compute(lease)
    cache.cache.release(lease)
    cache.cache.check_integrity()
    assert cache.serve(prompt[:14] + tokens(9, 1)) <= 12


def test_a_used_fill_is_counted_once() -> None:
    policy = Recorder()
    cache, prompt = sim(80, fill_tokens=8, policy=policy), tokens(200, 0)
    cache.serve(prompt)
    (deep, *_) = sorted(unused(cache), key=lambda c: -c.position)
    cache.serve([*prompt[: deep.position + 2], *tokens(20, 1)])
    assert policy.kept[1, Kind.FILL, 1] == 1


def test_a_used_end_is_counted_once() -> None:
    policy = Recorder()
    cache, prompt = sim(80, policy=policy), tokens(200, 0)
    cache.serve(prompt, reply=tokens(12, 3))
    cache.serve([*prompt, *tokens(20, 1)])
    assert policy.kept[1, Kind.END, 1] == 1


def test_a_copy_of_the_counters_stays_as_it_is() -> None:
    cache, prompt = sim(200, fill_tokens=8), tokens(120, 0)
    cache.serve(prompt)
    before = cache.cache.stats.copy()
    kept_by_kind, misses = dict(before.kept_by_kind), dict(before.misses)
    assert kept_by_kind
    cache.serve(prompt + tokens(40, 1))
    assert (dict(before.kept_by_kind), dict(before.misses), dict(before.hit_by_kind)) == (kept_by_kind, misses, {})
    assert cache.cache.stats.hit_by_kind.total() == 1


def test_an_end_where_a_fill_is_kept_is_an_end() -> None:
    policy = Recorder()
    cache, prompt = sim(200, fill_tokens=8, policy=policy), tokens(120, 0)
    long = cache.cache.begin(prompt)
    at = next(p for p, kind in long.wanted.items() if kind is Kind.FILL)
    short = cache.cache.begin(prompt[: at + 2])
    assert short.wanted[at] is Kind.END
    assert cache.compute(long)
    assert cache.compute(short)
    (there,) = [c for c in checkpoints(cache) if c.position == at]
    assert there.rating is not None
    assert not there.rating.is_spare
    assert policy.kept[there.rating.cohort] > 0


def test_a_leader_keeps_a_checkpoint_for_its_follower() -> None:
    cache, prompt = sim(40, fill_tokens=8), tokens(120, 0)
    leader = cache.cache.begin(prompt)
    assert leader.wanted[32] is Kind.FILL
    follower = prompt[:34] + tokens(20, 1)
    match = cache.cache.match(follower)
    assert match.leader is leader
    assert match.leader_tokens == 32
    assert cache.cache.follow(match)
    for seed in range(2, 60):
        cache.serve(tokens(5, seed))
    assert cache.compute(leader)
    assert cache.cache.match(follower).num_tokens == 32


def test_a_leader_keeps_a_checkpoint_for_its_follower_without_fill() -> None:
    cache, prompt = sim(40), tokens(120, 0)
    leader = cache.cache.begin(prompt)
    follower = prompt[:34] + tokens(20, 1)
    assert cache.cache.follow(cache.cache.match(follower))
    for seed in range(2, 60):
        cache.serve(tokens(5, seed))
    assert cache.compute(leader)
    assert cache.cache.match(follower).num_tokens == 32


# --- the price of memory ----------------------------------------------------------------------------------------------


class ByKind:
    """An eviction policy for which the value of an item depends on its kind alone."""

    def __init__(self, parting: float) -> None:
        self.parting = parting

    def rate(self, candidate: Candidate) -> Rating:
        return Rating((candidate.kind,))

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        return self.parting if lane[0] == Kind.PARTING else 1.0

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        """Learns nothing."""

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        """Learns nothing."""


def wants_parting(cache: Sim, seeds: Iterator[int], count: int) -> list[bool]:
    found = []
    for _ in range(count):
        lease = cache.cache.begin(tokens(60, next(seeds)))
        found.append(Kind.PARTING in lease.wanted.values())
        cache.cache.abort(lease)
        cache.cache.check_integrity()
    return found


@pytest.mark.parametrize(("value", "in_idle", "in_full"), [(0.01, 64, 4), (2.0, 64, 64)])
def test_likely_places_of_little_value_are_kept_once_in_sixteen(value: float, in_idle: int, in_full: int) -> None:
    cache, seeds = sim(40, policy=ByKind(value)), itertools.count(1)
    for number in range(3):
        document = tokens(40, 1000 + number)
        cache.serve(document + tokens(13, next(seeds)))
        cache.serve(document + tokens(17, next(seeds)))
    tally = cache.cache._prefixes.history.partings._all
    for _ in range(13):  # a strong habit: it stays likely for as many prompts as follow
        tally.parted(tally._last[-1][0])
    assert cache.cache._reclaimer.num_spare_checkpoints() > 0
    assert sum(wants_parting(cache, seeds, 64)) == in_idle
    while cache.cache._reclaimer.num_spare_checkpoints():
        cache.serve(tokens(5, next(seeds)))
    for _ in range(40):
        cache.serve(tokens(5, next(seeds)))
    holder = cache.cache.begin(tokens(5, next(seeds)))
    assert cache.compute(holder)
    assert cache.cache._reclaimer.num_spare_checkpoints() == 0
    wanted = wants_parting(cache, seeds, 64)
    assert sum(wanted) == in_full
    if in_full == 4:
        assert {number % 16 for number, one in enumerate(wanted) if one} == {wanted.index(True)}
    cache.cache.abort(holder)
    cache.cache.reset()
    cache.serve(tokens(5, next(seeds)))  # runs what frees the slabs
    assert sum(wants_parting(cache, seeds, 64)) == in_idle  # idle memory costs nothing, whatever the price was


def test_a_place_that_is_worth_no_memory_fills_idle_room_of_a_store() -> None:
    cache, seeds = sim(40, fill_tokens=16, policy=ByKind(0.01)), itertools.count(1)
    for number in range(3):
        document = tokens(40, 1000 + number)
        cache.serve(document + tokens(13, next(seeds)))
        cache.serve(document + tokens(17, next(seeds)))
    place = cache.cache._prefixes.history.partings._all.places[0].position(60)
    cache.cache.reset()
    for number in range(100, 140):
        cache.serve(tokens(5, number))
    assert cache.cache._reclaimer.num_spare_checkpoints() == 0
    for store_room, wanted in ((0, False), (1000, True)):
        lease = cache.cache.begin(tokens(60, next(seeds)), store_room=store_room)
        assert Kind.PARTING not in lease.wanted.values()
        assert (lease.wanted.get(place // BLOCK_TOKENS * BLOCK_TOKENS) is Kind.FILL) == wanted
        cache.cache.abort(lease)


def test_evicted_fills_do_not_change_the_price() -> None:
    cache = sim(60, fill_tokens=8, policy=ByKind(0.5))
    cache.serve(tokens(300, 0))
    assert unused(cache)
    for number in range(1, 60):
        cache.serve(tokens(5, number))
        if not unused(cache):
            break
        assert cache.cache._prefixes.queue._price == 0
    for number in range(100, 200):
        cache.serve(tokens(5, number))
    assert cache.cache._prefixes.queue._price == pytest.approx(1.0, rel=0.01)


def test_an_explanation_tells_only_of_prompts_with_the_same_salt() -> None:
    cache, document = sim(400), tokens(40, 1000)
    for number in range(20):
        cache.serve(document + tokens(13, number))
    salted = lookup_key("another tenant")
    for key, is_told in ((PLAIN_KEY, True), (salted, False)):
        match = cache.cache.match(document + tokens(13, 50), key)
        assert bool(cache.cache.explain(match).likely) == is_told


def test_a_follower_does_not_wait_for_a_fill_that_found_no_page() -> None:
    groups = [CacheGroup("full", Role.FULL, 8), CacheGroup("state", Role.STATE, 1, pages_per_state=1)]
    layout = CacheLayout.of(groups, block_tokens=16, num_slabs=6)
    for store_room, num_tokens in ((0, 200), (1000, 200), (1000, 64)):
        policy = PromptEndBranchesGrid(None, fill_tokens=8)
        cache = Cache(layout, checkpoint_policy=policy, run_operations=lambda operations: None)
        leader = cache.begin(range(1, 300), store_room=store_room)
        cache.extend(leader, num_tokens)
        assert leader.step is not None
        assert 64 not in [kept.position for kept in leader.step.kept]
        assert not cache.follow(cache.match([*range(1, 65), *[999] * 40]))
        cache.commit(leader)
        cache.check_integrity()
