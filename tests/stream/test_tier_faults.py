"""Tiers of which one fails: a copy that is whole is as good as any, and what is bad moves neither up nor down.

Each tier is guarded, as `open_store` makes them. Every logit that counts is compared with the stock model's; rows that
fail have filled their pages with NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridkv.store import Guarded, MemoryStore, Tier, TieredStore, WritePolicy
from hybridkv.store.blob_store import BlobStore
from tests.engine.drive import GREEDY, check_greedy
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.store.faulty import Fault, Kind
from tests.store.test_guard import Clock
from tests.stream.drive import StreamDriver, filled, model_of, plain_store
from tests.stream.faults import GarbageStore, check_same, contents, copy_of
from tests.stream.test_faults import CASES, MODES, RESUME, ROWS, SHARED, STORED, make_fault, reference, serve

FAMILIES = ["llama", "gemma3", "falcon_h1"]
"""Full attention, windows, and states beside attention."""
BRIEF = replace(GREEDY, max_tokens=2)
WARM = prompt(40, 7)
WRITING = [Kind.FAIL_CREATE, Kind.FAIL_WRITE, Kind.FAIL_COMMIT, Kind.LOST]


class Pair:
    """Two tiers that fail on demand, and an engine on them."""

    def __init__(
        self,
        family: str,
        mode: str,
        above: BlobStore,
        below: BlobStore,
        write: WritePolicy = WritePolicy.THROUGH,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.above, self.below = GarbageStore(above), GarbageStore(below)
        guards = [Guarded(self.above, "above", self.clock), Guarded(self.below, "below", self.clock)]
        self.store = TieredStore([Tier(guards[0], write), Tier(guards[1])])
        self.driver = StreamDriver(model_of(family), self.store, mode, streamer_options=options)

    def ask(self, name: str, tokens: Sequence[int]) -> int:
        self.driver.add(name, tokens, BRIEF)
        self.driver.run()
        check_greedy(self.driver, name)
        assert all(one.error is None for one in self.driver.results[name].completions)
        return self.driver.results[name].cached_tokens

    def settle(self) -> None:
        """All that is on its way to or between tiers has come."""
        self.driver.settle()
        self.store.drain()

    def recover(self) -> None:
        for tier in (self.above, self.below):
            for fault in tier.faults:
                fault.release.set()
            tier.faults.clear()
        self.settle()
        self.clock.now += 1000

    def check(self, clean: BlobStore) -> None:
        """Both tiers hold nothing that an engine without faults would not have left, and no drafts."""
        self.settle()
        for tier in (self.above.store, self.below.store):
            check_same(tier, clean)
            assert tier.stats.nbytes == sum(one.nbytes for one in tier.objects())

    def check_counters(self, reason: str) -> None:
        stats, stored = self.driver.stats, self.store.stats
        assert stats.found == sum(stats.loads.values()) + sum(stats.failures.values())
        assert (stored.corrupt > 0) == (reason == "corrupt")
        assert (stored.faults > 0) == (reason == "fault")
        assert stats.dumps_failed == 0 or reason == "fault"


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [*CASES, "lookup_raises"])
def test_a_fault_above_is_made_good_from_below(case: str, family: str, mode: str, where: str) -> None:
    kind, reason = CASES.get(case, (Kind.FAIL_LOOKUP, "fault"))
    is_slow = kind is Kind.SLOW
    stored = filled(family, STORED)
    pair = Pair(family, mode, copy_of(stored), copy_of(stored), load_timeout_s=0.25 if is_slow else 20.0)
    fault = Fault(kind) if case == "lookup_raises" else make_fault(pair.driver, kind, where)
    serve(pair.driver, 2, fail=lambda: pair.above.faults.append(fault))
    assert fault.struck
    assert set(pair.driver.stats.failures) == ({"timeout"} if is_slow else set())
    assert is_slow or pair.driver.results["request 0"].cached_tokens == RESUME
    pair.check_counters(reason)
    assert pair.driver.stats.dumps_failed == 0
    pair.recover()
    pair.ask("further", SHARED + prompt(9, 30))
    pair.check(reference(family, 2))
    pair.driver.close()


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_some_above", [False, True], ids=["empty_above", "some_above"])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_below_costs_time_and_moves_nothing_up(
    case: str, has_some_above: bool, family: str, mode: str, where: str
) -> None:
    kind, reason = CASES[case]
    above = copy_of(filled(family, STORED)) if has_some_above else plain_store()
    timeout_s = 0.25 if kind is Kind.SLOW else 20.0
    pair = Pair(family, mode, above, copy_of(filled(family, STORED)), load_timeout_s=timeout_s)
    fault = make_fault(pair.driver, kind, where)
    if has_some_above:  # all that the fault does not concern
        above.delete([one.name for one in above.objects() if fault.concerns(one.name.group)])
    serve(pair.driver, 2, fail=lambda: pair.below.faults.append(fault))
    assert fault.struck
    assert set(pair.driver.stats.failures) == {reason}
    pair.check_counters(reason)
    pair.recover()
    pair.driver.cache.reset()
    pair.ask("further", SHARED + prompt(9, 30))
    pair.check(reference(family, 2))
    pair.driver.cache.reset()
    assert pair.ask("again", SHARED + prompt(9, 30)) >= RESUME
    pair.driver.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [*WRITING, Kind.SLOW_WRITE])
def test_a_fault_while_moving_up_costs_the_copy_and_nothing_else(kind: Kind, family: str, mode: str) -> None:
    pair = Pair(family, mode, plain_store(), copy_of(filled(family, STORED)))
    pair.above.faults.append(fault := Fault(kind, after=1))
    assert pair.ask("a", SHARED + prompt(9, 20)) == RESUME
    assert fault.reached.wait(5)
    assert not pair.driver.stats.failures
    if kind is not Kind.SLOW_WRITE:
        pair.settle()
        assert pair.store.stats.faults
        assert pair.store.stats.promoted == 0
        assert contents(pair.above.store) == {}
    pair.recover()
    pair.ask("warm", WARM)  # after a rest one object may try, whoever's it is
    pair.settle()
    pair.driver.cache.reset()
    loaded_bytes = pair.driver.stats.loaded_bytes
    read_bytes = pair.below.stats.read_bytes
    assert pair.ask("b", SHARED + prompt(9, 21)) == RESUME
    pair.settle()
    assert pair.store.stats.promoted
    loaded_bytes = pair.driver.stats.loaded_bytes - loaded_bytes
    has_moved = kind is Kind.SLOW_WRITE  # it was only late
    assert pair.below.stats.read_bytes - read_bytes == (0 if has_moved else loaded_bytes), "read more than once"
    pair.driver.cache.reset()
    pair.below.faults.append(Fault(Kind.LOST))
    assert pair.ask("c", SHARED + prompt(9, 22)) == RESUME, "not all has moved up"
    pair.below.faults.clear()
    pair.check(served(family))
    pair.driver.close()


@functools.cache
def served(family: str) -> MemoryStore:
    """What the requests that load leave without faults."""
    store = copy_of(filled(family, STORED))
    driver = StreamDriver(model_of(family), store)
    for seed in range(20, 23):
        driver.add(str(seed), SHARED + prompt(9, seed), BRIEF)
    driver.add("warm", WARM, BRIEF)
    driver.run()
    driver.drain()
    driver.runner.close()
    return store


SEEDS = range(1, 6)
STORED_FIVE = [f"90/{seed}" for seed in SEEDS]


def back(family: str, mode: str) -> Pair:
    """An upper tier that holds less than half of what five prompts leave."""
    size = filled(family, *STORED_FIVE).stats.nbytes * 2 // 5
    return Pair(family, mode, MemoryStore(size), plain_store(), WritePolicy.BACK)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "tier"), [(kind, "below") for kind in WRITING] + [(Kind.FLIP_ROW, "above")])
def test_a_fault_while_writing_back_loses_the_object(kind: Kind, tier: str, family: str, mode: str) -> None:
    """In the lower tier, or of the bytes that are on their way there."""
    pair = back(family, mode)
    faulty = pair.below if tier == "below" else pair.above
    faulty.faults.append(fault := Fault(kind, after=1))
    for seed in SEEDS:
        pair.ask(f"first {seed}", prompt(90, seed))
        pair.settle()
    assert fault.struck
    assert pair.store.stats.evicted
    assert pair.store.stats.dropped or pair.store.stats.skipped
    assert (pair.store.stats.corrupt if kind is Kind.FLIP_ROW else pair.store.stats.faults) > 0
    if kind is not Kind.LOST:
        assert contents(pair.below.store) == {}
    assert pair.driver.stats.dumps_failed == 0
    pair.recover()
    for seed in SEEDS:
        pair.driver.cache.reset()
        pair.ask(f"second {seed}", prompt(90, seed))
        pair.settle()
    pair.check(filled(family, *STORED_FIVE))
    assert contents(pair.below.store)
    pair.driver.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "tier"), [(kind, "below") for kind in WRITING] + [(Kind.FLIP_ROW, "above")])
def test_a_fault_at_the_end_leaves_nothing_bad_below(kind: Kind, tier: str, family: str) -> None:
    pair = back(family, "async")
    pair.ask("a", prompt(90, 1))
    pair.settle()
    faulty = pair.below if tier == "below" else pair.above
    faulty.faults.append(fault := Fault(kind, after=1))
    below = pair.below.store
    pair.below.close = lambda: None  # type: ignore[method-assign]
    pair.driver.close()
    assert fault.struck
    check_same(below, filled(family, *STORED_FIVE))
    assert below.stats.nbytes == sum(one.nbytes for one in below.objects()), "a draft was left"
    assert pair.store.stats.dropped or pair.store.stats.skipped


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_that_hangs_below_keeps_no_engine_from_closing(mode: str) -> None:
    """A load is under way: some of its rows have been read, and would move up if the others came."""
    pair = Pair("falcon_h1", mode, plain_store(), copy_of(filled("falcon_h1", STORED)), load_timeout_s=0.1)
    pair.below.faults.append(fault := Fault(Kind.SLOW, row=1))
    pair.ask("a", SHARED + prompt(9, 20))
    assert fault.struck
    start = Stopwatch()
    pair.driver.close(clean=False)
    assert start.seconds < 10
    assert pair.store.stats.promoted == 0
    fault.release.set()
