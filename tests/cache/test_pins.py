"""Pins: pages that neither leave nor move while a transfer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hybridkv.cache import (
    NULL_PAGE,
    Cache,
    CacheError,
    CacheGroup,
    CacheLayout,
    Kind,
    Lease,
    NoRoom,
    Operation,
    Pin,
    PinState,
    PromptFacts,
    Role,
)
from hybridkv.cache.tokens import lookup_key, pack_tokens
from tests.cache.sim import Sim
from tests.cache.test_named import FULL, MIXES, STATE, sim, tokens, window

TAP = CacheGroup("tap3", Role.TAP, 4, pool="taps")


class KeepNothing:
    def positions(self, facts: PromptFacts) -> tuple[tuple[int, Kind], ...]:
        return ()


def make(num_slabs: int, **options: Any) -> Sim:
    """Blocks of 4 tokens, 4 of them in a slab; a state fills one."""
    groups = [CacheGroup("full", Role.FULL, 4), STATE]
    layout = CacheLayout.of(groups, block_tokens=4, num_slabs=num_slabs)
    return Sim(layout, checkpoint_policy=KeepNothing(), **options)


def interleaved(cache: Sim, num_blocks: int) -> list[Lease]:
    """Four requests whose blocks lie side by side, one of each in a slab. The first ends, and can be pinned."""
    leases = [cache.cache.begin(tokens(4 * num_blocks + 1, seed)) for seed in range(4)]
    for _ in range(num_blocks):
        for lease in leases:
            assert cache.compute(lease, 4)
    cache.cache.release(leases[0])
    cache.acknowledge_all()
    return leases[1:]


def slabs_of(pin: Pin) -> set[int]:
    """Of its KV."""
    return {page // 4 for page in pin.pages.tables["full"]}


def test_nothing_pinned_is_evicted_until_its_time() -> None:
    now = [0.0]
    cache = sim(FULL, STATE, window(24), num_slabs=30, clock=lambda: now[0], policy="lru")
    cache.serve(tokens(100))
    pin = cache.cache.pin(tokens(96), 10)
    assert (pin.num_tokens, pin.state) == (96, PinState.READY)
    for seed in range(1, 20):
        cache.serve(tokens(150, seed))
        cache.check_pinned(pin)
    assert cache.serve(tokens(100)) == 96
    now[0] = 11
    for seed in range(20, 40):
        cache.serve(tokens(150, seed))
    assert (pin.state, cache.cache.pins, cache.cache.stats.pins_expired) == (PinState.EXPIRED, (), 1)
    assert cache.serve(tokens(100)) == 0


def test_expired_pins_make_room() -> None:
    now = [0.0]
    cache = sim(FULL, STATE, num_slabs=4, clock=lambda: now[0])
    cache.serve(tokens(33))
    cache.cache.pin(tokens(33), 5)
    lease = cache.cache.begin(tokens(120, 1))
    assert cache.extend(lease, 100) is None
    now[0] = 6
    assert cache.extend(lease, 100) is not None


def test_a_fork_finds_the_room_of_an_expired_pin() -> None:
    now = [0.0]
    cache = Sim(CacheLayout.of([CacheGroup("full", Role.FULL, 1)], block_tokens=4, num_slabs=4), clock=lambda: now[0])
    cache.serve(tokens(8))
    cache.cache.pin(tokens(8), 5)
    lease = cache.prompt(tokens(2, 1))
    assert isinstance(cache.cache.fork(lease, 1), NoRoom)
    now[0] = 5
    assert isinstance(cache.cache.fork(lease, 1), list)


def test_each_pin_ends_at_its_own_time() -> None:
    now = [0.0]
    cache = sim(FULL, STATE, clock=lambda: now[0])
    cache.serve(tokens(100))
    long, short = (cache.cache.pin(tokens(100), ttl) for ttl in (9, 5))
    now[0] = 5
    assert cache.cache.pins == (long,)
    assert short.state is PinState.EXPIRED
    now[0] = 9
    assert not cache.cache.pins


def test_a_pin_that_is_renewed_lasts_from_then_on() -> None:
    now = [0.0]
    cache = sim(FULL, STATE, clock=lambda: now[0])
    cache.serve(tokens(100))
    pin = cache.cache.pin(tokens(100), 5)
    now[0] = 4
    cache.cache.renew(pin, 5)
    now[0] = 8.9
    assert cache.cache.pins == (pin,)
    cache.cache.renew(pin, 0.5)
    now[0] = 9.5
    assert not cache.cache.pins
    with pytest.raises(CacheError, match="cannot renew a pin that is expired: pin the prefix again"):
        cache.cache.renew(pin, 5)


@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize("limit", [None, 96, 95, 17, 0])
def test_the_pages_of_a_pin_are_all_that_a_consumer_needs(name: str, limit: int | None) -> None:
    cache = sim(*MIXES[name], TAP)
    text = tokens(130)
    cache.serve(text[:100], text[100:], key=lookup_key(taps=["tap3"]), breakpoints=[16, 80])
    for taps in ([], ["tap3"]):
        pin = cache.cache.pin(text, 60, lookup_key(taps=taps), limit=limit)
        expected = cache.brute_force_resume(pack_tokens([*text[:limit], 0]), lookup_key("").root, taps)
        assert pin.num_tokens == expected
        assert limit is not None or pin.num_tokens == 129
        assert ("tap3" in pin.pages.tables) == bool(taps)
        cache.check_pinned(pin)
        cache.cache.check_integrity()


def test_a_window_pins_only_the_blocks_seen_from_the_end() -> None:
    cache = sim(FULL, window(24))
    cache.serve(tokens(200))
    pages = cache.cache.pin(tokens(192), 60).pages
    assert NULL_PAGE not in pages.tables["full"]
    assert [page != NULL_PAGE for page in pages.tables["window24"]] == [False] * 10 + [True] * 2


def test_nothing_known_is_an_empty_pin() -> None:
    cache = sim(FULL, STATE)
    pin = cache.cache.pin(tokens(100), 60)
    assert (pin.num_tokens, list(pin.pages.tables["full"]), pin.pages.states) == (0, [], {"state": (NULL_PAGE,)})
    assert cache.cache.pinned_slabs() == 0
    cache.cache.unpin(pin)
    cache.cache.check_integrity()


@pytest.mark.parametrize(("ttl", "limit", "why"), [
    (0, None, "a pin cannot last 0 s: give it more than 0"),
    (float("nan"), None, "a pin cannot last nan s"),
    (1, -1, "cannot pin the first -1 tokens"),
])  # fmt: skip
def test_pins_that_make_no_sense_are_refused(ttl: float, limit: int | None, why: str) -> None:
    cache = sim(FULL)
    with pytest.raises(CacheError, match=why):
        cache.cache.pin(tokens(100), ttl, limit=limit)
    assert not cache.cache.leases


def test_a_pinned_prefix_leads_nobody() -> None:
    cache = sim(FULL, STATE)
    cache.serve(tokens(100))
    cache.cache.pin(tokens(200), 100)
    assert cache.cache.match(tokens(200)).leader is None


# --- places ---------------------------------------------------------------------------------------------------------


def blocked(**options: Any) -> tuple[Sim, Pin, Lease]:
    """Two requests have a page in each of four slabs of KV, a pin is on one of them, and no slab is free.

    There was nowhere to pack the pinned pages. The second lease would need a state: a slab of its own.
    """
    cache = make(num_slabs=9, **options)
    _, *gone = interleaved(cache, 4)
    reader = cache.cache.begin(tokens(17))
    assert reader.cached_tokens == 16
    pin = cache.cache.pin(tokens(17), 60)
    for lease in gone:
        cache.cache.release(lease, keep=False)
    for seed in (20, 21):
        cache.prompt(tokens(1, seed))
    cache.acknowledge_all()
    assert not cache.cache._groups.arena.free_slabs
    assert len(slabs_of(pin)) == 4
    return cache, pin, cache.cache.begin(tokens(9, 9))


def test_compaction_leaves_pinned_pages_where_they_are() -> None:
    cache, pin, lease = blocked()
    reader = next(one for one in cache.cache.leases if one.cached_tokens)
    before = pin.pages.tables["full"]
    assert cache.extend(lease, 1) is None
    assert reader.pages.tables[0] == before
    cache.check_pinned(pin)
    cache.cache.check_integrity()
    cache.cache.unpin(pin)
    assert cache.extend(lease, 1) is not None
    assert reader.pages.tables[0] != before


def test_no_room_counts_the_slabs_that_transfers_pin() -> None:
    cache, pin, lease = blocked()
    refused = cache.cache.extend(lease, 1)
    assert isinstance(refused, NoRoom)
    assert (refused.pinned_slabs, refused.transfer_slabs) == (5, 5)  # four of KV, and the slab of the state
    assert refused.reason == "5 slabs are pinned by transfers: let one finish"
    assert cache.cache.pinned_slabs() == 5
    running = next(one for one in cache.cache.leases if one.computed == 1)
    running.append([1])
    assert cache.extend(running, 1) is not None
    refused = cache.cache.extend(lease, 1)
    assert isinstance(refused, NoRoom)
    assert (refused.pinned_slabs, refused.transfer_slabs) == (5, 5)  # its step is in slabs that are pinned already
    cache.cache.unpin(pin)
    assert cache.cache.pinned_slabs() == 0


def test_a_pin_outlives_a_reset() -> None:
    cache = sim(FULL, STATE, window(24))
    cache.serve(tokens(100), tokens(9, 1))
    text = tokens(100) + tokens(9, 1)
    pin = cache.cache.pin(text, 60)
    assert pin.num_tokens == 108
    cache.cache.reset()
    assert cache.cache.match(text).num_tokens == 0
    cache.serve(text)
    assert pin.state is PinState.READY
    cache.check_pinned(pin)
    cache.cache.renew(pin, 60)
    cache.cache.reset()
    assert set(cache.cache.pages_in_use().values()) != {0}
    cache.cache.unpin(pin)
    cache.cache.check_integrity()
    assert set(cache.cache.pages_in_use().values()) == {0}


@pytest.mark.parametrize("what", ["block", "tail", "state", "window", "derived"])
def test_a_pin_breaks_when_its_pages_turn_out_invalid(what: str) -> None:
    cache = sim(FULL, STATE, window(24))
    text = tokens(110)
    cache.serve(text[:100], text[100:], breakpoints=[32])
    pin, other = cache.cache.pin(text, 60), cache.cache.pin(text[:40], 60)
    (tables, states), before = pin.pages, other.pages
    bad = {
        "block": {"full": [tables["full"][4]]},
        "tail": {"full": [tables["full"][-1]]},
        "state": {"state": list(states["state"])},
        "window": {"window24": [tables["window24"][5]]},
        "derived": {"window24": [other.pages.tables["window24"][1]]},  # not seen from its end, but from before
    }[what]
    assert cache.cache.invalidate(bad) == {}
    assert (pin.state, cache.cache.stats.pins_broken) == (PinState.BROKEN, 2 if what == "derived" else 1)
    with pytest.raises(CacheError, match="the pin is broken: pin the prefix again"):
        _ = pin.pages
    with pytest.raises(CacheError, match="cannot renew a pin that is broken"):
        cache.cache.renew(pin, 5)
    cache.cache.unpin(pin)
    assert pin.state is PinState.BROKEN
    if what != "derived":
        assert (other.num_tokens, other.pages) == (32, before)
        cache.check_pinned(other)
    cache.cache.check_integrity()
    assert cache.cache.match(text).leader is None
    assert cache.cache.pin(text, 60).num_tokens < 109


def test_a_pin_is_ready_when_the_operations_before_it_are_acknowledged() -> None:
    cache = make(num_slabs=40, at_once=False)
    interleaved(cache, 8)
    pin = cache.cache.pin(tokens(33), 60)
    early = cache.cache.take_operations()
    assert early is not None
    late = cache.cache.pin(tokens(33), 60)  # packs nothing, but its pages have their content only then, too
    assert cache.cache.take_operations() is None
    for one in (pin, late):
        assert one.state is PinState.WAITING
        with pytest.raises(CacheError, match="the pin is waiting: run and acknowledge"):
            _ = one.pages
    cache.memory.run(early.operations)
    cache.cache.acknowledge(early.id)
    for one in (pin, late):
        assert one.state is PinState.READY
        cache.check_pinned(one)
    cache.cache.fork(cache.prompt(tokens(6, 7)), 1)  # operations of others do not concern it
    assert pin.state is PinState.READY
    assert len(slabs_of(pin)) == 2


def test_a_pin_waits_for_every_operation_before_it_in_whatever_order() -> None:
    cache = make(num_slabs=40, at_once=False)
    interleaved(cache, 8)
    cache.cache.fork(cache.prompt(tokens(6, 7)), 1)
    cache.run_operations()
    pin = cache.cache.pin(tokens(33), 60)
    cache.run_operations()
    states = [pin.state]
    for batch in reversed(cache.unacknowledged):
        cache.cache.acknowledge(batch)
        states.append(pin.state)
    assert states == [PinState.WAITING, PinState.WAITING, PinState.READY]


def test_a_memory_that_fails_leaves_no_pin() -> None:
    cache = make(num_slabs=40)
    fails = [False]

    def run(operations: Sequence[Operation]) -> None:
        if fails[0]:
            raise RuntimeError("no memory")
        cache.memory.run(operations)

    cache.cache = Cache(cache.layout, checkpoint_policy=KeepNothing(), run_operations=run)
    others = interleaved(cache, 8)
    fails[0] = True
    with pytest.raises(RuntimeError, match="no memory"):
        cache.cache.pin(tokens(33), 60)
    assert not cache.cache.pins
    assert cache.cache.pinned_slabs() == 0
    cache.cache.check_integrity()
    fails[0] = False
    pin = cache.cache.pin(tokens(33), 60)
    cache.check_pinned(pin)
    for lease in others:
        assert cache.compute(lease)


# --- packing --------------------------------------------------------------------------------------------------------


def test_pages_of_a_step_in_flight_are_pinned_where_they_are() -> None:
    """Of 8 blocks in 8 slabs, a step reads the first 4: they stay, and the others come together."""
    cache = make(num_slabs=40)
    others = interleaved(cache, 8)
    cache.serve(tokens(16))
    lease = cache.cache.begin(tokens(16) + tokens(9, 9))
    step = cache.extend(lease, 4)
    assert step is not None
    assert step.start == 16
    pin = cache.cache.pin(tokens(33), 60)
    assert pin.pages.tables["full"][:4] == step.tables["full"][:4]
    assert len(slabs_of(pin)) == 5
    cache.cache.commit(lease)
    cache.check_pinned(pin)
    cache.cache.check_integrity()
    for one in (lease, *others):
        assert cache.compute(one)


def test_a_state_that_a_step_in_flight_reads_is_pinned_where_it_is() -> None:
    """The second of two states of 3 pages, 4 of which are a slab, is in two slabs."""
    layout = CacheLayout.of([CacheGroup("state", Role.STATE, 4, pages_per_state=3)], block_tokens=4, num_slabs=20)
    cache = Sim(layout, checkpoint_policy=KeepNothing())
    for seed in range(2):
        cache.serve(tokens(8, seed))
    lease = cache.cache.begin(tokens(9, 1))
    step = cache.extend(lease, 1)
    assert step is not None
    pin = cache.cache.pin(tokens(8, 1), 60)
    assert pin.pages.states["state"] == step.segments["state"][0].src
    assert cache.cache.pinned_slabs() == 2
    cache.cache.commit(lease)
    cache.cache.unpin(pin)
    pin = cache.cache.pin(tokens(8, 1), 60)
    assert cache.cache.pinned_slabs() == 1
    cache.check_pinned(pin)


def test_a_second_pin_moves_nothing_of_the_first() -> None:
    cache, pin, _ = blocked()
    before = pin.pages
    for lease in cache.cache.leases:
        if not lease.is_pin:
            cache.cache.release(lease, keep=False)
    assert cache.cache.pin(tokens(17), 60).pages == before
    cache.cache.check_integrity()
    cache.check_pinned(pin)


def test_pages_that_are_together_are_not_moved() -> None:
    cache = make(num_slabs=40)
    cache.serve(tokens(33))
    pin = cache.cache.pin(tokens(33), 60)
    assert (pin.num_tokens, len(slabs_of(pin)), cache.cache.stats.pages_moved) == (33, 3, 0)


def test_holes_among_the_pages_of_others_are_filled_where_no_slab_is_free() -> None:
    """One page in each of four slabs, and two holes beside each: two slabs will do."""
    cache, pin, _ = blocked()
    cache.cache.unpin(pin)
    pin = cache.cache.pin(tokens(17), 60)
    assert len(slabs_of(pin)) == 2
    cache.check_pinned(pin)
    cache.cache.check_integrity()


def test_two_pins_of_one_prefix_share_its_slabs() -> None:
    cache = make(num_slabs=40)
    interleaved(cache, 8)
    first = cache.cache.pin(tokens(33), 60)
    moved, pages = cache.cache.stats.pages_moved, first.pages
    second = cache.cache.pin(tokens(33), 60)
    assert (second.pages, cache.cache.stats.pages_moved, cache.cache.pinned_slabs()) == (pages, moved, 3)
    cache.cache.unpin(first)
    assert (second.pages, cache.cache.pinned_slabs()) == (pages, 3)
    cache.check_pinned(second)


def test_a_pin_is_packed_into_few_slabs_first() -> None:
    cache = make(num_slabs=40)
    others = interleaved(cache, 8)
    pin = cache.cache.pin(tokens(33), 60)
    assert pin.num_tokens == 32
    assert len(slabs_of(pin)) == 2
    pages = pin.pages.tables["full"]
    assert list(pages) == sorted(pages)  # few and long runs to read
    assert cache.cache.pinned_slabs() == 3  # and the slab of its state
    assert cache.cache.stats.pages_moved == 8
    cache.check_pinned(pin)
    cache.cache.check_integrity()
    for lease in others:
        assert cache.compute(lease)
    cache.cache.check_integrity()
