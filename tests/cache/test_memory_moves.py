"""Memory goes from any group to any other, and nothing is reused too early."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hybridkv.cache import CacheGroup, CacheLayout, Lease, NoRoom, PromptFacts, Role, StepTables, ZeroSlab, lookup_key
from hybridkv.cache.arena.pages import make_pages
from hybridkv.cache.arena.slabs import Arena
from hybridkv.cache.retention.policy import PromptEndBranchesGrid
from hybridkv.cache.steps import footprint
from hybridkv.sight import Sight
from tests.cache.sim import Sim
from tests.cache.test_named import tokens

GROUPS = {
    "full": CacheGroup("full", Role.FULL, 6),
    "window": CacheGroup("window", Role.LOCAL, 5, sight=Sight(window=1000)),
    "state": CacheGroup("state", Role.STATE, 1),
    "tap": CacheGroup("tap", Role.TAP, 4),
}


def make_sim(num_slabs: int = 20, **options: Any) -> Sim:
    layout = CacheLayout.of(list(GROUPS.values()), block_tokens=4, num_slabs=num_slabs)
    return Sim(layout, checkpoint_policy=PromptEndBranchesGrid(None), **options)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(["full", "window", "state", "taps"], 2)))
def test_memory_goes_from_any_pool_to_any_other(first: str, second: str) -> None:
    """Fill the arena with pages of one pool, leave one page in each slab, then need all of it for another."""
    arena = Arena(11, {"full": 6, "window": 5, "state": 1, "taps": 4})
    one, other = arena.pools[first], arena.pools[second]
    pages = arena.take(one, 10 * one.pages_per_slab, set())
    assert not arena.fits({other: 1})
    kept = pages[:: one.pages_per_slab]  # one page of each slab stays
    arena.give_back(one, make_pages(page for page in pages if page not in set(kept)))
    held = set(kept)

    def moved(_: object, mapping: dict[int, int]) -> None:
        nonlocal held
        held = {mapping.get(page, page) for page in held}

    while arena.compact({}, lambda slab: False, moved):
        batch = arena.take_operations()
        assert batch is not None
        arena.acknowledge(batch.id)
    slabs_left = -(-len(kept) // one.pages_per_slab)
    assert len(one.slabs) == slabs_left
    assert arena.fits({other: (10 - slabs_left) * other.pages_per_slab})
    arena.give_back(one, make_pages(held))
    assert arena.fits({other: 10 * other.pages_per_slab})


def test_pinned_slabs_are_not_emptied_but_counted() -> None:
    arena = Arena(5, {"a": 4, "b": 2})
    a, b = arena.pools["a"], arena.pools["b"]
    pages = arena.take(a, 16, set())
    arena.give_back(a, make_pages(page for page in pages if page % 4))
    asked = []

    def is_pinned(slab: object) -> bool:
        asked.append(slab)
        return True

    assert not arena.compact({b: 2}, is_pinned, lambda slab, moved: None)
    assert len(asked) == 4


class KeepNothing:
    def positions(self, facts: PromptFacts) -> tuple[int, ...]:
        return ()


def scattered(**options: Any) -> tuple[Sim, Lease, Lease, Lease]:
    """Two requests have pages in both slabs of KV, no slab is free, and a third wants a state.

    slab 1: a gone one's, b's, a gone one's, b's     slab 2: the same     slab 3: c's block, 3 free
    """
    groups = [CacheGroup("full", Role.FULL, 4), CacheGroup("state", Role.STATE, 1)]
    layout = CacheLayout.of(groups, block_tokens=4, num_slabs=6)
    sim = Sim(layout, checkpoint_policy=KeepNothing(), **options)
    gone, b, c, d = (sim.cache.begin(tokens(30, seed)) for seed in range(4))
    for _ in range(4):
        assert sim.compute(gone, 4)
        assert sim.compute(b, 4)
    sim.cache.release(gone, keep=False)
    assert sim.compute(c, 4)
    sim.acknowledge_all()
    assert not sim.cache._groups.arena.free_slabs
    return sim, b, c, d


def test_a_running_request_moves_between_steps_but_not_in_one() -> None:
    sim, b, c, d = scattered()
    assert sim.extend(b, 1) is not None
    assert sim.extend(c, 1) is not None
    refused = sim.cache.extend(d, 4)
    assert isinstance(refused, NoRoom)
    assert refused.pinned_slabs > 0
    assert "pinned by steps in flight" in refused.reason
    before = list(b.pages.tables[0] or ())
    sim.cache.commit(b)
    sim.cache.commit(c)
    assert sim.extend(d, 4) is not None
    assert list(b.pages.tables[0] or ()) != before
    sim.cache.commit(d)
    for lease in (b, c):
        assert sim.compute(lease, 1)
        sim.cache.check_integrity()


def test_no_room_says_why() -> None:
    sim = make_sim(num_slabs=6)
    lease = sim.cache.begin(tokens(200))
    refused = sim.cache.extend(lease, 200)
    assert isinstance(refused, NoRoom)
    assert not refused
    assert refused.never
    others = [sim.prompt(tokens(8, seed)) for seed in range(1, 3)]
    refused = sim.cache.extend(lease, 8)
    assert isinstance(refused, NoRoom)
    assert refused.reason == "nothing left to evict: running requests hold the rest"
    assert sim.cache.stats.no_room == 2
    for other in others:
        sim.cache.release(other)
    assert sim.compute(lease, 4)
    sim.cache.check_integrity()


def test_what_can_never_fit_evicts_nothing() -> None:
    sim = make_sim(num_slabs=12)
    sim.serve(tokens(12))
    lease = sim.cache.begin(tokens(400, 1))
    refused = sim.cache.extend(lease, 400)
    assert isinstance(refused, NoRoom)
    assert refused.never
    assert sim.cache.match(tokens(12)).num_tokens == 8


def test_optional_checkpoints_do_not_empty_the_cache() -> None:
    groups = [CacheGroup("full", Role.FULL, 64), CacheGroup("state", Role.STATE, 1)]
    sim = Sim(CacheLayout.of(groups, block_tokens=4, num_slabs=40), checkpoint_policy=PromptEndBranchesGrid(None))
    for seed in range(12):
        sim.serve(tokens(12, seed))  # 24 states
    stats, free = sim.cache.stats, len(sim.cache._groups.arena.free_slabs)
    lease = sim.cache.begin(tokens(400, 99), breakpoints=list(range(4, 400, 4)))
    assert sim.compute(lease)
    assert stats.checkpoints_evicted <= 8
    kept = free + stats.checkpoints_evicted - 3  # two more slabs of blocks, and the state it works with
    assert stats.checkpoints_skipped == 99 - kept
    assert lease.leaf.checkpoints[-1].position == 396


def test_a_state_shared_only_with_its_own_checkpoint_can_still_go_on() -> None:
    groups = [CacheGroup("full", Role.FULL, 8), CacheGroup("state", Role.STATE, 1)]
    sim = Sim(CacheLayout.of(groups, block_tokens=16, num_slabs=3))
    lease = sim.cache.begin(tokens(34))
    assert sim.compute(lease, 32)  # kept there: the one page for states is the checkpoint's too
    assert sim.compute(lease, 1)
    assert sim.compute(lease, 1)
    sim.cache.check_integrity()


def test_moves_are_waited_for_where_the_memory_layer_is_slow() -> None:
    """Without `run_operations` a slab that was emptied is free only when its moves are acknowledged."""
    sim, b, _, d = scattered(at_once=False)
    refused = sim.cache.extend(d, 4)
    assert isinstance(refused, NoRoom)
    assert refused.wait_for_moves
    assert sim.compute(b, 1)  # the moves run before its step, and are acknowledged later
    refused = sim.cache.extend(d, 4)
    assert isinstance(refused, NoRoom)
    assert refused.wait_for_moves
    sim.acknowledge_all()
    assert sim.compute(d, 4)
    sim.cache.check_integrity()


def test_pages_under_an_operation_are_not_reused_until_it_is_acknowledged() -> None:
    arena = Arena(2, {"a": 2})
    pool = arena.pools["a"]
    src, dst = arena.take(pool, 2, set())
    arena.copy(pool, src, dst)
    arena.give_back(pool, make_pages([src, dst]))
    assert not arena.fits({pool: 1})
    batch = arena.take_operations()
    assert batch is not None
    assert not arena.fits({pool: 1})
    arena.acknowledge(batch.id)
    assert arena.fits({pool: 2})
    with pytest.raises(KeyError, match="not waiting"):
        arena.acknowledge(batch.id)


def test_slabs_that_change_pools_are_zeroed() -> None:
    arena = Arena(2, {"a": 2, "b": 4})
    a, b = arena.pools["a"], arena.pools["b"]
    arena.give_back(a, arena.take(a, 2, set()))
    assert arena.take_operations() is None
    arena.give_back(a, arena.take(a, 2, set()))
    assert arena.take_operations() is None
    assert arena.fits({b: 1})
    arena.take(b, 1, set())
    batch = arena.take_operations()
    assert batch is not None
    assert batch.operations == (ZeroSlab("b", 1),)


def test_allocation_fills_the_fullest_slabs_first() -> None:
    arena = Arena(4, {"a": 8})
    pool = arena.pools["a"]
    pages = arena.take(pool, 24, set())
    arena.give_back(pool, pages[1:8])  # one left in the first slab
    arena.give_back(pool, pages[15:16])  # seven in the second
    assert arena.take(pool, 1, set())[0] == pages[15]
    arena.give_back(pool, pages[:1])
    assert 1 in arena.free_slabs


def test_tables_survive_a_round_trip() -> None:
    sim = make_sim()
    lease = sim.cache.begin(tokens(30), lookup_key(taps=["tap"]), breakpoints=[8, 16])
    step = sim.cache.extend(lease, 30)
    assert isinstance(step, StepTables)
    assert [(s.start, s.end) for s in step.segments["state"]] == [(0, 8), (8, 16), (16, 28), (28, 30)]
    assert step.segments["state"][0].src == (0,)
    assert set(step.tables) == {"full", "window", "tap"}
    assert StepTables.decode(step.encode()) == step
    sim.cache.abort(lease)
    sim.cache.commit(lease)
    sim.cache.check_integrity()
    assert not sim.cache.leases


def test_a_memory_layer_that_fails_is_asked_again_before_any_other_step() -> None:
    """The tail of a resumed request must be copied, however often that has failed; its drafts are forgotten."""
    groups = [CacheGroup("full", Role.FULL, 4), CacheGroup("state", Role.STATE, 1)]
    sim = Sim(CacheLayout.of(groups, block_tokens=4, num_slabs=40))
    sim.serve(tokens(10), tokens(4, 1))  # ends inside a block, at 13
    text = tokens(10) + tokens(4, 1)
    lease = sim.cache.begin([*text, 1])
    assert lease.cached_tokens == 13
    pages, working = sim.cache._groups, sim.memory.run

    def broken(operations: object) -> None:
        raise OSError("no memory layer")

    pages._run_operations = broken
    with pytest.raises(OSError, match="no memory layer"):
        sim.cache.extend(lease, 4, drafts=[7, 7])
    assert lease.in_flight
    assert sim.cache.commit(lease, failed=True) == 13
    assert lease.num_tokens == 15
    pages._run_operations = working
    assert sim.compute(lease)  # the simulation would see a tail that was not copied
    sim.cache.check_integrity()
    assert not pages.arena._busy


def test_a_move_that_fails_is_made_up_for_before_the_next_step_of_anyone() -> None:
    sim, b, c, _ = scattered()
    assert sim.compute(b, 1)
    assert sim.compute(c, 1)  # both are inside a block now: their next step needs no room
    late = sim.cache.begin(tokens(2, 50))
    before = list(b.pages.tables[0] or ())
    pages, working = sim.cache._groups, sim.memory.run

    def broken(operations: object) -> None:
        raise OSError("no memory layer")

    pages._run_operations = broken
    with pytest.raises(OSError, match="no memory layer"):
        sim.cache.extend(late, 4, drafts=[7, 7])
    assert not late.in_flight
    assert late.num_tokens == 2
    assert list(b.pages.tables[0] or ()) != before  # in the books it has moved, in memory not yet
    pages._run_operations = working
    for lease, count in ((b, 1), (c, 1), (late, 2)):
        assert sim.compute(lease, count)
    sim.cache.check_integrity()


def test_nothing_is_evicted_for_a_step_that_finds_no_room_anyway() -> None:
    layout = CacheLayout.of([CacheGroup("full", Role.FULL, 4)], block_tokens=4, num_slabs=33)
    sim = Sim(layout)
    running = sim.prompt(tokens(160))
    for seed in range(1, 11):
        sim.serve(tokens(32, seed))
    before = sim.cache.pages_in_use()
    refused = sim.cache.extend(sim.cache.begin(tokens(400, 99)), 400)
    assert isinstance(refused, NoRoom)
    assert not refused.never
    assert sim.cache.pages_in_use() == before
    sim.cache.release(running)
    assert sim.cache.stats.blocks_evicted == 0


def test_blocks_without_tapped_states_do_not_count_as_held() -> None:
    groups = [CacheGroup("full", Role.FULL, 1), CacheGroup("tap0", Role.TAP, 1, pool="taps")]
    sim = Sim(CacheLayout.of(groups, block_tokens=4, num_slabs=25))
    tapped = sim.cache.begin(tokens(4), lookup_key(taps=["tap0"]))
    assert sim.compute(tapped)
    sim.cache.release(tapped, keep=False)
    running = sim.prompt(tokens(4) + tokens(40, 1))  # its first block has a tapped state, the others have none
    counted = footprint.at_least(sim.cache.leases, sim.cache._groups)
    assert {pool.name: pages for pool, pages in counted.items()} == {"full": 11, "taps": 0}
    sim.serve(tokens(44, 2))
    running.append(tokens(20, 3))
    assert sim.compute(running)
    sim.cache.check_integrity()


def test_what_requests_share_is_held_once() -> None:
    layout = CacheLayout.of([CacheGroup("full", Role.FULL, 1)], block_tokens=4, num_slabs=31)
    sim = Sim(layout)
    leases = [sim.prompt(tokens(40) + tokens(8, seed)) for seed in range(1, 6)]  # 10 blocks of all, 2 of each
    sim.serve(tokens(20, 9))  # 5 that may go
    leases[0].append(tokens(36, 10))
    assert sim.compute(leases[0])
    sim.cache.check_integrity()
