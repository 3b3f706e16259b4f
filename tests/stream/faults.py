"""Stores for streams: one whose bad rows leave garbage behind, copies of filled ones, and what lies in them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridkv.store import MemoryStore, ObjectName, StoreFault
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob
from hybridkv.store.memory import MemoryBlobs
from tests.store.faulty import Fault, FaultyBlob, FaultyBlobs, FaultyStore, Kind

SIZE = 64 << 20
NOT_A_NUMBER = 0xFF
"""Bytes of this value are NaN in every floating type: what reads them knows."""

_BAD_ROWS = (Kind.FLIP_ROW, Kind.SHORT_ROW, Kind.FAIL_READ)


class GarbageStore(FaultyStore):
    """A row that fails has filled its buffers with NaN before anyone notices."""

    def __init__(self, store: BlobStore, faults: Sequence[Fault] = ()) -> None:
        super().__init__(store, faults)
        self._faulty = GarbageBlobs(store.blobs, self.faults)
        self.blobs = self._faulty


class GarbageBlobs(FaultyBlobs):
    def wrap(self, name: ObjectName, blob: Blob) -> Blob:
        return GarbageBlob(self, name, FaultyBlob(self, name, blob))


class GarbageBlob(Blob):
    def __init__(self, blobs: GarbageBlobs, name: ObjectName, blob: FaultyBlob) -> None:
        self.nbytes = blob.nbytes
        self._blobs, self._name, self._blob = blobs, name, blob

    def read_at(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> int:
        row = bisect_right(self._blob._offsets, offset) - 1
        kind = next((k for k in _BAD_ROWS if row >= 0 and self._blobs.strikes(k, self._name.group, row)), None)
        if kind is None:
            return self._blob.read_at(offset, buffers, nbytes)
        for buffer in buffers:
            buffer[:] = bytes([NOT_A_NUMBER]) * len(buffer)
        if kind is Kind.FAIL_READ:
            raise StoreFault("injected: garbage, then a fault")
        return nbytes - (kind is Kind.SHORT_ROW)

    def close(self) -> None:
        self._blob.close()


def copy_of(store: BlobStore) -> MemoryStore:
    """Another store in memory with the same objects: what happens to one does not happen to the other."""
    copy = MemoryStore(SIZE)
    assert isinstance(store.blobs, MemoryBlobs)
    assert isinstance(copy.blobs, MemoryBlobs)
    copy.blobs._entries = dict(store.blobs._entries)
    copy.blobs._used = store.blobs._used
    return copy


def contents(store: BlobStore) -> dict[ObjectName, list[npt.NDArray[np.float32]]]:
    """Every object with its rows, read and checked."""
    found = {}
    for stored in store.objects():
        with store.open(stored.name) as reader:
            rows = []
            for number, row in enumerate(reader.header.rows):
                raw = bytearray(row.nbytes)
                reader.read(number, [memoryview(raw)])
                rows.append(np.frombuffer(raw, dtype=np.float32))
        found[stored.name] = rows
    return found


def check_same(store: BlobStore, reference: BlobStore, tolerance: float = 1e-3) -> None:
    """Nothing is in the store that the reference has not, and what both have is the same."""
    right = contents(reference)
    for name, rows in contents(store).items():
        assert name in right, f"{name} is in no clean store"
        for row, expected in zip(rows, right[name], strict=True):
            np.testing.assert_allclose(row, expected, atol=tolerance, err_msg=str(name))
