"""Faults below the checks: each is noticed, by the error that says what it is, and nothing bad is served."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from hybridkv.store import CorruptObject, FileStore, MemoryStore, MissingObject, StoreError, StoreFault
from hybridkv.store.blob_store import BlobStore
from tests.store.conformance import StoreConformance
from tests.store.faulty import Fault, FaultyStore, Kind
from tests.store.samples import ROWS, load, name_of, read_row, rows_of, save


@pytest.fixture(params=["memory", "file"])
def sound(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return MemoryStore(16 << 20) if request.param == "memory" else FileStore(tmp_path, 16 << 20)


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> FaultyStore:
        return FaultyStore(MemoryStore(16 << 20))


@pytest.mark.parametrize("kind", [Kind.SHORT_ROW, Kind.FLIP_ROW])
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_fault_in_a_row_is_found_and_the_object_deleted(sound: BlobStore, kind: Kind, row: int) -> None:
    fault = Fault(kind, row=row)
    store = FaultyStore(sound, [fault])
    save(store, name_of(1))
    with store.open(name_of(1)) as reader:
        for other in range(len(ROWS)):
            if other != row:
                assert read_row(reader, other) == rows_of(name_of(1))[other]
        with pytest.raises(CorruptObject, match=name_of(1).key):
            read_row(reader, row)
    assert fault.struck == 1
    assert store.lookup([name_of(1)]) == [False]
    assert (store.stats.corrupt, store.stats.objects, store.stats.faults) == (1, 0, 0)
    assert save(store, name_of(1))


def test_fault_in_a_header_is_found_and_the_object_deleted(sound: BlobStore) -> None:
    store = FaultyStore(sound, [Fault(Kind.FLIP_HEADER, group="state")])
    save(store, name_of(1))
    save(store, name_of(1, "state"))
    with pytest.raises(CorruptObject):
        store.open(name_of(1, "state"))
    assert store.lookup([name_of(1), name_of(1, "state")]) == [True, False]
    assert load(store, name_of(1)) == rows_of(name_of(1))


def test_fault_of_an_object_that_goes_between_lookup_and_open(sound: BlobStore) -> None:
    store = FaultyStore(sound, [Fault(Kind.MISSING, times=1)])
    save(store, name_of(1))
    assert store.lookup([name_of(1)]) == [True]
    with pytest.raises(MissingObject):
        store.open(name_of(1))
    assert load(store, name_of(1)) == rows_of(name_of(1))


@pytest.mark.parametrize("kind", [Kind.FAIL_CREATE, Kind.FAIL_WRITE, Kind.FAIL_COMMIT])
def test_fault_while_writing_leaves_nothing(sound: BlobStore, kind: Kind) -> None:
    store = FaultyStore(sound, [Fault(kind, times=1)])
    with pytest.raises(StoreFault, match="injected"):
        save(store, name_of(1))
    assert store.lookup([name_of(1)]) == [False]
    assert (store.stats.nbytes, store.stats.faults) == (0, 1)
    assert save(store, name_of(1))


@pytest.mark.parametrize("kind", [Kind.FAIL_OPEN, Kind.FAIL_READ])
def test_fault_while_reading_keeps_the_object(sound: BlobStore, kind: Kind) -> None:
    store = FaultyStore(sound, [Fault(kind, times=1)])
    save(store, name_of(1))
    with pytest.raises(StoreFault, match="injected"):
        load(store, name_of(1))
    assert load(store, name_of(1)) == rows_of(name_of(1))
    assert (store.stats.faults, store.stats.corrupt) == (1, 0)


def test_fault_of_a_line_lost_midway_lasts(sound: BlobStore) -> None:
    store = FaultyStore(sound)
    save(store, name_of(1))
    store.faults.append(Fault(Kind.LOST, after=2))
    with store.open(name_of(1)) as reader:
        assert [read_row(reader, row) for row in (0, 1)] == rows_of(name_of(1))[:2]
        for row in (2, 0):
            with pytest.raises(StoreFault, match="lost"):
                read_row(reader, row)
    for call in (lambda: store.lookup([name_of(1)]), lambda: store.open(name_of(1)), lambda: save(store, name_of(2))):
        with pytest.raises(StoreFault, match="lost"):
            call()
    store.faults.clear()
    assert load(store, name_of(1)) == rows_of(name_of(1))


def test_fault_of_a_slow_row_holds_up_nobody_else(sound: BlobStore) -> None:
    slow = Fault(Kind.SLOW, row=2)
    store = FaultyStore(sound, [slow])
    save(store, name_of(1))
    got: list[bytes] = []
    with store.open(name_of(1)) as reader:
        thread = threading.Thread(target=lambda: got.append(read_row(reader, 2)))
        thread.start()
        assert slow.reached.wait(10)
        assert read_row(reader, 0) == rows_of(name_of(1))[0]
        reader.close()  # the read under way ends first
        with pytest.raises(StoreError, match="closed"):
            read_row(reader, 0)
        slow.release.set()
        thread.join(10)
    assert got == [rows_of(name_of(1))[2]]


def test_fault_of_a_slow_write_does_not_outlive_its_draft(sound: BlobStore) -> None:
    slow = Fault(Kind.SLOW_WRITE, row=0)
    store = FaultyStore(sound, [slow])
    writer = store.create(name_of(1), [4], value=1, position=0)
    assert writer is not None
    thread = threading.Thread(target=lambda: writer.write(0, [memoryview(b"1234")]))
    thread.start()
    assert slow.reached.wait(10)
    writer.abort()
    assert store.stats.nbytes > 0  # still being written to: its file must not be another's by now
    slow.release.set()
    thread.join(10)
    assert store.stats.nbytes == 0


def test_corrupt_objects_are_named_in_the_log_and_do_not_fill_it(
    sound: BlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(sound, [Fault(Kind.FLIP_ROW)])
    with caplog.at_level(logging.WARNING, "hybridkv.store"):
        for number in range(9):
            save(store, name_of(number))
            with pytest.raises(CorruptObject):
                load(store, name_of(number))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    for record, number in zip(caplog.records, (1, 2, 4, 8), strict=True):
        assert name_of(number - 1).key in record.message
        assert f"so far: {number}" in record.message


def test_a_store_too_small_for_an_object_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(10_000)
    with caplog.at_level(logging.WARNING, "hybridkv.store"):
        assert not save(store, name_of(1))
        assert not save(store, name_of(2))
    [record] = caplog.records
    assert "give it a larger size" in record.message
