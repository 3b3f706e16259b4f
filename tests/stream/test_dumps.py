"""A store that cannot be written to costs what it would have kept, and nothing else."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridkv.store import StoreFault
from hybridkv.store.file.blobs import FileStore
from hybridkv.store.guard import Guarded
from tests.engine.drive import GREEDY, check_greedy, memory_for
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.store.faulty import Fault, FaultyPendingBlob, Kind
from tests.stream.drive import StreamDriver, filled, model_of, plain_store
from tests.stream.faults import GarbageStore, check_same, contents
from tests.stream.test_faults import FAMILIES, STORED

BRIEF = replace(GREEDY, max_tokens=2)


def serve(driver: StreamDriver, name: str, seed: int) -> int:
    driver.add(name, prompt(90, seed), BRIEF)
    driver.run()
    check_greedy(driver, name)
    return driver.results[name].cached_tokens


@pytest.mark.parametrize("kind", [Kind.FAIL_CREATE, Kind.FAIL_WRITE, Kind.FAIL_COMMIT])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_while_writing_loses_the_object(family: str, kind: Kind) -> None:
    store = GarbageStore(plain_store(), [Fault(kind)])
    driver = StreamDriver(model_of(family), store)
    serve(driver, "a", 1)
    driver.drain()
    assert driver.stats.dumps_failed
    assert driver.stats.dumped == 0
    assert not any(store.store.objects())
    assert store.store.stats.nbytes == 0, "a draft was left"
    store.faults.clear()
    driver.cache.reset()
    serve(driver, "again", 1)
    driver.settle()
    assert driver.stats.dumped
    check_same(store.store, filled(family, STORED))
    driver.cache.reset()
    assert serve(driver, "third", 1) == 80
    driver.close()


@pytest.mark.parametrize("error", [KeyError, SystemExit])
@pytest.mark.parametrize("where", ["create", "write", "commit", "abort"])
def test_a_fault_of_any_kind_while_writing_loses_the_object(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing waits for ever, whatever a store's client raises; and what only a bug can raise is logged."""
    store = GarbageStore(plain_store())
    driver = StreamDriver(model_of("falcon_h1"), store)
    create = store.create

    def raises(*args: Any, **options: Any) -> Any:
        raise error("injected")

    def broken(*args: Any, **options: Any) -> Any:
        writer = create(*args, **options)
        if writer is not None:
            setattr(writer, where, raises)
            if where == "abort":
                monkeypatch.setattr(writer, "commit", raises)
        return writer

    monkeypatch.setattr(store, "create", raises if where == "create" else broken)
    serve(driver, "a", 1)
    driver.drain()
    assert driver.stats.dumps_failed
    assert driver.stats.dump_bytes_waiting == 0
    assert "could not be written" in caplog.text
    monkeypatch.undo()
    driver.cache.reset()
    serve(driver, "b", 2)
    driver.drain()
    assert driver.stats.dumped
    driver.close()


def test_no_memory_for_a_copy_loses_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StreamDriver(model_of("llama"), plain_store())

    def full(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(driver.streamer.mover._pages, "copy_out", full)
    serve(driver, "a", 1)
    driver.drain()
    assert driver.stats.dumped == 0
    assert driver.stats.dumps_failed
    driver.close()


def test_a_store_that_hangs_drops_what_is_too_much_and_stalls_nobody() -> None:
    store = GarbageStore(plain_store())
    fault = Fault(Kind.SLOW_WRITE)
    store.faults.append(fault)
    driver = StreamDriver(model_of("llama"), store)
    driver.streamer.mover._dumper._max_waiting_bytes = limit = 3 * driver.streamer.catalogue.groups[0].nbytes(16)
    for seed in range(4):
        serve(driver, str(seed), seed)
        assert driver.stats.dump_bytes_waiting <= limit
    assert fault.reached.wait(5)
    assert driver.stats.dumps_dropped
    assert driver.stats.dumped == 0
    fault.release.set()
    store.faults.clear()
    driver.drain()
    assert driver.stats.dumped
    dropped = driver.stats.dumps_dropped
    driver.cache.reset()
    serve(driver, "small", 9)
    assert driver.stats.dumps_dropped >= dropped
    driver.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_were_taken_do_not_change_when_their_pages_do(family: str) -> None:
    """Written long after the step: others have had the pages meanwhile."""
    fault = Fault(Kind.SLOW_WRITE, row=0)
    store = GarbageStore(plain_store(), [fault])
    memory_bytes = memory_for(model_of(family), 1, 140, row_layers=1)
    driver = StreamDriver(model_of(family), store, memory_bytes=memory_bytes)
    serve(driver, "a", 1)
    driver.cache.reset()
    driver.streaming._dump_step = lambda sample, tables: []  # type: ignore[method-assign]
    driver.streaming.dump_reply = lambda sample: None  # type: ignore[method-assign]
    serve(driver, "b", 2)
    fault.release.set()
    driver.settle()
    assert driver.stats.dumped
    check_same(store.store, filled(family, STORED))
    driver.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_directory_that_vanishes_and_comes_back(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, gone on without, and found again."""
    caplog.set_level(logging.WARNING, "hybridkv.store")
    clock, place = Clock(), tmp_path / "store"
    store = Guarded(FileStore(place, 1 << 30), "file", clock)
    driver = StreamDriver(model_of(family), store)
    serve(driver, "before", 1)
    driver.drain()
    num_stored = driver.stats.dumped
    assert num_stored

    place.rename(tmp_path / "elsewhere")
    place.write_text("no directory")
    driver.cache.reset()
    for index in range(4):
        driver.cache.reset()
        serve(driver, f"during {index}", 1 + index % 2)
    driver.drain()
    told = [record for record in caplog.records if "going on without it" in record.getMessage()]
    assert 1 <= len(told) <= 2, "reading and writing each say it once"
    assert driver.stats.dumped == num_stored

    place.unlink()
    (tmp_path / "elsewhere").rename(place)
    clock.now += 1000
    driver.cache.reset()
    assert serve(driver, "after", 1) in (0, 80)  # the first to ask may be the one that finds out
    clock.now += 1000
    driver.cache.reset()
    assert serve(driver, "found", 1) == 80
    serve(driver, "new", 2)
    driver.settle()
    assert driver.stats.dumped > num_stored, "what was computed while it was away is written when it is computed again"
    driver.close()


def test_a_disk_that_is_full_can_still_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    store = GarbageStore(plain_store())
    driver = StreamDriver(model_of("gemma3"), Guarded(store, "full", clock))
    serve(driver, "before", 1)
    driver.drain()
    store.faults.append(Fault(Kind.FAIL_WRITE))
    driver.cache.reset()
    assert serve(driver, "read", 1) == 80
    for seed in range(2, 5):
        serve(driver, str(seed), seed)
        driver.drain()
    assert store.stats.faults >= 1
    before = set(contents(store.store))
    store.faults.clear()
    clock.now += 1000
    for seed in range(5, 7):
        serve(driver, str(seed), seed)
        driver.drain()
    assert set(contents(store.store)) > before
    driver.close()


def test_two_engines_that_compute_the_same_write_it_once() -> None:
    """One store, two drivers: the second's objects are there already."""
    store = GarbageStore(plain_store())
    first, second = StreamDriver(model_of("falcon_h1"), store), StreamDriver(model_of("falcon_h1"), store)
    for driver in (first, second):
        driver.add("a", prompt(90, 1), BRIEF)
        driver.step()
    first.run()
    second.run()
    first.drain()
    second.drain()
    check_same(store.store, filled("falcon_h1", STORED))
    assert store.stats.saved == len(contents(store.store))
    first.close()
    second.runner.close()


@pytest.mark.parametrize("max_tokens", [6, 28, 32, 36])
def test_a_reply_is_stored_with_its_windows_or_not_at_all(max_tokens: int) -> None:
    """Where the window has moved on from the reply's last whole block, nobody could resume there."""
    store = plain_store()
    driver = StreamDriver(model_of("gemma3"), store, streamer_options={"stretch_tokens": 128})
    driver.add("a", prompt(70, 1), replace(GREEDY, max_tokens=max_tokens))
    driver.run()
    driver.drain()
    keys: dict[str, set[str]] = {}
    for stored in store.objects():
        keys.setdefault(stored.name.group, set()).add(stored.name.key)
    assert keys["full"] == keys["window20"]
    driver.close()


def test_close_writes_what_is_on_its_way() -> None:
    store = GarbageStore(plain_store())
    kept = store.store
    store.close = lambda: None  # type: ignore[method-assign]
    fault = Fault(Kind.SLOW_WRITE)
    store.faults.append(fault)
    driver = StreamDriver(model_of("llama"), store)
    serve(driver, "a", 1)
    assert fault.reached.wait(5)
    threading.Timer(0.1, fault.release.set).start()
    driver.close(clean=False)
    check_same(kept, filled("llama", STORED))
    assert len(contents(kept)) == driver.stats.dumped == 4


def test_close_leaves_no_draft_of_a_step_that_never_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug has ended the engine in the middle of it."""

    def bug() -> None:
        raise KeyError("a bug")

    driver = StreamDriver(model_of("falcon_h1"), FileStore(tmp_path, 1 << 30))
    monkeypatch.setattr(driver.streaming, "end_step", bug)
    driver.add("a", prompt(90, 1), BRIEF)
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError):
        driver.run()
    driver.close(clean=False)
    assert driver.stats.dumps_discarded
    assert driver.stats.dump_bytes_waiting == 0
    assert os.listdir(tmp_path / "hybridkv-v1" / "drafts") == []
    assert len(os.listdir("/proc/self/fd")) <= num_files


@pytest.mark.parametrize("what", ["create", "write"])
def test_closing_waits_for_a_store_only_as_long_as_it_answers(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take 0.15 s each are all written; a store that takes nothing for 0.5 s is left alone."""
    monkeypatch.setattr("hybridkv.stream.dump._STALL_S", 0.5)
    store, hangs, release = GarbageStore(plain_store()), threading.Event(), threading.Event()
    if what == "create":
        create = store.create
        monkeypatch.setattr(store, "create", lambda *args, **options: pause() or create(*args, **options))
    else:
        draft = FaultyPendingBlob.write_at
        monkeypatch.setattr(FaultyPendingBlob, "write_at", lambda *args: pause() or draft(*args))

    def pause() -> bool:
        return release.wait(20 if hangs.is_set() else 0.15) and False

    driver = StreamDriver(model_of("llama"), store)
    serve(driver, "a", 1)
    driver.close(clean=False)
    assert driver.stats.dump_bytes_waiting == 0
    assert driver.stats.dumped > 1
    driver = StreamDriver(model_of("llama"), store)
    hangs.set()
    serve(driver, "b", 2)
    start = Stopwatch()
    driver.close(clean=False)
    assert start.seconds < 5
    assert driver.stats.dump_bytes_waiting > 0
    release.set()


def test_beginning_a_step_twice_loses_no_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    once, twice = plain_store(), plain_store()
    for store in (once, twice):
        driver = StreamDriver(model_of("falcon_h1"), store)
        if store is twice:
            begin_step = driver.streaming.begin_step
            monkeypatch.setattr(
                driver.streaming, "begin_step", lambda step, begin=begin_step: (begin(step), begin(step))
            )
        serve(driver, "a", 1)
        driver.drain()
        assert driver.stats.dumps_discarded == driver.stats.dumps_failed == 0
        if store is twice:
            check_same(twice, once)
            assert contents(twice).keys() == contents(once).keys()
            assert len(contents(twice)) == driver.stats.dumped == 8
        driver.runner.close()


def test_a_step_that_was_begun_and_never_ran_leaves_nothing_and_its_objects_are_counted() -> None:
    store = plain_store()
    driver = StreamDriver(model_of("falcon_h1"), store)
    driver.add("a", prompt(90, 1), BRIEF)
    scheduled: list[Any] = []
    while not scheduled:  # until the store has answered
        scheduled, _ = driver.core.scheduler.schedule()
    driver.streaming.begin_step(scheduled)
    begun = len(driver.streamer.mover._dumper._writing)
    assert begun
    for sample, _ in scheduled:
        driver.cache.commit(sample.lease, failed=True)
    held = driver.cache.extend(driver.cache.begin(prompt(40, 9)), 40)  # so that the next step gets other pages
    assert held
    driver.run()  # the next step begins while the first is pending
    driver.drain()
    assert driver.stats.dumps_discarded == begun
    check_same(store, filled("falcon_h1", "90/1"))
    driver.close(clean=False)


def test_close_leaves_a_write_that_hangs_to_itself() -> None:
    store = GarbageStore(plain_store(), [Fault(Kind.SLOW_WRITE)])
    driver = StreamDriver(model_of("llama"), store, streamer_options={"close_timeout_s": 0.1})
    serve(driver, "a", 1)
    assert store.faults[0].reached.wait(5)
    start = Stopwatch()
    driver.close(clean=False)
    assert start.seconds < 5
    store.faults[0].release.set()


def test_what_the_store_refuses_is_offered_again_when_it_was_missed() -> None:
    """`create` says None where there is no room: it is not taken for stored."""
    store = GarbageStore(plain_store())
    driver = StreamDriver(model_of("llama"), store)
    create = store.create
    store.create = lambda *args, **options: None  # type: ignore[method-assign]
    serve(driver, "a", 1)
    driver.drain()
    assert driver.stats.dumped == 0
    store.create = create  # type: ignore[method-assign]
    driver.cache.reset()
    serve(driver, "b", 1)
    driver.drain()
    driver.cache.reset()
    assert serve(driver, "c", 1) == 80
    driver.close()


def test_a_lookup_that_raises_is_counted_and_costs_nothing() -> None:
    store = GarbageStore(plain_store(), [Fault(Kind.FAIL_LOOKUP)])
    driver = StreamDriver(model_of("llama"), store)
    serve(driver, "a", 1)
    assert driver.stats.failed_lookups == driver.stats.lookups == 1
    with pytest.raises(StoreFault):
        store.lookup(driver_names(driver))
    driver.close()


def driver_names(driver: StreamDriver) -> list[Any]:
    return [driver.streamer.catalogue.name(group, bytes(32)) for group in driver.streamer.catalogue.groups]
