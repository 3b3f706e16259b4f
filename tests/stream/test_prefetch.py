"""A request that waits for its turn has its objects copied to the fastest tier meanwhile. Every logit is checked."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hybridkv.store import MemoryStore, Tier, TieredStore
from tests.engine.drive import GREEDY
from tests.engine.zoo import prompt
from tests.stream.drive import StreamDriver, filled, model_of
from tests.stream.faults import copy_of
from tests.stream.test_faults import SHARED, STORED

LONG = replace(GREEDY, max_tokens=60)


def wait_for_prefetch(driver: StreamDriver, store: TieredStore) -> None:
    """One request runs, another waits until something of it was prefetched."""
    driver.add("runs", prompt(20, 7), LONG)
    while driver.core.scheduler.waiting:
        driver.step()
    driver.add("waits", SHARED + prompt(9, 2))
    deadline = time.monotonic() + 20
    while not store.stats.prefetched:
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
