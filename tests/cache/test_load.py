"""Steps that begin with tokens whose pages are filled from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.cache import NULL_PAGE, CacheError, CacheGroup, Lease, NoRoom, Role
from tests.cache.sim import Sim
from tests.cache.test_named import FULL, MIXES, STATE, sim, tokens, window

PLAIN = ["full"]
WITH_CHECKPOINTS = sorted(set(MIXES) - set(PLAIN))
PROMPT = tokens(100)
AT = 80
"""Where a load of the prompt ends, unless a case says otherwise."""


def begin(cache: Sim, prompt: list[int] = PROMPT) -> Lease:
    return cache.cache.begin(prompt)


def started(mix: str, before: int) -> Sim:
    """A cache whose memory has the first `before` tokens of the prompt: none, whole blocks, or up to a tail."""
    cache = sim(*MIXES[mix])
    if before:
        cache.serve(PROMPT[:40], PROMPT[40 : before + 1]) if before % 16 else cache.serve(PROMPT[:before])
    return cache


def check_empty(cache: Sim) -> None:
    """Nothing is held when nothing is cached, and no page holds what a failed load has left."""
    cache.cache.reset()
    cache.acknowledge_all()
    cache.cache.check_integrity()
    assert not any(cache.cache.pages_in_use().values()), cache.cache.pages_in_use()


def tainted_tokens(cache: Sim) -> list[tuple[str, int]]:
    """Pages of token groups, anywhere, that a bad load has written to."""
    pools = {group.pool_name for group in cache.layout.token_groups}
    slots = cache.memory.slots.items()
    return [key for key, page in slots if key[0] in pools and any(value.tainted for value in page.values())]


@pytest.fixture(params=sorted(MIXES))
def mix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- loads that come --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [AT, 90, 100], ids=["load alone", "with some", "with all"])
def test_what_was_loaded_is_published_and_resumed_like_anything_computed(mix: str, count: int) -> None:
    cache = sim(*MIXES[mix])
    lease = begin(cache)
    step = cache.extend(lease, count, num_loaded=AT)
    assert step is not None
    assert step.loaded is not None
    assert (step.loaded.start, step.start, step.end) == (0, AT, count)
    assert cache.cache.commit(lease) == count
    assert lease.cached_tokens == AT
    assert cache.cache.stats.loaded_tokens == AT
    cache.cache.check_integrity()
    other = cache.cache.begin(PROMPT[:85] + tokens(20, 9))
    assert other.computed == AT
    assert cache.compute(other)
    if count < 100:
        assert cache.compute(lease)
    cache.cache.release(lease)
    cache.cache.release(other)
    check_empty(cache)


def test_windows_get_pages_only_for_what_is_seen_from_the_end() -> None:
    cache = sim(FULL, window(24))
    lease = begin(cache)
    step = cache.extend(lease, AT, num_loaded=AT)
    assert step is not None
    first = (AT - 23) // 16
    assert list(step.tables["window24"][:first]) == [NULL_PAGE] * first
    assert NULL_PAGE not in step.tables["window24"][first:]
    assert NULL_PAGE not in step.tables["full"]
    cache.cache.commit(lease)
    assert cache.cache.pages_in_use() == {"full": 5, "window24": 5 - first}


def test_a_window_loaded_before_computing_covers_the_end_of_the_load_not_of_the_step() -> None:
    cache = sim(FULL, window(24))
    lease = begin(cache)
    step = cache.extend(lease, 100, num_loaded=AT)
    assert step is not None
    assert [page != NULL_PAGE for page in step.tables["window24"]] == [False, False, False, True, True, True, True]
    cache.cache.commit(lease)
    cache.cache.check_integrity()


def test_the_state_that_is_loaded_is_not_written_again() -> None:
    """It is a checkpoint from then on: the step reads it and writes elsewhere."""
    cache = sim(FULL, STATE)
    lease = begin(cache)
    step = cache.extend(lease, 100, num_loaded=AT)
    assert step is not None
    assert step.loaded is not None
    (segment, *_) = step.segments["state"]
    assert segment.start == AT
    assert segment.src == step.loaded.states["state"]
    assert segment.dst != segment.src
    cache.cache.commit(lease)
    match = cache.cache.match(PROMPT[:85] + tokens(20, 9))
    assert match.num_tokens == AT


def test_a_load_continues_what_is_in_memory(mix: str) -> None:
    cache = sim(*MIXES[mix])
    cache.serve(PROMPT[:48])
    lease = begin(cache)
    assert lease.computed == 48
    step = cache.extend(lease, 100 - 48, num_loaded=AT - 48)
    assert step is not None
    assert step.loaded is not None
    assert (step.loaded.start, step.start) == (48, AT)
    assert cache.cache.commit(lease) == 100
    cache.cache.release(lease)
    check_empty(cache)


def test_a_load_that_begins_at_a_tail_checkpoint(mix: str) -> None:
    """A turn ended inside a block: its copy of that block is loaded over, as a whole."""
    cache = sim(*MIXES[mix])
    cache.serve(PROMPT[:40], PROMPT[40:52])
    lease = begin(cache)
    assert lease.computed == 51
    step = cache.extend(lease, 100 - 51, num_loaded=AT - 51)
    assert step is not None
    assert cache.cache.commit(lease) == 100
    cache.cache.release(lease)
    check_empty(cache)


def test_a_load_may_end_inside_a_block_if_nothing_is_computed_after_it(mix: str) -> None:
    cache = sim(*MIXES[mix])
    lease = begin(cache)
    assert cache.extend(lease, 75, num_loaded=75) is not None
    assert cache.cache.commit(lease) == 75
    cache.cache.check_integrity()
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("before", [0, 48, 51], ids=["from nothing", "from a block", "from a tail"])
@pytest.mark.parametrize(("at", "count"), [(75, 76), (75, 80), (75, 90), (75, 100), (97, 100), (65, 66)])
def test_a_load_may_end_inside_a_block_before_computed_tokens(mix: str, before: int, at: int, count: int) -> None:
    """The step reads the loaded state and leaves it alone; it is no checkpoint."""
    cache = started(mix, before)
    lease = begin(cache)
    step = cache.extend(lease, count - before, num_loaded=at - before)
    assert step is not None
    assert step.loaded is not None
    assert (step.loaded.start, step.start, step.end) == (before, at, count)
    assert step.loaded.states.keys() == {group.name for group in cache.layout.state_groups}
    for name, pages in step.loaded.states.items():
        assert step.segments[name][0].src == pages
        assert pages not in [segment.dst for segment in step.segments[name]]
    cache.cache.check_integrity()
    assert cache.cache.commit(lease) == count
    assert lease.cached_tokens == at
    cache.cache.check_integrity()
    assert count == 100 or cache.compute(lease)
    cache.cache.release(lease)
    assert cache.cache.match([*PROMPT, 1]).num_tokens == 100
    check_empty(cache)


@pytest.mark.parametrize("num_accepted", [74, 75, 79, 80, 96, 99])
@pytest.mark.parametrize("before", [0, 51])
def test_a_step_that_is_cut_after_its_load_stands_at_the_end_of_the_load_or_after_it(
    mix: str, before: int, num_accepted: int
) -> None:
    cache = started(mix, before)
    lease = begin(cache)
    num_good = min(num_accepted, 75) - before
    assert cache.extend(lease, 100 - before, num_loaded=75 - before, num_good=num_good) is not None
    stands_at = cache.cache.commit(lease, num_accepted - before)
    cache.cache.check_integrity()
    if num_accepted < 75:
        assert stands_at == (64 if mix == "full" else before)
    elif cache.layout.state_groups:
        assert stands_at == (96 if num_accepted >= 96 else 75), (
            "states: the end of the load, or the prompt's checkpoint"
        )
    else:
        assert stands_at == num_accepted
    assert not cache.reachable_taint()
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_load_inside_a_block_that_fails_leaves_nothing(mix: str, aborts: bool) -> None:
    cache = started(mix, 51)
    lease = begin(cache)
    assert cache.extend(lease, 100 - 51, num_loaded=75 - 51, num_good=0) is not None
    if aborts:
        cache.cache.abort(lease)
    assert cache.cache.commit(lease, failed=True) == (0 if aborts else 51)
    cache.cache.check_integrity()
    cache.acknowledge_all()
    assert not tainted_tokens(cache)
    assert aborts or cache.compute(lease)
    cache.cache.release(lease) if not aborts else None
    check_empty(cache)


def test_a_full_arena_gives_the_loaded_state_its_page_before_it_keeps_checkpoints() -> None:
    """Two states fit beside the KV: the loaded one and the last one. The two breakpoints between them are skipped."""
    cache = sim(FULL, STATE, num_slabs=4)
    lease = cache.cache.begin(PROMPT, breakpoints=[80, 96])
    step = cache.extend(lease, 100, num_loaded=75)
    assert step is not None
    assert [(segment.start, segment.end) for segment in step.segments["state"]] == [(75, 100)]
    assert cache.cache.commit(lease) == 100
    cache.cache.check_integrity()
    cache.cache.release(lease)
    check_empty(cache)


def test_more_than_the_step_cannot_be_loaded() -> None:
    cache = sim(FULL, STATE)
    lease = begin(cache)
    with pytest.raises(CacheError, match="not more"):
        cache.cache.extend(lease, 50, num_loaded=64)
    assert cache.compute(lease)


def test_drafts_cannot_be_loaded() -> None:
    cache = sim(FULL)
    other = begin(cache)
    with pytest.raises(CacheError, match="no drafts"):
        cache.cache.extend(other, AT, num_loaded=AT, drafts=[1])


# --- loads that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [AT, 100], ids=["load alone", "with all"])
@pytest.mark.parametrize("before", [0, 48, 51], ids=["from nothing", "from a block", "from a tail"])
def test_a_load_that_fails_goes_back_and_leaves_clean_pages(mix: str, before: int, count: int) -> None:
    cache = started(mix, before)
    lease = begin(cache)
    assert lease.computed == before
    assert cache.extend(lease, count - before, num_loaded=AT - before, num_good=0) is not None
    assert cache.cache.commit(lease, failed=True, sampled=[1]) == before
    assert lease.num_tokens == 100
    cache.cache.check_integrity()
    cache.acknowledge_all()
    assert not tainted_tokens(cache), "whoever gets the page next finds what the load has left"
    assert not cache.reachable_taint()
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("num_good", [0, 5, 16, 40, 79])
def test_a_load_that_was_cut_keeps_whole_blocks_where_every_block_can_be_resumed(num_good: int) -> None:
    cache = sim(FULL)
    lease = begin(cache)
    assert cache.extend(lease, 100, num_loaded=AT, num_good=num_good) is not None
    kept = num_good // 16 * 16
    assert cache.cache.commit(lease, num_good) == kept
    assert cache.cache.stats.loaded_tokens == kept
    cache.cache.check_integrity()
    cache.acknowledge_all()
    assert not tainted_tokens(cache)
    assert cache.cache.match(PROMPT).num_tokens == kept
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("name", WITH_CHECKPOINTS)
def test_a_load_that_was_cut_keeps_nothing_where_windows_and_states_are_those_of_its_end(name: str) -> None:
    cache = sim(*MIXES[name])
    lease = begin(cache)
    assert cache.extend(lease, 100, num_loaded=AT, num_good=64) is not None
    assert cache.cache.commit(lease, 64) == 0
    cache.cache.check_integrity()
    assert cache.cache.match(PROMPT).num_tokens == 0
    assert not cache.reachable_taint()
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


def test_a_step_that_fails_after_a_good_load_goes_back_too(mix: str) -> None:
    cache = sim(*MIXES[mix])
    lease = begin(cache)
    assert cache.extend(lease, 100, num_loaded=AT) is not None
    assert cache.cache.commit(lease, failed=True) == 0
    cache.cache.check_integrity()
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("before", [0, 48, 51], ids=["from nothing", "from a block", "from a tail"])
def test_a_load_that_ends_after_its_step_is_kept_and_what_was_computed_from_its_pages_is_not(
    mix: str, before: int
) -> None:
    """The step has read pages that were not filled yet. Nothing it wrote is left anywhere."""
    cache = sim(*MIXES[mix])
    if before:
        cache.serve(PROMPT[:40], PROMPT[40:52]) if before == 51 else cache.serve(PROMPT[:48])
    lease = begin(cache)
    step = cache.extend(lease, 100 - before, num_loaded=AT - before, num_good=0)
    assert step is not None
    cache.load(lease, step)
    assert cache.cache.commit(lease, AT - before) == AT
    assert lease.cached_tokens == AT
    cache.cache.check_integrity()
    cache.acknowledge_all()
    assert not tainted_tokens(cache)
    assert not cache.reachable_taint()
    assert cache.cache.match(PROMPT).num_tokens == AT
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


def test_checkpoints_that_lay_inside_a_failed_load_are_wanted_again() -> None:
    cache = sim(FULL, STATE)
    lease = cache.cache.begin(PROMPT, breakpoints=[32, 64])
    assert cache.extend(lease, 100, num_loaded=AT, num_good=0) is not None
    cache.cache.commit(lease, failed=True)
    assert lease.plan.ahead[:2] == [32, 64]
    assert cache.compute(lease)
    assert cache.cache.match(PROMPT[:40] + tokens(20, 9)).num_tokens == 32


# --- ends and no room -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "bad"])
def test_an_abort_in_the_middle_of_a_load_keeps_its_pages_until_it_is_committed(mix: str, is_good: bool) -> None:
    cache = sim(*MIXES[mix])
    lease = begin(cache)
    assert cache.extend(lease, 100, num_loaded=AT, num_good=None if is_good else 0) is not None
    held = cache.cache.pages_in_use()
    cache.cache.abort(lease)
    assert cache.cache.pages_in_use() == held
    cache.cache.check_integrity()
    assert cache.cache.match(PROMPT).leader is None
    assert cache.cache.commit(lease, failed=not is_good) == 0
    assert lease.released
    cache.acknowledge_all()
    assert not tainted_tokens(cache)
    check_empty(cache)


@pytest.mark.parametrize("name", [name for name, groups in MIXES.items() if any(g.role is Role.FULL for g in groups)])
def test_without_room_a_load_leaves_nothing_behind(name: str) -> None:
    cache = sim(*MIXES[name], num_slabs=4 + 3 * len(MIXES[name]))
    blocker = cache.cache.begin(tokens(4000, 7))
    while cache.extend(blocker, 16) is not None:
        cache.cache.commit(blocker)
    lease = cache.cache.begin(tokens(900, 8))
    before = (cache.cache.pages_in_use(), dict(lease.wanted), list(lease.plan.ahead), lease.computed)
    refused = cache.cache.extend(lease, 900, num_loaded=800)
    assert isinstance(refused, NoRoom)
    assert not lease.in_flight
    assert (dict(lease.wanted), list(lease.plan.ahead), lease.computed) == before[1:]
    cache.cache.check_integrity()
    cache.cache.release(lease, keep=False)
    cache.cache.abort(blocker)
    check_empty(cache)


def test_without_a_page_for_the_loaded_state_there_is_no_room_to_compute_after_it_but_to_load() -> None:
    """One state fits beside the KV: loaded and computed need two."""
    state = CacheGroup("state", Role.STATE, 1)
    cache = sim(FULL, state, num_slabs=3)
    lease = begin(cache)
    assert isinstance(cache.cache.extend(lease, 100, num_loaded=AT), NoRoom)
    assert AT not in lease.plan.ahead
    assert AT not in lease.wanted
    assert cache.extend(lease, AT, num_loaded=AT) is not None
    assert cache.cache.commit(lease) == AT
    cache.cache.check_integrity()


def test_others_wait_for_a_load_that_ends_where_they_part(mix: str) -> None:
    cache = sim(*MIXES[mix])
    lease = begin(cache)
    assert cache.extend(lease, AT, num_loaded=AT) is not None
    match = cache.cache.match(PROMPT[:85] + tokens(20, 9))
    assert match.leader is lease
    assert match.leader_tokens == AT
    assert cache.cache.follow(match)
    cache.cache.commit(lease)
    assert cache.cache.begin(PROMPT[:85] + tokens(20, 9)).computed == AT


@pytest.mark.parametrize("name", WITH_CHECKPOINTS)
def test_nobody_waits_for_a_load_that_ends_behind_where_they_part(name: str) -> None:
    """It leaves a checkpoint at its end, and none before."""
    cache = sim(*MIXES[name])
    lease = begin(cache)
    assert cache.extend(lease, AT, num_loaded=AT) is not None
    match = cache.cache.match(PROMPT[:50] + tokens(20, 9))
    assert not cache.cache.follow(match)


def test_pages_of_a_load_do_not_move_while_it_is_under_way() -> None:
    """Compaction in a full arena leaves them alone."""
    cache = sim(FULL, STATE, num_slabs=12)
    others = [cache.prompt(tokens(40, seed)) for seed in range(1, 4)]
    lease = begin(cache)
    step = cache.extend(lease, AT, num_loaded=AT)
    assert step is not None
    where: Any = (list(step.tables["full"]), step.loaded and step.loaded.states)
    for other in others:
        cache.cache.release(other)
    big = cache.cache.begin(tokens(4000, 9))
    while cache.extend(big, 16) is not None:
        cache.cache.commit(big)
    assert list(lease.named_tables["full"][:5]) == where[0]
    assert where[1] is not None
    assert tuple(lease.pages.states[0].pages) == where[1]["state"]  # type: ignore[union-attr]
    cache.cache.check_integrity()
