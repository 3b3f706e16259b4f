"""The memory store: conformance, its limit, and that it keeps copies."""

from __future__ import annotations

import pytest

from hybridkv.errors import HybridKVError
from hybridkv.store import MemoryStore, Store
from tests.store.conformance import StoreConformance
from tests.store.samples import load, name_of, rows_of, save

ONE = 8192
"""Bytes of an object with one row of 4096: the header takes as much."""


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(16 << 20)


def test_it_keeps_copies() -> None:
    store, data = MemoryStore(1 << 20), bytearray(b"abcd")
    writer = store.create(name_of(1), [4], value=1, position=0)
    assert writer is not None
    with writer:
        writer.write(0, [memoryview(data)])
        data[:] = b"efgh"
        writer.commit()
    assert load(store, name_of(1)) == [b"abcd"]


def test_its_size_is_never_exceeded() -> None:
    store = MemoryStore(10 * ONE)
    for number in range(30):
        assert save(store, name_of(number), [4096])
        assert store.stats.nbytes <= 10 * ONE
    assert store.stats.evicted >= 20
    assert load(store, name_of(29)) == rows_of(name_of(29), [4096])


def test_what_can_never_fit_is_dropped_without_evicting() -> None:
    store = MemoryStore(2 * ONE)
    save(store, name_of(1), [4096])
    assert store.create(name_of(2), [3 * ONE], value=1, position=0) is None
    assert store.stats.dropped == 1
    assert store.lookup([name_of(1)]) == [True]


def test_objects_being_written_count() -> None:
    store = MemoryStore(2 * ONE)
    writers = [store.create(name_of(number), [4096], value=1, position=0) for number in range(3)]
    assert [writer is not None for writer in writers] == [True, True, False]
    for writer in writers[:2]:
        assert writer is not None
        writer.abort()
    assert save(store, name_of(3), [4096])


def test_a_store_without_room_is_refused() -> None:
    with pytest.raises(HybridKVError, match="size"):
        MemoryStore(0)
