"""Spare objects: they fill idle room of a memory store, and are never in the way of others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from hybridkv.store import (
    FileStore,
    Guarded,
    MemoryStore,
    ObjectName,
    Store,
    StoreInputError,
    Tier,
    TieredStore,
    WritePolicy,
)
from hybridkv.store.eviction import Evictable, ranked, spare_limit
from tests.store.faulty import Fault, FaultyStore, Kind
from tests.store.samples import load, name_of, rows_of, save

ONE = 8192
"""Bytes of an object with one row of 4096: the header takes as much."""


def fill(store: Store, name: ObjectName) -> bool:
    """Save a spare object. False: the store did not want it."""
    writer = store.create_spare(name, [4096], value=1.0, position=256)
    if writer is None:
        return False
    with writer:
        writer.write(0, [memoryview(rows_of(name, [4096])[0])])
        return writer.commit()


def held(store: Store) -> list[int]:
    return [number for number in range(100) if store.lookup([name_of(number)]) == [True]]


class Clock:
    """A second later at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def store_of(num_objects: int) -> MemoryStore:
    """It has room for half an object more, so that one eviction makes room for one object."""
    return MemoryStore(num_objects * ONE + ONE // 2, Clock())


def test_spare_objects_fill_idle_room_and_are_read_like_others() -> None:
    store = store_of(4)
    assert store.idle_bytes == spare_limit(store.size)
    assert save(store, name_of(0), [4096])
    assert [fill(store, name_of(number)) for number in (1, 2, 3)] == [True] * 3
    assert load(store, name_of(2)) == rows_of(name_of(2), [4096])
    assert store.stats.nbytes == 4 * ONE
    assert store.stats.spare_bytes == 3 * ONE
    assert store.idle_bytes == spare_limit(store.size) - ONE
    assert [stored.is_spare for stored in store.objects()] == [False, True, True, True]
    assert not fill(store, name_of(1)), "it exists"


def test_a_spare_object_evicts_only_older_spare_ones() -> None:
    store = store_of(3)
    save(store, name_of(0), [4096])
    for number in range(1, 10):
        assert fill(store, name_of(number))
    assert held(store) == [0, 8, 9]
    save(store, name_of(50), [4096])
    save(store, name_of(51), [4096])
    assert held(store) == [0, 50, 51]
    assert not fill(store, name_of(60))
    assert store.idle_bytes < ONE
    assert store.create_spare(name_of(61), [4 * ONE], value=1.0, position=1) is None, "larger than the store"
    assert (store.stats.evicted, store.stats.dropped) == (0, 0), "no object of value was lost"


def test_others_evict_spare_objects_first_however_old_they_are() -> None:
    store = store_of(4)
    old = [name_of(number) for number in (0, 1)]
    for name in old:
        save(store, name, [4096])
    store.blobs._clock.now += 1e6  # type: ignore[attr-defined]
    fill(store, name_of(2))
    fill(store, name_of(3))
    save(store, name_of(4), [4096])
    save(store, name_of(5), [4096])
    assert held(store) == [0, 1, 4, 5]
    assert store.stats.evicted == 0
    save(store, name_of(6), [4096])
    assert held(store) == [1, 4, 5, 6]
    assert store.stats.evicted == 1


def test_spare_objects_go_even_if_they_do_not_suffice() -> None:
    store = store_of(4)
    for number in range(2):
        save(store, name_of(number), [4096])
    store.blobs._clock.now += 1e6  # type: ignore[attr-defined]
    fill(store, name_of(2))
    save(store, name_of(3), [4096])
    assert save(store, name_of(10), [ONE + 4096])
    assert held(store) == [1, 3, 10]
    assert (store.stats.evicted, store.stats.spare_bytes) == (1, 0)


def test_a_32nd_is_left_free() -> None:
    """More than is freed at a time: spare objects do not come back right after others have gone."""
    store = MemoryStore(64 * ONE, Clock())
    for number in range(70):
        assert fill(store, name_of(number))
    assert store.stats.nbytes == 62 * ONE
    for number in range(64):
        save(store, name_of(number), [4096])
    assert (store.stats.nbytes, store.idle_bytes) == (64 * ONE, 0)
    save(store, name_of(90), [4096])
    assert store.stats.evicted == 2
    assert not fill(store, name_of(91))


@pytest.mark.parametrize("how", ["touch", "create", "race"])
def test_a_spare_object_that_is_wanted_becomes_a_normal_one(how: str) -> None:
    store = store_of(2)
    late = store.create(name_of(0), [4096], value=1.0, position=256) if how == "race" else None
    fill(store, name_of(0))
    if how == "touch":
        store.touch([name_of(0), name_of(7)])
    elif how == "create":
        assert not save(store, name_of(0), [4096]), "it exists"
    else:
        assert late is not None
        late.write(0, [memoryview(rows_of(name_of(0), [4096])[0])])
        assert not late.commit()
    assert store.stats.spare_bytes == 0
    fill(store, name_of(1))
    save(store, name_of(2), [4096])
    assert held(store) == [0, 2]
    assert not fill(store, name_of(3))


def test_a_spare_object_gives_back_its_room() -> None:
    store = store_of(2)
    fill(store, name_of(0))
    store.delete([name_of(0)])
    assert (store.idle_bytes, store.stats.spare_bytes) == (spare_limit(store.size), 0)
    writer = store.create_spare(name_of(1), [4096], value=1.0, position=1)
    assert writer is not None
    assert store.idle_bytes == spare_limit(store.size) - ONE, "what is being written is not idle"
    writer.abort()
    assert store.idle_bytes == spare_limit(store.size)
    fill(store, name_of(2))
    assert store.shrink(0) == 1
    assert store.stats.spare_bytes == 0
    with pytest.raises(StoreInputError):
        store.create_spare(name_of(3), [4096], value=-1.0, position=1)


def test_a_spare_object_that_is_being_written_gives_way() -> None:
    """Its writer learns it at the end. Its room is counted once, however it ends."""
    store = store_of(2)
    save(store, name_of(0), [4096])
    for end in ("commit", "abort"):
        writer = store.create_spare(name_of(1), [4096], value=1.0, position=1)
        assert writer is not None
        assert save(store, name_of(2), [4096])
        assert held(store) == [0, 2]
        assert (store.stats.evicted, store.stats.dropped) == (0, 0)
        assert not len(writer._pending_blob._entry.data), "its memory is free at once"  # type: ignore[attr-defined]
        writer.write(0, [memoryview(rows_of(name_of(1), [4096])[0])])
        if end == "commit":
            assert not writer.commit()
        writer.abort()
        assert held(store) == [0, 2]
        assert store.stats.nbytes == 2 * ONE
        store.delete([name_of(2)])
    assert store.idle_bytes == spare_limit(store.size) - ONE
    assert fill(store, name_of(3))


def test_of_two_equal_spare_objects_one_is_kept_and_stays_spare() -> None:
    store = store_of(3)
    writers = [store.create_spare(name_of(0), [4096], value=1.0, position=1) for _ in range(2)]
    for writer, is_kept in zip(writers, (True, False), strict=True):
        assert writer is not None
        writer.write(0, [memoryview(rows_of(name_of(0), [4096])[0])])
        assert writer.commit() == is_kept
    assert (store.stats.nbytes, store.stats.spare_bytes) == (ONE, ONE)


def test_no_normal_object_goes_for_a_spare_one_when_the_store_shrinks() -> None:
    store = store_of(4)
    for number in range(2):
        save(store, name_of(number), [4096])
    fill(store, name_of(2))
    writer = store.create_spare(name_of(3), [4096], value=1.0, position=1)
    assert writer is not None
    assert store.shrink(3 * ONE) == 1
    assert held(store) == [0, 1]
    assert store.shrink(2 * ONE) == 0
    writer.write(0, [memoryview(rows_of(name_of(3), [4096])[0])])
    assert not writer.commit()
    assert held(store) == [0, 1]
    assert store.stats.nbytes == 2 * ONE


def test_no_normal_object_goes_for_slack_alone() -> None:
    """The room of a spare object suffices. More is freed at a time only where normal objects must go anyway."""
    store = MemoryStore(4 * ONE + 4 * ONE // 31, Clock())
    for number in range(3):
        save(store, name_of(number), [4096])
    assert fill(store, name_of(50))
    save(store, name_of(3), [4096])
    assert held(store) == [0, 1, 2, 3]
    assert store.stats.evicted == 0


def test_the_last_spare_object_suffices() -> None:
    """It is all that goes, although that is less than what is freed at a time."""
    store = MemoryStore(66 * ONE, Clock())
    assert fill(store, name_of(99))
    for number in range(66):
        assert save(store, name_of(number), [4096])
    assert held(store) == [*range(66)]
    assert store.stats.evicted == 0


def test_a_spare_object_is_written_on_if_others_suffice() -> None:
    store = store_of(3)
    fill(store, name_of(0))
    writer = store.create_spare(name_of(1), [4096], value=1.0, position=1)
    assert writer is not None
    for number in (2, 3):
        save(store, name_of(number), [4096])
    writer.write(0, [memoryview(rows_of(name_of(1), [4096])[0])])
    assert writer.commit()
    assert held(store) == [1, 2, 3]


def test_a_spare_object_gives_way_from_the_very_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread saves a normal object while memory for the spare one is allocated."""
    store = store_of(2)
    save(store, name_of(0), [4096])
    allocate = np.empty
    others = [name_of(2)]

    def slow(*args: Any) -> Any:
        if others and args[0]:
            save(store, others.pop(), [4096])
        return allocate(*args)

    monkeypatch.setattr("hybridkv.store.memory.np.empty", slow)
    writer = store.create_spare(name_of(1), [4096], value=1.0, position=1)
    assert writer is not None
    assert held(store) == [0, 2]
    writer.abort()
    assert (store.stats.evicted, store.stats.nbytes) == (0, 2 * ONE)


def test_without_memory_for_a_spare_object_others_are_still_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = store_of(4)
    store = Guarded(inner, clock=lambda: 0.0)
    allocate = np.empty

    def refuse(*args: Any) -> Any:
        if args[0]:
            raise MemoryError
        return allocate(*args)

    with monkeypatch.context() as patch:
        patch.setattr("hybridkv.store.memory.np.empty", refuse)
        assert not fill(store, name_of(0))
    assert (inner.stats.nbytes, inner.stats.spare_bytes, inner.idle_bytes) == (0, 0, spare_limit(inner.size))
    assert save(store, name_of(1), [4096])
    assert store.stats.skipped == 0


def test_eviction_for_spare_objects_looks_at_no_normal_ones_and_not_at_each_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store of many objects does not stop while it chooses what goes for a spare one."""
    store, looked_at = store_of(320), list[int]()

    def count(candidates: Sequence[Evictable], now: float) -> list[Evictable]:
        looked_at.append(len(candidates))
        return ranked(candidates, now)

    for number in range(50):
        save(store, name_of(number), [4096])
    for number in range(50, 310):
        assert fill(store, name_of(number))
    monkeypatch.setattr("hybridkv.store.memory.ranked", count)
    for number in range(310, 340):
        assert fill(store, name_of(number))
    assert looked_at == [260] * 5, "a 64th of the store is freed at a time: six objects"


def test_threads_that_fill_cost_no_normal_object() -> None:
    """Eight normal objects come and go in a store for nine. None is ever evicted, whatever is filled meanwhile."""
    store, is_over = MemoryStore(9 * ONE + 9 * ONE // 31), Event()

    def fill_on(seed: int) -> None:
        source = random.Random(seed)
        while not is_over.is_set():
            number = source.randrange(60, 99)
            fill(store, name_of(number))
            if source.random() < 0.2:
                store.delete([name_of(number)])

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(fill_on, seed) for seed in range(3)]
        for turn in range(400):
            save(store, name_of(turn % 8), [4096])
            if turn >= 7:
                store.delete([name_of((turn + 1) % 8)])
        is_over.set()
    assert [future.result() for future in futures] == [None] * 3
    assert (store.stats.evicted, store.stats.dropped) == (0, 0)
    assert store.stats.nbytes == len(held(store)) * ONE


def test_disks_are_not_filled(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 16 << 20)
    assert store.idle_bytes == 0
    assert not fill(store, name_of(0))
    tiers = TieredStore([Tier(store), Tier(MemoryStore(1 << 20))])
    assert tiers.idle_bytes == 0, "only the fastest tier counts"
    assert not fill(tiers, name_of(0))
    tiers.close()


@pytest.mark.parametrize("write", list(WritePolicy))
def test_tiers_keep_spare_objects_in_the_fastest(write: WritePolicy, tmp_path: Path) -> None:
    above, below = store_of(3), FileStore(tmp_path, 1 << 20)
    store = TieredStore([Tier(Guarded(above), write), Tier(below)])
    assert store.idle_bytes == spare_limit(above.size)
    for number in range(3):
        assert fill(store, name_of(number))
    assert store.stats.saved == 3
    assert store.stats.spare_bytes == 3 * ONE
    store.touch([name_of(0)])
    for number in range(10, 13):
        save(store, name_of(number), [4096])
    store.drain()
    assert held(above) == [10, 11, 12]
    assert held(below) == ([0] if write is WritePolicy.BACK else [10, 11, 12]), "only what was used goes down"
    above.delete([name_of(10)])
    fill(store, name_of(5))
    store.close()
    assert 5 not in held(FileStore(tmp_path, 1 << 20)), "nor does it go down at the end"
    assert not fill(store, name_of(6)), "it is closed"


def test_a_store_that_rests_is_not_filled() -> None:
    faulty = FaultyStore(MemoryStore(1 << 20), [Fault(Kind.FAIL_CREATE)])
    store = Guarded(faulty, clock=lambda: 0.0)
    assert not save(store, name_of(0), [4096])
    assert not fill(store, name_of(1))
    assert store.stats.skipped == 1


@pytest.mark.parametrize("seed", range(20))
def test_random_lives(seed: int) -> None:
    """No spare object ever costs a normal one, and the books are right after each call."""
    source, size = random.Random(seed), 12
    store = store_of(size)
    normal, spare = set[int](), set[int]()
    for _ in range(300):
        number, what = source.randrange(40), source.random()
        before, was_idle = set(held(store)), store.idle_bytes
        if what < 0.35:
            saved = save(store, name_of(number), [4096])
            assert saved == (number not in before)
            normal.add(number)
            spare.discard(number)
        elif what < 0.75:
            saved = fill(store, name_of(number))
            assert saved == (number not in before and was_idle >= ONE)
            spare |= {number} if saved else set()
            assert normal & before <= set(held(store)), "a normal object made room for a spare one"
        elif what < 0.85:
            store.touch([name_of(number)])
            if number in before:
                normal.add(number)
                spare.discard(number)
        else:
            store.delete([name_of(number)])
        now = set(held(store))
        lost = (normal & before) - now
        if what < 0.35 and lost:
            assert not spare & now, "a normal object went while there were spare ones"
        normal &= now
        spare &= now
        assert normal | spare == now
        assert store.stats.nbytes == len(now) * ONE <= size * ONE
        assert store.stats.spare_bytes == len(spare) * ONE
        assert store.idle_bytes == spare_limit(store.size) - len(normal) * ONE
