"""Blobs in this process's memory, bounded in bytes. Writes are copied, so callers may reuse their buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt

from hybridkv.errors import MissingObject, StoreFault, StoreInputError
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage
from hybridkv.store.buffers import Buffers, gather, scatter, total
from hybridkv.store.eviction import Evictable, chosen, ranked, spare_limit, with_slack
from hybridkv.store.names import ObjectName
from hybridkv.store.store import Leftovers, Stored

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Entry:
    nbytes: int
    value: float
    position: int
    used_at: float
    is_spare: bool
    is_cancelled: bool = False
    """It was spare and being written when another object needed its room."""
    data: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))


class MemoryBlobs(Blobs):
    """Objects of one process. Idle room may be filled with spare ones: a write costs no more than a copy."""

    def __init__(self, size: int, clock: Callable[[], float] = time.time) -> None:
        if size < 1:
            raise StoreInputError(f"a memory store of {size} bytes: give it a size such as 4GiB")
        self.size = size
        self._clock = clock
        self._lock = Lock()
        self._entries: dict[ObjectName, _Entry] = {}
        self._descriptions: dict[str, dict[str, str]] = {}
        self._used = 0
        """Bytes of entries, including those that are being written."""
        self._spare: dict[ObjectName, _Entry] = {}
        """The spare ones of `_entries`, so that eviction for a spare object need not look at the others."""
        self._spare_pending: set[_Entry] = set()
        """Spare entries that are being written."""

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        return [name in self._entries for name in names]

    def open(self, name: ObjectName) -> Blob:
        entry = self._entries.get(name)
        if entry is None:
            raise MissingObject(f"{name}: not in memory")
        return MemoryBlob(entry.data)

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        return self._begin(name, nbytes, value, position, is_spare=False)

    def begin_spare(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        return self._begin(name, nbytes, value, position, is_spare=True)

    def _begin(
        self, name: ObjectName, nbytes: int, value: float, position: int, *, is_spare: bool
    ) -> PendingBlob | None:
        entry = _Entry(nbytes, value, position, self._clock(), is_spare)
        with self._lock:
            if name in self._entries:
                if not is_spare:
                    self._firm(name)
                return None
            gone = self._make_room(nbytes, is_spare)
            fits = self._used + nbytes <= (spare_limit(self.size) if is_spare else self.size)
            if fits:
                self._used += nbytes
                if is_spare:
                    self._spare_pending.add(entry)
            elif not is_spare:
                self.dropped += 1
        self._tell(gone)
        if not fits:
            return None
        try:
            entry.data = np.empty(nbytes, np.uint8)
        except MemoryError:
            self.discard(entry)
            if is_spare:  # no room is idle
                return None
            raise StoreFault(f"{name}: no {nbytes:,} bytes of memory left") from None
        return PendingMemoryBlob(self, name, entry)

    def add(self, name: ObjectName, entry: _Entry) -> bool:
        """Publish an entry that is written. False: it was cancelled, or the name exists by now."""
        with self._lock:
            if name in self._entries:
                self._give_back(entry)
                if not entry.is_spare:
                    self._firm(name)
                return False
            if entry.is_cancelled:
                return False
            self._spare_pending.discard(entry)
            entry.used_at = self._clock()
            self._entries[name] = entry
            if entry.is_spare:
                self._spare[name] = entry
                self.spare_bytes += entry.nbytes
            return True

    def discard(self, entry: _Entry) -> None:
        """Forget an entry that was being written."""
        with self._lock:
            self._give_back(entry)

    @property
    def idle_bytes(self) -> int:
        return max(0, spare_limit(self.size) - self._used + self.spare_bytes)

    def delete(self, names: Sequence[ObjectName]) -> int:
        with self._lock:
            return sum(self._remove(name) is not None for name in names)

    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        with self._lock:
            found = list(self._entries.items())
        for name, entry in found:
            if namespace in (None, name.namespace) and group in (None, name.group):
                yield Stored(name, entry.nbytes, entry.used_at, entry.value, entry.position, entry.is_spare)

    def touch(self, names: Sequence[ObjectName]) -> None:
        with self._lock:
            now = self._clock()
            for name in names:
                if name in self._entries:
                    self._entries[name].used_at = now
                    self._firm(name)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        with self._lock:
            self._descriptions[namespace] = dict(info)

    def descriptions(self) -> dict[str, dict[str, str]]:
        with self._lock:
            return {namespace: dict(info) for namespace, info in self._descriptions.items()}

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._entries), self._used)

    def collect(self) -> Leftovers:
        return Leftovers(0, 0)

    def shrink(self, nbytes: int) -> int:
        with self._lock:
            if self._used - nbytes > self.spare_bytes:
                self._cancel_spare()
            gone = self._evict(self._used - nbytes)
        self._tell(gone)
        return len(gone)

    def close(self) -> None:
        with self._lock:
            for name in list(self._entries):
                self._remove(name)

    def _make_room(self, nbytes: int, is_spare: bool) -> list[tuple[ObjectName, _Entry]]:
        """Evict as far as an object of `nbytes` may ask for it. Returns the evicted objects."""
        if nbytes > (self.idle_bytes if is_spare else self.size):
            return []
        limit = spare_limit(self.size) if is_spare else self.size
        if self._used + nbytes - limit > self.spare_bytes:
            self._cancel_spare()
        excess, is_told = self._used + nbytes - limit, self.on_evict is not None
        return self._evict(with_slack(excess, self.size, is_told=is_told, spare_bytes=self.spare_bytes))

    def _cancel_spare(self) -> None:
        """Free the room of all spare entries that are being written: they are not published."""
        for entry in list(self._spare_pending):
            self._give_back(entry)
            entry.is_cancelled, entry.data = True, np.empty(0, np.uint8)

    def _give_back(self, entry: _Entry) -> None:
        """Free the room of an entry that is being written, unless that was done when it was cancelled."""
        if not entry.is_cancelled:
            self._spare_pending.discard(entry)
            self._used -= entry.nbytes

    def _firm(self, name: ObjectName) -> None:
        """Turn the entry of that name into a normal one, if it is spare."""
        entry = self._spare.pop(name, None)
        if entry is not None:
            entry.is_spare = False
            self.spare_bytes -= entry.nbytes

    def _evict(self, nbytes: int) -> list[tuple[ObjectName, _Entry]]:
        """Evict objects until `nbytes` are freed or none is left. Returns the evicted objects."""
        if nbytes <= 0:
            return []
        candidates = [
            Evictable(name, entry.nbytes, entry.used_at, entry.value, entry.position, entry.is_spare)
            for name, entry in (self._spare if nbytes <= self.spare_bytes else self._entries).items()
        ]
        gone = []
        for one in chosen(ranked(candidates, self._clock()), nbytes):
            entry = self._remove(one.name)
            if entry is not None:
                gone.append((one.name, entry))
        self.evicted += sum(not entry.is_spare for _, entry in gone)
        return gone

    def _tell(self, gone: list[tuple[ObjectName, _Entry]]) -> None:
        """Pass evicted objects that are not spare to `on_evict`. Call without the lock: the hook may be slow."""
        hook = self.on_evict
        if hook is not None:
            for name, entry in gone:
                if not entry.is_spare:
                    hook(name, MemoryBlob(entry.data))

    def _remove(self, name: ObjectName) -> _Entry | None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._used -= entry.nbytes
            if self._spare.pop(name, None) is not None:
                self.spare_bytes -= entry.nbytes
        return entry


class MemoryBlob(Blob):
    """Keeps its bytes alive after the object is removed from the store."""

    def __init__(self, data: Bytes) -> None:
        self.nbytes = len(data)
        self._data = data.data

    def read_at(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        return scatter(self._data[offset : offset + nbytes], buffers)

    def close(self) -> None:
        pass


class PendingMemoryBlob(PendingBlob):
    def __init__(self, blobs: MemoryBlobs, name: ObjectName, entry: _Entry) -> None:
        self._blobs = blobs
        self._name = name
        self._entry = entry

    def write_at(self, offset: int, buffers: Buffers) -> None:
        data = self._entry.data
        if len(data):  # else it was cancelled
            gather(data.data[offset : offset + total(buffers)], buffers)

    def publish(self) -> bool:
        return self._blobs.add(self._name, self._entry)

    def discard(self) -> None:
        self._blobs.discard(self._entry)


class MemoryStore(BlobStore):
    """Objects in this process's memory, at most `size` bytes in total."""

    def __init__(self, size: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(MemoryBlobs(size, clock))
