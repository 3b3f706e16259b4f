"""Tiers: reading from the fastest that can, moving up, writing through and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest

from hybridkv.store import (
    CorruptObject,
    FileStore,
    Guarded,
    MemoryStore,
    MissingObject,
    ObjectName,
    Store,
    StoreError,
    StoreFault,
    Tier,
    TieredStore,
    UnknownFormat,
    WritePolicy,
    Writer,
)
from tests.store.conformance import StoreConformance
from tests.store.faulty import Fault, FaultyStore, Kind
from tests.store.samples import NAMESPACE, ROWS, load, name_of, read_row, rows_of, save
from tests.store.versions import LATER, later, plant, raw_bytes

ONE = 8192
NAMES = [name_of(number) for number in range(12)]


class TestTwoTiers(StoreConformance):
    copies = 2

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return TieredStore([Tier(MemoryStore(16 << 20)), Tier(FileStore(tmp_path, 16 << 20))])


class TestThreeGuardedTiers(StoreConformance):
    copies = 3

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        stores = [MemoryStore(16 << 20), FileStore(tmp_path / "a", 16 << 20), FileStore(tmp_path / "b", 16 << 20)]
        return TieredStore([Tier(Guarded(store)) for store in stores])


def pair(
    upper: int = 1 << 20, lower: int = 1 << 20, write: WritePolicy = WritePolicy.THROUGH
) -> tuple[Store, Store, TieredStore]:
    above, below = MemoryStore(upper), MemoryStore(lower)
    return above, below, TieredStore([Tier(above, write), Tier(below)])


def test_objects_are_written_through() -> None:
    above, below, store = pair()
    save(store, NAMES[0])
    assert load(above, NAMES[0]) == load(below, NAMES[0]) == rows_of(NAMES[0])


def test_what_is_read_from_below_moves_up() -> None:
    above, below, store = pair()
    save(below, NAMES[0], value=7.0, position=9)
    assert store.lookup(NAMES[:2]) == [True, False]
    assert load(store, NAMES[0]) == rows_of(NAMES[0])
    store.drain()
    with above.open(NAMES[0]) as reader:
        assert (reader.header.value, reader.header.position) == (7.0, 9)
    assert store.stats.promoted == 1
    below.delete(NAMES)
    assert load(store, NAMES[0]) == rows_of(NAMES[0])


def test_looking_up_moves_nothing() -> None:
    above, below, store = pair()
    save(below, NAMES[0])
    store.lookup(NAMES)
    store.drain()
    assert list(above.objects()) == []


def test_only_the_lower_tier_is_written_where_the_upper_has_it() -> None:
    above, below, store = pair()
    save(above, NAMES[0])
    assert save(store, NAMES[0])
    assert below.lookup(NAMES[:1]) == [True]
    assert not save(store, NAMES[0])


def test_what_waits_to_move_up_is_bounded() -> None:
    slow = Fault(Kind.SLOW_WRITE)
    above, below = FaultyStore(MemoryStore(1 << 20), [slow]), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)], most_waiting_bytes=3 * ONE)
    for name in NAMES:
        save(below, name, [4096])
    for name in NAMES:
        load(store, name)
    assert store.stats.dropped == len(NAMES) - 3
    slow.release.set()
    store.drain()
    assert store.stats.promoted == above.stats.objects == 3
    load(store, NAMES[-1])
    store.drain()
    assert above.stats.objects == 4


def test_one_object_waits_once() -> None:
    slow = Fault(Kind.SLOW_WRITE)
    above, below = FaultyStore(MemoryStore(1 << 20), [slow]), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)])
    save(below, NAMES[0])
    for _ in range(5):
        load(store, NAMES[0])
    slow.release.set()
    store.drain()
    assert (store.stats.promoted, store.stats.dropped) == (1, 0)
    assert below.stats.opened == 5


def test_moving_up_reads_nothing_again() -> None:
    above, below, store = pair()
    save(below, NAMES[0])
    assert load(store, NAMES[0]) == rows_of(NAMES[0])
    store.drain()
    assert load(above, NAMES[0]) == rows_of(NAMES[0])
    assert (below.stats.opened, below.stats.read_bytes) == (1, sum(ROWS))
    load(store, NAMES[0])
    assert (below.stats.opened, below.stats.read_bytes) == (1, sum(ROWS))


def test_what_is_not_read_whole_stays_below_and_takes_no_room() -> None:
    above, below = MemoryStore(1 << 20), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)], most_waiting_bytes=5 * ONE)
    save(below, NAMES[0])
    for _ in range(5):
        with store.open(NAMES[0]) as reader:
            read_row(reader, 0)
            read_row(reader, 0)
    store.drain()
    assert list(above.objects()) == []
    assert (store.stats.promoted, store.stats.dropped) == (0, 0)
    load(store, NAMES[0])
    store.drain()
    assert above.lookup(NAMES[:1]) == [True]


def test_rows_read_by_several_threads_and_twice_move_up() -> None:
    above, below, store = pair()
    save(below, NAMES[0])
    with store.open(NAMES[0]) as reader, ThreadPoolExecutor(4) as pool:
        rows = [3, 1, 1, 0, 3, 2, 2]
        assert list(pool.map(partial(read_row, reader), rows)) == [rows_of(NAMES[0])[row] for row in rows]
    store.drain()
    assert load(above, NAMES[0]) == rows_of(NAMES[0])
    assert store.stats.promoted == 1


def test_what_is_open_keeps_no_store_from_closing() -> None:
    """Nor from taking down what has to go there."""
    above, below = MemoryStore(1 << 20), MemoryStore(1 << 20)
    store = TieredStore([Tier(above, WritePolicy.BACK), Tier(below)], most_waiting_bytes=1)
    save(below, NAMES[0])
    save(above, NAMES[1])
    saved: list[bool] = []
    below.close = lambda: saved.extend(below.lookup(NAMES[:2]))  # type: ignore[method-assign]
    reader = store.open(NAMES[0])
    store.drain()
    thread = Thread(target=store.close, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert saved == [True, True]
    assert read_row(reader, 0) == rows_of(NAMES[0])[0]
    for row in (1, 2, 3):
        read_row(reader, row)
    reader.close()
    assert store.stats.promoted == 0


def test_a_store_closes_while_threads_still_write_and_read() -> None:
    above, below = MemoryStore(4 * ONE), MemoryStore(1 << 26)
    store = TieredStore([Tier(above, WritePolicy.BACK), Tier(below)], most_waiting_bytes=40 * ONE)
    lower, is_over = below.create, Event()

    def create(name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        time.sleep(0.002)
        return lower(name, row_bytes, value=value, position=position)

    below.create = create  # type: ignore[method-assign]

    def write(seed: int) -> None:
        for number in count(seed, 8):
            if is_over.is_set():
                return
            save(store, name_of(number), [4096])
            time.sleep(0.001)

    threads = [Thread(target=write, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    closing = Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(5)
    is_closed = not closing.is_alive()
    is_over.set()
    assert is_closed


def test_what_is_being_read_loses_nothing_of_what_goes_down() -> None:
    above, below = MemoryStore(4 * ONE), MemoryStore(1 << 20)
    store = TieredStore([Tier(above, WritePolicy.BACK), Tier(below)], most_waiting_bytes=3 * ONE)
    save(below, NAMES[0], [4096 * 5])
    with store.open(NAMES[0]):
        for name in NAMES[1:]:
            assert save(store, name, [4096])
            store.drain()
    assert store.lookup(NAMES) == [True] * len(NAMES)
    assert store.stats.dropped == 0


def test_no_memory_for_a_copy_is_no_trouble_for_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    above, below, store = pair()
    save(below, NAMES[0])
    with monkeypatch.context() as patch:
        patch.setattr("hybridkv.store.tiers.promotion.gather", full)
        assert load(store, NAMES[0]) == rows_of(NAMES[0])
    store.drain()
    assert list(above.objects()) == []


def test_back_keeps_new_objects_above_until_they_are_evicted() -> None:
    above, below, store = pair(upper=4 * ONE, write=WritePolicy.BACK)
    for name in NAMES[:4]:
        assert save(store, name, [4096])
    assert list(below.objects()) == []
    for name in NAMES[4:]:
        assert save(store, name, [4096])
    store.drain()
    gone = [name for name, there in zip(NAMES, above.lookup(NAMES), strict=True) if not there]
    assert len(gone) >= 8
    assert all(load(below, name) == rows_of(name, [4096]) for name in gone)
    assert store.lookup(NAMES) == [True] * 12


def test_back_takes_everything_down_at_the_end(tmp_path: Path) -> None:
    store = TieredStore([Tier(MemoryStore(1 << 20), WritePolicy.BACK), Tier(FileStore(tmp_path, 1 << 20))])
    for name in NAMES:
        save(store, name, [4096])
    store.close()
    below = FileStore(tmp_path, 1 << 20)
    assert [load(below, name) for name in NAMES] == [rows_of(name, [4096]) for name in NAMES]


def test_back_from_files_takes_evicted_ones_down(tmp_path: Path) -> None:
    above, below = FileStore(tmp_path, 4 * ONE), MemoryStore(1 << 20)
    store = TieredStore([Tier(above, WritePolicy.BACK), Tier(below)])
    for name in NAMES:
        assert save(store, name, [4096])
    store.drain()
    assert above.stats.evicted >= 8
    assert store.lookup(NAMES) == [True] * 12
    for name in NAMES:
        assert load(store, name) == rows_of(name, [4096])
        store.drain()  # what moves up sends another down, and that one is in neither for a moment


@pytest.mark.parametrize("kind", [Kind.FLIP_HEADER, Kind.FLIP_ROW, Kind.FAIL_OPEN, Kind.FAIL_READ, Kind.MISSING])
def test_fault_above_is_made_good_from_below(kind: Kind) -> None:
    above, below = FaultyStore(MemoryStore(1 << 20)), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)])
    save(store, NAMES[0])
    above.faults.append(Fault(kind))
    assert load(store, NAMES[0]) == rows_of(NAMES[0])


def test_fault_in_all_tiers_is_told() -> None:
    tiers = [FaultyStore(MemoryStore(1 << 20)) for _ in range(2)]
    store = TieredStore([Tier(tier) for tier in tiers])
    save(store, NAMES[0])
    for tier in tiers:
        tier.faults.append(Fault(Kind.FLIP_ROW, row=1))
    with pytest.raises(CorruptObject):
        load(store, NAMES[0])
    assert store.stats.corrupt == 2
    with pytest.raises(MissingObject):
        store.open(NAMES[0])


@pytest.mark.parametrize("kind", LATER)
def test_an_object_of_a_later_version_above_is_made_good_from_below(kind: str) -> None:
    above, below, store = pair()
    raw = later(NAMES[0], kind)
    plant(above, NAMES[0], raw)
    save(below, NAMES[0])
    for _ in range(2):
        assert load(store, NAMES[0]) == rows_of(NAMES[0])
        store.drain()
    assert (store.stats.unknown, store.stats.promoted) == (2, 0)
    assert raw_bytes(above, NAMES[0]) == raw


@pytest.mark.parametrize("level", [0, 1])
def test_an_object_of_a_later_version_is_named_where_no_other_tier_has_one(level: int) -> None:
    above, below, store = pair()
    plant((above, below)[level], NAMES[0], later(NAMES[0], "version"))
    with pytest.raises(UnknownFormat):
        store.open(NAMES[0])


@pytest.mark.parametrize("kind", LATER)
def test_write_back_leaves_objects_of_later_versions_where_they_are(tmp_path: Path, kind: str) -> None:
    above, below = FileStore(tmp_path, 1 << 20), MemoryStore(1 << 20)
    store = TieredStore([Tier(above, WritePolicy.BACK), Tier(below)])
    raw = later(NAMES[0], kind)
    plant(above, NAMES[0], raw)
    store.close()
    with FileStore(tmp_path, 1 << 20) as above:
        assert raw_bytes(above, NAMES[0]) == raw


@pytest.mark.parametrize("kind", LATER)
def test_an_evicted_object_of_a_later_version_is_not_copied_down(kind: str) -> None:
    above, below, store = pair(write=WritePolicy.BACK)
    plant(above, NAMES[0], later(NAMES[0], kind))
    save(store, NAMES[1])
    above.shrink(0)
    store.drain()
    assert (above.stats.objects, above.stats.faults) == (0, 0)
    assert below.lookup(NAMES[:2]) == [False, True]


@pytest.mark.parametrize("kind", [Kind.FAIL_WRITE, Kind.FAIL_COMMIT])
def test_fault_of_one_tier_does_not_keep_the_other_from_saving(kind: Kind) -> None:
    above, below = MemoryStore(1 << 20), FaultyStore(MemoryStore(1 << 20), [Fault(kind)])
    store = TieredStore([Tier(above), Tier(below)])
    assert save(store, NAMES[0])
    assert load(store, NAMES[0]) == rows_of(NAMES[0])
    assert (below.stats.objects, below.stats.nbytes) == (0, 0)


def test_fault_of_every_tier_while_writing_is_told() -> None:
    tiers = [FaultyStore(MemoryStore(1 << 20), [Fault(Kind.FAIL_WRITE, row=2)]) for _ in range(2)]
    store = TieredStore([Tier(tier) for tier in tiers])
    with pytest.raises(StoreFault):
        save(store, NAMES[0])
    assert (store.stats.nbytes, store.stats.saved) == (0, 0)


def test_fault_while_moving_up_is_forgotten() -> None:
    above, below = FaultyStore(MemoryStore(1 << 20), [Fault(Kind.FAIL_WRITE)]), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)])
    save(below, NAMES[0])
    assert load(store, NAMES[0]) == rows_of(NAMES[0])
    store.close()
    assert store.stats.promoted == 0


@pytest.mark.parametrize("lost", [0, 1])
def test_fault_at_the_end_does_not_keep_the_store_from_closing(lost: int) -> None:
    tiers = [FaultyStore(MemoryStore(1 << 20)) for _ in range(2)]
    store = TieredStore([Tier(Guarded(tiers[0]), WritePolicy.BACK), Tier(Guarded(tiers[1]))])
    save(store, NAMES[0])
    tiers[lost].faults.append(Fault(Kind.LOST))
    store.close()
    assert tiers[1].store.lookup(NAMES[:1]) == [False]


def test_a_tier_that_rests_is_left_out() -> None:
    above, below = MemoryStore(1 << 20), FaultyStore(MemoryStore(1 << 20), [Fault(Kind.LOST)])
    store = TieredStore([Tier(Guarded(above)), Tier(Guarded(below))])
    assert save(store, NAMES[0])
    assert store.lookup(NAMES[:2]) == [True, False]
    store.describe(NAMESPACE, {"model": "m"})
    assert store.descriptions() == {NAMESPACE: {"model": "m"}}


def test_there_is_at_least_one_tier() -> None:
    with pytest.raises(StoreError, match="at least one"):
        TieredStore([])
