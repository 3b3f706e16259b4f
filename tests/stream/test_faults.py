"""A hit is a promise: whatever a store does to a load, nobody gets a wrong token, and nobody else notices.

Every case runs a request that loads from a store that fails, alone or with another of the same prefix, beside one that
decodes. Every logit that counts is compared with the stock model's; rows that fail have filled their pages with NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.store import CorruptObject, MemoryStore, MissingObject
from hybridkv.stream import Load
from hybridkv.stream.openings import Openings
from hybridkv.stream.source import Source
from hybridkv.workers import Workers
from tests.engine.drive import GREEDY, check_greedy, memory_for
from tests.engine.zoo import prompt
from tests.store.faulty import Fault, Kind
from tests.store.samples import save
from tests.stream.drive import StreamDriver, filled, model_of
from tests.stream.faults import GarbageStore, check_same, copy_of

FAMILIES = ["llama", "gemma3", "mamba2", "deepseek_v3", "falcon_h1"]
"""Full attention, windows, states, latents, and both in one layer."""
MIXED = [*FAMILIES, "qwen3_next", "kimi_linear"]
MODES = ["async", "layerwise"]
ROWS = {"first": 0.0, "middle": 0.5, "last": 1.0}
STORED = "90/1"
SHARED = prompt(90, 1)
RESUME = 80
"""Where the store lets both requests resume."""


class Case(NamedTuple):
    kind: Kind
    reason: str


CASES = {
    "missing": Case(Kind.MISSING, "missing"),
    "short": Case(Kind.SHORT_ROW, "corrupt"),
    "flipped_header": Case(Kind.FLIP_HEADER, "corrupt"),
    "flipped_row": Case(Kind.FLIP_ROW, "corrupt"),
    "slow": Case(Kind.SLOW, "timeout"),
    "open_raises": Case(Kind.FAIL_OPEN, "fault"),
    "read_raises": Case(Kind.FAIL_READ, "fault"),
    "lost": Case(Kind.LOST, "fault"),
}
_OF_OBJECTS = (Kind.MISSING, Kind.FLIP_HEADER, Kind.FAIL_OPEN)


def rows_in_order(driver: StreamDriver) -> list[tuple[str, int]]:
    """(group, row) of a load, as layers need them."""
    found = [
        (chunk.row.first_layer, group.read_order, group.name, chunk.first)
        for group in driver.streamer.catalogue.groups
        for chunk in group.chunks
    ]
    return [(name, number) for _, _, name, number in sorted(found)]


def make_fault(driver: StreamDriver, kind: Kind, where: str) -> Fault:
    rows = rows_in_order(driver)
    index = round(ROWS[where] * (len(rows) - 1))
    if kind is Kind.LOST:
        return Fault(kind, after=max(1, index))  # at 0 nothing would be found
    group, row = rows[index]
    return Fault(kind, group, row=None if kind in _OF_OBJECTS else row)


def add_requests(driver: StreamDriver, count: int) -> None:
    for index in range(count):
        driver.add(f"request {index}", SHARED[: 90 - 5 * index] + prompt(9, 20 + index), replace(GREEDY, max_tokens=2))


def serve(driver: StreamDriver, count: int, fail: Callable[[], None] = lambda: None) -> None:
    """One that decodes, then those that load while `fail` has its effect."""
    driver.add("beside", prompt(20, 9), replace(GREEDY, max_tokens=9))
    driver.step()
    driver.step()
    driver.drain()
    fail()
    add_requests(driver, count)
    driver.until_answered()  # the end of "beside" is written, too: a lost store must not be lost before it is asked
    driver.run()
    for name in driver.results:
        check_greedy(driver, name)
        assert all(one.error is None for one in driver.results[name].completions)


@functools.cache
def reference(family: str, count: int) -> MemoryStore:
    """What the same requests leave without faults."""
    store = copy_of(filled(family, STORED))
    driver = StreamDriver(model_of(family), store)
    serve(driver, count)
    driver.add("further", SHARED + prompt(9, 30), replace(GREEDY, max_tokens=2))
    driver.run()
    driver.drain()
    driver.runner.close()
    return store


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "two"])
@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_a_fault_costs_time_and_nothing_else(case: str, family: str, mode: str, where: str, count: int) -> None:
    kind, reason = CASES[case]
    below = copy_of(filled(family, STORED))
    store = GarbageStore(below)
    timeout_s = 0.25 if kind is Kind.SLOW else 20.0
    driver = StreamDriver(model_of(family), store, mode, streamer_options={"load_timeout_s": timeout_s})
    fault = make_fault(driver, kind, where)
    serve(driver, count, fail=lambda: store.faults.append(fault))
    assert fault.struck
    assert set(driver.stats.failures) == {reason}
    assert driver.results["request 0"].cached_tokens <= RESUME
    fault.release.set()
    store.faults.clear()
    check_counters(driver, kind, reason)
    driver.settle()
    driver.add("further", SHARED + prompt(9, 30), replace(GREEDY, max_tokens=2))
    driver.run()
    check_greedy(driver, "further")
    driver.settle()
    check_same(below, reference(family, count))
    driver.close()


def check_counters(driver: StreamDriver, kind: Kind, reason: str) -> None:
    stats, stored = driver.stats, driver.store.stats
    assert stats.found == sum(stats.loads.values()) + sum(stats.failures.values())
    assert (stored.corrupt > 0) == (reason == "corrupt")
    assert (stored.faults > 0) == (reason == "fault")
    assert kind is Kind.LOST or stats.dumps_failed == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyError, MemoryError, SystemExit])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MIXED)
def test_a_fault_of_any_other_kind_is_an_error_of_the_load(
    family: str,
    mode: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A store's client may raise what it likes; it is logged, since no request tells of it."""
    store = GarbageStore(copy_of(filled(family, STORED)))
    driver = StreamDriver(model_of(family), store, mode)

    def fail() -> None:
        def open_badly(name: Any) -> Any:
            raise error("injected")

        monkeypatch.setattr(store, "open", open_badly)

    serve(driver, 2, fail)
    assert set(driver.stats.failures) == {"error"}
    assert error.__name__ in caplog.text
    driver.close()


def names_at(driver: StreamDriver, end: int) -> list[Any]:
    keys = driver.streamer.finder.block_keys(lookup_key().root).first(end // 16, pack_tokens(SHARED))
    return [driver.streamer.catalogue.name(group, keys[-1]) for group in driver.streamer.catalogue.groups]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "expected"), [("llama", 64), ("gemma3", 0), ("falcon_h1", 0)])
def test_a_fault_in_the_last_stretch_goes_back_to_what_the_resume_rule_allows(
    family: str, expected: int, mode: str
) -> None:
    """The object that ends at 80 is bad. Windows and states were those of 80; full attention alone has 64 left."""
    store = GarbageStore(copy_of(filled(family, STORED)))
    driver = StreamDriver(model_of(family), store, mode)
    bad = names_at(driver, 80)[0]
    opened = store.open

    def open_badly(name: Any) -> Any:
        if name == bad:
            store.faults[:] = [Fault(Kind.FLIP_ROW, bad.group, row=0, times=1)]
        return opened(name)

    store.open = open_badly  # type: ignore[method-assign]
    driver.streamer.mover._readers.close(5)  # one reader: nothing else is open meanwhile
    driver.streamer.mover._readers = Workers(1, "test")
    ended, num_good = driver.streamer.ended, []

    def note(load: Load, mode: str) -> None:
        num_good.append(load.num_good)
        ended(load, mode)

    driver.streamer.ended = note  # type: ignore[method-assign]
    driver.add("a", SHARED + prompt(9, 20))
    driver.run()
    assert driver.stats.failures == {"corrupt": 1}
    assert num_good == [expected]
    assert driver.results["a"].cached_tokens == expected
    driver.close()


def test_all_rows_of_an_object_get_the_same_answer() -> None:
    """The first to open it finds its header corrupt, and it is deleted: the next must not call it missing."""
    store = GarbageStore(copy_of(filled("falcon_h1", STORED)))
    driver = StreamDriver(model_of("falcon_h1"), store)
    catalogue = driver.streamer.catalogue
    bad = names_at(driver, 80)[0]
    group = next(one for one in catalogue.groups if one.name == bad.group)
    source = Source(store, Openings(store), catalogue, group, bytes.fromhex(bad.key), 80)
    store.faults[:] = [Fault(Kind.FLIP_HEADER, bad.group)]
    for chunk in group.chunks[:2]:
        with pytest.raises(CorruptObject):
            source.read(chunk, memoryview(bytearray(chunk.nbytes(source.num_tokens))))
    with pytest.raises(MissingObject):
        store.open(bad)
    driver.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MIXED)
def test_what_a_fault_has_spoiled_is_stored_again(family: str, mode: str) -> None:
    """The corrupt object is deleted, computed again and written again: the next engine finds it."""
    below = copy_of(filled(family, STORED))
    store = GarbageStore(below)
    driver = StreamDriver(model_of(family), store, mode)
    fault = make_fault(driver, Kind.FLIP_ROW, "first")
    fault.times = 1
    driver.add("first", SHARED + prompt(9, 19))
    driver.run()
    assert driver.stats.loads == {mode: 1}
    driver.cache.reset()
    store.faults.append(fault)
    driver.add("a", SHARED + prompt(9, 20))
    driver.run()
    assert driver.stats.failures == {"corrupt": 1}
    driver.drain()
    again = StreamDriver(model_of(family), copy_of(below), mode)
    driver.close()
    again.add("b", SHARED + prompt(9, 21))
    again.run()
    assert again.results["b"].cached_tokens == RESUME
    again.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_object_of_other_rows_goes(family: str, mode: str) -> None:
    """It is whole, and not what its name says: as long as it stays, nobody could write the right one."""
    below = copy_of(filled(family, STORED))
    driver = StreamDriver(model_of(family), below, mode)
    bad = names_at(driver, RESUME)[0]
    below.delete([bad])
    assert save(below, bad, [64, 64])
    driver.add("a", SHARED + prompt(9, 20), replace(GREEDY, max_tokens=2))
    driver.run()
    check_greedy(driver, "a")
    assert driver.stats.failures == {"corrupt": 1}
    driver.drain()
    driver.cache.reset()
    driver.add("b", SHARED + prompt(9, 21), replace(GREEDY, max_tokens=2))
    driver.run()
    assert driver.results["b"].cached_tokens == (64 if driver.streamer.catalogue.is_plain else RESUME)
    assert driver.stats.failures == {"corrupt": 1}
    driver.close()


@pytest.mark.parametrize("family", MIXED)
def test_pages_of_a_fault_are_clean_when_others_get_them(family: str) -> None:
    """An arena so small that the pages of a failed load are the next ones to be used."""
    model = model_of(family)
    store = GarbageStore(copy_of(filled(family, STORED)))
    memory_bytes = memory_for(model, 2, 130, row_layers=1)
    driver = StreamDriver(model, store, memory_bytes=memory_bytes)
    for row in range(len(rows_in_order(driver))):
        group, number = rows_in_order(driver)[row]
        store.faults[:] = [Fault(Kind.FAIL_READ, group, number)]
        driver.cache.reset()
        driver.add(f"a{row}", SHARED + prompt(9, 20), replace(GREEDY, max_tokens=2))
        driver.add(f"b{row}", prompt(70, 40 + row), replace(GREEDY, max_tokens=2))
        driver.run()
        assert driver.stats.failures["fault"] > row
    driver.close()
