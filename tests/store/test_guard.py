"""The guard: the engine goes on without a store that fails, and comes back to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields

import pytest

from hybridkv.store import (
    CorruptObject,
    Guarded,
    MemoryStore,
    MissingObject,
    ObjectName,
    Reader,
    Store,
    StoreError,
    StoreFault,
    StoreStats,
    UnknownFormat,
)
from hybridkv.store.blobs import Blob, Usage
from tests.store.conformance import StoreConformance
from tests.store.faulty import Fault, FaultyStore, Kind
from tests.store.samples import NAMESPACE, load, name_of, rows_of, save
from tests.store.versions import LATER, later, plant

NAMES = [name_of(number) for number in range(3)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestGuardedStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return Guarded(MemoryStore(16 << 20))


def guarded(*faults: Fault) -> tuple[Guarded, FaultyStore, Clock]:
    clock, faulty = Clock(), FaultyStore(MemoryStore(16 << 20))
    save(faulty, NAMES[0])
    faulty.faults.extend(faults)
    return Guarded(faulty, "test", clock), faulty, clock


def calls_of(fault: Fault, guard: Guarded) -> int:
    """How many calls reach the store when one lookup is made."""
    before = fault.struck
    guard.lookup(NAMES[:1])
    return fault.struck - before


def test_faults_of_opening_many_stand_in_their_places_and_the_store_rests() -> None:
    fault = Fault(Kind.FAIL_OPEN)
    guard, faulty, clock = guarded(fault)
    assert all(isinstance(one, StoreFault) for one in guard.open_all(NAMES))
    assert (fault.struck, guard.stats.faults) == (3, 3)
    assert all(isinstance(one, StoreFault) for one in guard.open_all(NAMES))
    assert (fault.struck, guard.stats.skipped) == (3, 3)
    faulty.faults.clear()
    clock.now += 2
    assert guard.lookup(NAMES[:1]) == [True]
    (reader,) = guard.open_all(NAMES[:1])
    assert isinstance(reader, Reader)
    reader.read(1, [memoryview(bytearray(1))])
    reader.close()
    assert guard.lookup(NAMES) == [True, False, False]


@pytest.mark.parametrize("raises", [False, True], ids=["in all places", "raised"])
def test_one_fault_in_many_places_is_one_fault(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    guard, faulty, _ = guarded()
    fault = StoreFault("the server is gone")

    def open_all(names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        if raises:
            raise fault
        return [fault for _ in names]

    monkeypatch.setattr(faulty.blobs, "open_all", open_all)
    assert guard.open_all(NAMES) == [fault] * 3
    assert faulty.stats.faults == 1
    assert guard.lookup(NAMES[:1]) == [False]


def test_fault_of_lookup_is_a_miss_and_the_store_rests(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(Kind.FAIL_LOOKUP)
    guard, faulty, clock = guarded(fault)
    with caplog.at_level(logging.INFO, "hybridkv.store"):
        assert guard.lookup(NAMES) == [False] * 3
        assert calls_of(fault, guard) == 0
        clock.now += 1.0
        assert calls_of(fault, guard) == 1
        assert len(caplog.records) == 1
        faulty.faults.clear()
        assert guard.lookup(NAMES) == [False] * 3
        clock.now += 2.0
        assert guard.lookup(NAMES) == [True, False, False]
        assert guard.lookup(NAMES) == [True, False, False]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "injected" in caplog.records[0].message
    assert "back after 3 s" in caplog.records[1].message
    assert guard.stats.skipped == 4


def test_fault_after_fault_doubles_the_rest_up_to_a_minute() -> None:
    fault = Fault(Kind.FAIL_LOOKUP)
    guard, _, clock = guarded(fault)
    guard.lookup(NAMES)
    for rest in (1, 2, 4, 8, 16, 32, 60, 60):
        clock.now += rest - 0.01
        assert calls_of(fault, guard) == 0
        clock.now += 0.01
        assert calls_of(fault, guard) == 1
        assert calls_of(fault, guard) == 0


def test_fault_that_is_over_starts_from_one_second_again() -> None:
    fault = Fault(Kind.FAIL_LOOKUP, times=3)
    guard, _, clock = guarded(fault)
    for rest in (0, 1, 2, 4):
        clock.now += rest
        guard.lookup(NAMES)
    fault.times = None
    guard.lookup(NAMES)
    clock.now += 1
    assert calls_of(fault, guard) == 1


def test_fault_of_writing_leaves_reading_alone() -> None:
    fault = Fault(Kind.FAIL_WRITE)
    guard, faulty, clock = guarded(fault)
    with pytest.raises(StoreFault):
        save(guard, NAMES[1])
    assert not save(guard, NAMES[2])
    assert guard.lookup(NAMES) == [True, False, False]
    assert load(guard, NAMES[0]) == rows_of(NAMES[0])
    faulty.faults.clear()
    clock.now += 1
    assert save(guard, NAMES[1])
    assert save(guard, NAMES[2])


def test_fault_deep_inside_a_write_is_not_over_when_one_can_begin(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk lets files be made, and fails when they are filled: that must not be told once a second."""
    guard, faulty, clock = guarded(Fault(Kind.FAIL_WRITE))
    with caplog.at_level(logging.INFO, "hybridkv.store"):
        with pytest.raises(StoreFault):
            save(guard, NAMES[1])
        for rest in (1, 2, 4):
            clock.now += rest
            with pytest.raises(StoreFault):
                save(guard, NAMES[1])
            assert not save(guard, NAMES[1])
        assert len(caplog.records) == 1
        faulty.faults.clear()
        clock.now += 8
        assert save(guard, NAMES[1])
        assert len(caplog.records) == 2


def test_fault_deep_inside_a_read_is_not_over_when_lookups_work(caplog: pytest.LogCaptureFixture) -> None:
    guard, faulty, clock = guarded(Fault(Kind.FAIL_READ))
    with caplog.at_level(logging.INFO, "hybridkv.store"):
        with pytest.raises(StoreFault):
            load(guard, NAMES[0])
        assert guard.lookup(NAMES) == [False] * 3
        with pytest.raises(StoreFault, match="rests"):
            guard.open(NAMES[0])
        clock.now += 1
        assert guard.lookup(NAMES) == [True, False, False]
        assert guard.lookup(NAMES) == [True, False, False]  # a load takes several lookups
        with pytest.raises(StoreFault, match="injected"):
            load(guard, NAMES[0])
        assert guard.lookup(NAMES) == [False] * 3
        faulty.faults.clear()
        clock.now += 2
        assert guard.lookup(NAMES) == [True, False, False]
        assert load(guard, NAMES[0]) == rows_of(NAMES[0])
        assert guard.lookup(NAMES) == [True, False, False]
    assert len(caplog.records) == 2


def test_fault_of_a_read_is_over_although_a_read_takes_several_lookups() -> None:
    guard, _, clock = guarded(Fault(Kind.FAIL_OPEN, times=1))
    with pytest.raises(StoreFault):
        guard.open(NAMES[0])
    clock.now += 2
    assert [guard.lookup(NAMES[:1]) for _ in range(3)] == [[True]] * 3, "all lookups of one trial"
    assert load(guard, NAMES[0]) == rows_of(NAMES[0])
    assert guard.stats.skipped == 0


def test_fault_on_trial_that_comes_to_nothing_is_tried_again() -> None:
    guard, faulty, clock = guarded(Fault(Kind.FAIL_CREATE, times=1))
    assert not save(guard, NAMES[1])
    clock.now += 1
    writer = guard.create(NAMES[1], [4], value=1, position=0)
    assert writer is not None
    writer.abort()
    faulty.faults[:] = [Fault(Kind.FAIL_WRITE, times=1)]
    clock.now += 1
    with pytest.raises(StoreFault):
        save(guard, NAMES[1])
    clock.now += 60
    assert save(guard, NAMES[1])


@pytest.mark.parametrize(("kind", "error"), [(Kind.MISSING, MissingObject), (Kind.FLIP_ROW, CorruptObject)])
def test_missing_and_corrupt_objects_are_no_fault(kind: Kind, error: type[Exception]) -> None:
    guard, _, _ = guarded(Fault(kind, times=1))
    with pytest.raises(error):
        load(guard, NAMES[0])
    assert save(guard, NAMES[1])
    assert guard.lookup(NAMES[1:2]) == [True]
    assert guard.stats.skipped == 0


@pytest.mark.parametrize("kind", LATER)
def test_objects_of_later_versions_are_no_fault(kind: str) -> None:
    """They do not open the breaker, and end a trial as well as any answer."""
    guard, faulty, clock = guarded(Fault(Kind.FAIL_OPEN, times=1))
    plant(faulty.store, NAMES[1], later(NAMES[1], kind))
    with pytest.raises(StoreFault):
        guard.open(NAMES[1])
    clock.now += 1
    for _ in range(3):
        assert guard.lookup(NAMES) == [True, True, False]
        with pytest.raises(UnknownFormat):
            guard.open(NAMES[1])
    assert load(guard, NAMES[0]) == rows_of(NAMES[0])
    assert (guard.stats.skipped, guard.stats.faults) == (0, 1)


def test_fault_while_describing_and_touching_is_no_trouble_for_callers() -> None:
    guard, _, _ = guarded(Fault(Kind.LOST))
    guard.describe(NAMESPACE, {"model": "m"})
    guard.touch(NAMES)
    assert guard.stats.skipped == 3


def test_errors_of_the_operating_system_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, faulty, _ = guarded()

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(faulty, "lookup", fail)
    monkeypatch.setattr(faulty, "open", fail)
    with pytest.raises(StoreFault, match="Permission denied"):
        guard.open(NAMES[0])
    assert guard.lookup(NAMES) == [False] * 3


def test_counters_never_fall_while_the_store_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, faulty, clock = guarded()
    save(guard, NAMES[1])
    guard.lookup(NAMES)
    before = guard.stats

    def gone() -> Usage:
        raise StoreFault("the ledger has gone")

    with monkeypatch.context() as patch:
        patch.setattr(faulty.blobs, "usage", gone)
        faulty.faults.append(Fault(Kind.FAIL_LOOKUP))
        guard.lookup(NAMES)
        guard.lookup(NAMES)
        during = guard.stats
    assert (during.objects, during.nbytes, during.saved) == (before.objects, before.nbytes, before.saved) != (0, 0, 0)
    assert (during.faults, during.skipped) == (before.faults + 1, before.skipped + len(NAMES))
    faulty.faults.clear()
    clock.now += 1
    guard.lookup(NAMES)
    after = guard.stats
    assert all(getattr(during, field.name) <= getattr(after, field.name) for field in fields(StoreStats))
