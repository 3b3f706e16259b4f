"""A request that waits for its turn has its objects copied to the fastest tier meanwhile. Every logit is checked."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hybridkv.engine.request import Sample
from hybridkv.store import MemoryStore, Tier, TieredStore
from tests.engine.drive import GREEDY, check_greedy
from tests.engine.zoo import prompt
from tests.store.faulty import Fault, Kind
from tests.stream.drive import StreamDriver, filled, model_of
from tests.stream.faults import GarbageStore, check_same, copy_of
from tests.stream.test_faults import SHARED, STORED

LONG = replace(GREEDY, max_tokens=60)


def wait_for_prefetch(driver: StreamDriver, store: TieredStore, count: str = "prefetched") -> None:
    """One request runs, another waits until something of it was prefetched, or `count` of the store says so."""
    driver.add("runs", prompt(20, 7), LONG)
    while driver.core.scheduler.waiting:
        driver.step()
    driver.add("waits", SHARED + prompt(9, 2))
    deadline = time.monotonic() + 20
    while not getattr(store.stats, count):
        assert time.monotonic() < deadline, "nothing was prefetched"
        driver.step()


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_waiting_request_finds_its_objects_in_the_fastest_tier(family: str) -> None:
    above, below = MemoryStore(1 << 26), copy_of(filled(family, STORED))
    store = TieredStore([Tier(above), Tier(below)])
    driver = StreamDriver(model_of(family), store, max_num_seqs=1)
    wait_for_prefetch(driver, store)
    driver.run()
    assert driver.results["waits"].cached_tokens > 0
    assert sum(above.lookup([one.name for one in below.objects()])) >= store.stats.prefetched > 0
    assert (driver.stats.found, sum(driver.stats.failures.values())) == (1, 0)
    driver.close()


def test_the_store_is_asked_again_if_memory_has_lost_what_it_had() -> None:
    below = copy_of(filled("falcon_h1", STORED))
    store = TieredStore([Tier(MemoryStore(1 << 26)), Tier(below)])
    driver = StreamDriver(model_of("falcon_h1"), store, max_num_seqs=1)
    driver.add("first", SHARED[:60])
    driver.run()
    wait_for_prefetch(driver, store)
    asked = driver.stats.lookups
    driver.cache.reset()
    driver.run()
    assert driver.stats.lookups == asked + 1
    assert driver.results["waits"].cached_tokens == 80
    assert not driver.stats.failures
    driver.close()


@pytest.mark.parametrize("kind", [Kind.FLIP_HEADER, Kind.FLIP_ROW])
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_corrupt_object_that_a_prefetch_finds_costs_time_and_moves_nothing_up(family: str, kind: Kind) -> None:
    """The prefetch deletes it, so the load that comes later finds it corrupt or missing."""
    stored = filled(family, STORED)
    above, below = MemoryStore(1 << 26), GarbageStore(copy_of(stored), [Fault(kind)])
    store = TieredStore([Tier(above), Tier(below)])
    driver = StreamDriver(model_of(family), store, max_num_seqs=1)
    wait_for_prefetch(driver, store, "corrupt")
    driver.run()
    check_greedy(driver, "waits")
    assert driver.results["waits"].completions[0].error is None
    assert set(driver.stats.failures) <= {"corrupt", "missing"}
    assert sum(driver.stats.failures.values()) == driver.stats.found == 1
    driver.settle()
    store.drain()
    clean = copy_of(stored)
    other = StreamDriver(model_of(family), clean)
    other.add("runs", prompt(20, 7), LONG)
    other.add("waits", SHARED + prompt(9, 2))
    other.run()
    other.drain()
    check_same(above, clean)
    other.close()
    driver.close()


def test_a_request_that_waits_for_the_stores_answer_alone_is_not_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads in the next step: a prefetch would read the same objects beside the load."""
    store = TieredStore([Tier(MemoryStore(1 << 26)), Tier(copy_of(filled("llama", STORED)))])
    driver = StreamDriver(model_of("llama"), store)
    is_ready, num_answered = driver.streaming.is_ready, 0

    def is_late(sample: Sample) -> bool:
        """The answer comes right after the question whether it has come, five times."""
        nonlocal num_answered
        num_answered += is_ready(sample)
        return num_answered > 5

    monkeypatch.setattr(driver.streaming, "is_ready", is_late)
    driver.add("a", SHARED + prompt(9, 2))
    driver.run()
    assert num_answered > 5
    assert store._prefetcher._workers is None, "something was prefetched"
    assert driver.results["a"].cached_tokens == 80
    driver.close()


def test_a_single_store_is_asked_only_when_a_request_can_start() -> None:
    driver = StreamDriver(model_of("llama"), copy_of(filled("llama", STORED)), max_num_seqs=1)
    driver.add("runs", prompt(20, 7), LONG)
    while driver.core.scheduler.waiting:
        driver.step()
    asked = driver.stats.lookups
    driver.add("waits", SHARED + prompt(9, 2))
    for _ in range(5):
        driver.step()
    assert driver.stats.lookups == asked
    driver.run()
    assert driver.stats.lookups == asked + 1
    driver.close()
