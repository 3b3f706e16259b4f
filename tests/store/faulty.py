"""A store that fails on demand, below the checks: what it does to bytes is noticed by the real code, or not at all.

    store = FaultyStore(MemoryStore(1 << 20), [Fault(Kind.FLIP_ROW, group="state", row=1)])

`store.faults` may be changed at any time. Each fault counts how often it struck.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from hybridkv.store import MissingObject, ObjectName, Stored, StoreFault, UnknownFormat, Writer
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage, header_of
from hybridkv.store.objects import layout
from hybridkv.store.store import Leftovers


class Kind(Enum):
    MISSING = auto()
    """Found by lookup, gone when opened."""
    SHORT_ROW = auto()
    FLIP_HEADER = auto()
    FLIP_ROW = auto()
    SLOW = auto()
    """Reading a row waits for `release`."""
    SLOW_WRITE = auto()
    FAIL_LOOKUP = auto()
    FAIL_OPEN = auto()
    FAIL_CREATE = auto()
    FAIL_READ = auto()
    FAIL_WRITE = auto()
    FAIL_COMMIT = auto()
    LOST = auto()
    """After `after` rows nothing works any more, for anyone, until the fault is removed."""


@dataclass(eq=False)
class Fault:
    kind: Kind
    group: str | Callable[[str], bool] | None = None
    """Of the objects it strikes; None: all."""
    row: int | None = None
    """None: every row."""
    times: int | None = None
    """None: always."""
    after: int = 0
    struck: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when it strikes for the first time."""
    release: threading.Event = field(default_factory=threading.Event)
    rows_moved: int = 0

    def concerns(self, group: str) -> bool:
        return self.group is None or (self.group == group if isinstance(self.group, str) else self.group(group))


class FaultyStore(BlobStore):
    def __init__(self, store: BlobStore, faults: Sequence[Fault] = ()) -> None:
        self.faults = list(faults)
        self.store = store
        self._faulty = FaultyBlobs(store.blobs, self.faults)
        super().__init__(self._faulty)

    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        self._faulty.offsets[name] = layout(name.group, row_bytes).offsets
        return super().create(name, row_bytes, value=value, position=position)

    def create_spare(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        self._faulty.offsets[name] = layout(name.group, row_bytes).offsets
        return super().create_spare(name, row_bytes, value=value, position=position)


class FaultyBlobs(Blobs):
    def __init__(self, blobs: Blobs, faults: list[Fault]) -> None:
        self._blobs = blobs
        self._faults = faults
        self._lock = threading.Lock()
        self.offsets: dict[ObjectName, tuple[int, ...]] = {}
        blobs.on_evict = self._evicted

    def strikes(self, kind: Kind, group: str, row: int | None = None) -> Fault | None:
        """The first fault of this kind that is due, counted."""
        with self._lock:
            for fault in self._faults:
                spent = fault.times is not None and fault.struck >= fault.times
                if fault.kind is kind and fault.concerns(group) and fault.row in (None, row) and not spent:
                    fault.struck += 1
                    fault.reached.set()
                    return fault
        return None

    def check(self, kind: Kind, group: str, row: int | None = None) -> None:
        self.check_line(moved=row is not None)
        if self.strikes(kind, group, row):
            raise StoreFault(f"injected: {kind.name}")

    def check_line(self, *, moved: bool) -> None:
        with self._lock:
            for fault in self._faults:
                if fault.kind is Kind.LOST:
                    if fault.rows_moved >= fault.after:
                        fault.struck += 1
                        fault.reached.set()
                        raise StoreFault("injected: connection lost")
                    fault.rows_moved += moved

    @property
    def evicted(self) -> int:  # type: ignore[override]
        return self._blobs.evicted

    @property
    def dropped(self) -> int:  # type: ignore[override]
        return self._blobs.dropped

    @property
    def spare_bytes(self) -> int:  # type: ignore[override]
        return self._blobs.spare_bytes

    @property
    def idle_bytes(self) -> int:
        return self._blobs.idle_bytes

    def wrap(self, name: ObjectName, blob: Blob) -> Blob:
        return FaultyBlob(self, name, blob)

    def _evicted(self, name: ObjectName, blob: Blob) -> None:
        """Also what is evicted may be read badly."""
        if self.on_evict is None:
            blob.close()
        else:
            self.on_evict(name, self.wrap(name, blob))

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        for group in dict.fromkeys(name.group for name in names):
            self.check(Kind.FAIL_LOOKUP, group)
        return self._blobs.lookup(names)

    def open(self, name: ObjectName) -> Blob:
        self.check(Kind.FAIL_OPEN, name.group)
        if self.strikes(Kind.MISSING, name.group):
            raise MissingObject(f"{name}: injected")
        return self.wrap(name, self._blobs.open(name))

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        self.check(Kind.FAIL_CREATE, name.group)
        pending = self._blobs.begin(name, nbytes, value, position)
        return None if pending is None else FaultyPendingBlob(self, name, pending)

    def begin_spare(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        self.check(Kind.FAIL_CREATE, name.group)
        pending = self._blobs.begin_spare(name, nbytes, value, position)
        return None if pending is None else FaultyPendingBlob(self, name, pending)

    def delete(self, names: Sequence[ObjectName]) -> int:
        return self._blobs.delete(names)

    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        self.check_line(moved=False)
        return self._blobs.objects(namespace, group)

    def touch(self, names: Sequence[ObjectName]) -> None:
        self.check_line(moved=False)
        self._blobs.touch(names)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        self.check_line(moved=False)
        self._blobs.describe(namespace, info)

    def descriptions(self) -> dict[str, dict[str, str]]:
        return self._blobs.descriptions()

    def usage(self) -> Usage:
        return self._blobs.usage()

    def collect(self) -> Leftovers:
        return self._blobs.collect()

    def shrink(self, nbytes: int) -> int:
        return self._blobs.shrink(nbytes)

    def close(self) -> None:
        self._blobs.close()


class FaultyBlob(Blob):
    def __init__(self, blobs: FaultyBlobs, name: ObjectName, blob: Blob) -> None:
        self.nbytes = blob.nbytes
        self._blobs = blobs
        self._name = name
        self._blob = blob
        try:
            self._offsets = [row.offset for row in header_of(name, blob).rows]
        except UnknownFormat:  # the store refuses it; no row of it is ever read
            self._offsets = []

    def read_at(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> int:
        group = self._name.group
        row = bisect_right(self._offsets, offset) - 1
        if row < 0:
            self._blobs.check_line(moved=False)
            found = self._blob.read_at(offset, buffers, nbytes)
            if self._blobs.strikes(Kind.FLIP_HEADER, group):
                buffers[0][len(buffers[0]) // 64] ^= 4
            return found
        slow = self._blobs.strikes(Kind.SLOW, group, row)
        if slow is not None:
            slow.release.wait()
        self._blobs.check(Kind.FAIL_READ, group, row)
        found = self._blob.read_at(offset, buffers, nbytes)
        if self._blobs.strikes(Kind.FLIP_ROW, group, row):
            buffers[-1][-1] ^= 1
        return found - 1 if self._blobs.strikes(Kind.SHORT_ROW, group, row) else found

    def close(self) -> None:
        self._blob.close()


class FaultyPendingBlob(PendingBlob):
    def __init__(self, blobs: FaultyBlobs, name: ObjectName, pending: PendingBlob) -> None:
        self._blobs = blobs
        self._name = name
        self._pending_blob = pending

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        row = bisect_right(self._blobs.offsets.get(self._name, ()), offset) - 1
        if row >= 0:
            slow = self._blobs.strikes(Kind.SLOW_WRITE, self._name.group, row)
            if slow is not None:
                slow.release.wait()
            self._blobs.check(Kind.FAIL_WRITE, self._name.group, row)
        self._pending_blob.write_at(offset, buffers)

    def publish(self) -> bool:
        self._blobs.check(Kind.FAIL_COMMIT, self._name.group)
        return self._pending_blob.publish()

    def discard(self) -> None:
        self._pending_blob.discard()
