"""Blobs as values of a Mooncake store, one key each. Mooncake's master decides what is evicted.

An object is gathered in registered memory and sent when it is complete: the master reserves room under its key, which
is the conditional create, and shows the key after the last byte has come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

from hybridkv.errors import MissingObject, StoreError, StoreFault
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage
from hybridkv.store.buffers import Buffers, gather, scatter, skip, total
from hybridkv.store.file.descriptions import decode_description, encode_description
from hybridkv.store.mooncake.admin import Admin
from hybridkv.store.mooncake.client import EXISTS, INVALID, LEASED, NO_ROOM, NOT_FOUND, NOT_READY, Client, Range
from hybridkv.store.mooncake.staging import Region
from hybridkv.store.mooncake.usage import RecentUsage
from hybridkv.store.names import ObjectName, is_group, is_key, is_namespace
from hybridkv.store.objects import Header
from hybridkv.store.store import Leftovers, Stored

_OBJECTS = "hybridkv-v1/objects/"
_ABOUT = "hybridkv-v1/about/"
_SMALL_BYTES = 64 << 10
"""Objects up to this size are read whole when they are opened."""
_START_BYTES = 16 << 10
"""Bytes of larger objects that are read when they are opened: the header, mostly."""
_MOST_AT_ONCE = 256
_PIECE_BYTES = 8 << 20
_PUT_BYTES = 64 << 20
_ROOM_WAITS_S = (0.02, 0.05, 0.1)
"""A full store begins to evict when a write finds no room. So a write tries again after these times."""


class MooncakeBlobs(Blobs):
    def __init__(self, client: Client, admin: Admin, pinned: object) -> None:
        """`pinned`: the client's configuration of values that are never evicted."""
        self._client = client
        self._admin = admin
        self._pinned = pinned
        self._made_before = client.calls.made
        self._usage = RecentUsage(self._count)
        self._lock = Lock()
        self.piece_bytes = min(_PIECE_BYTES, client.staging.read_bytes // 2)
        self._publishing: set[ObjectName] = set()
        self._large: set[tuple[str, str]] = set()
        """Namespaces and groups whose last object was not small."""

    def renewed(self) -> MooncakeBlobs:
        """The same client with counters from zero."""
        return MooncakeBlobs(self._client, self._admin, self._pinned)

    @property
    def round_trips(self) -> int:  # type: ignore[override]
        return self._client.calls.made - self._made_before

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        return self._client.exist([_key(name) for name in names]) if names else []

    def open(self, name: ObjectName) -> Blob:
        (found,) = self.open_all([name])
        if isinstance(found, StoreError):
            raise found
        return found

    def open_all(self, names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        at_once = max(1, min(_MOST_AT_ONCE, self._client.staging.read_bytes // 2 // _SMALL_BYTES))
        found: dict[ObjectName, Blob | StoreError] = {}
        for start in range(0, len(names), at_once):
            some = names[start : start + at_once]
            try:
                found |= self._open_small([name for name in some if (name.namespace, name.group) not in self._large])
                found |= self._open_large([name for name in some if name not in found])
            except StoreFault as error:
                found |= {name: error for name in some if name not in found}
        return [found[name] for name in names]

    def _open_small(self, names: Sequence[ObjectName]) -> dict[ObjectName, Blob | StoreError]:
        """Objects that turn out to be large are left out."""
        found: dict[ObjectName, Blob | StoreError] = {}
        if not names:
            return found
        with self._region(len(names) * _SMALL_BYTES) as region:
            codes = self._client.read_whole([_key(name) for name in names], region, _SMALL_BYTES)
            for number, (name, code) in enumerate(zip(names, codes, strict=True)):
                start = number * _SMALL_BYTES
                if 0 < code <= _SMALL_BYTES:
                    found[name] = MooncakeBlob(self, name, code, bytes(region.view[start : start + code]))
                elif code == INVALID:
                    self._large.add((name.namespace, name.group))
                else:
                    found[name] = self.error(name, code)
        return found

    def _open_large(self, names: Sequence[ObjectName]) -> dict[ObjectName, Blob | StoreError]:
        if not names:
            return {}
        sizes = self._client.sizes([_key(name) for name in names])
        found: dict[ObjectName, Blob | StoreError] = {
            name: self.error(name, NOT_FOUND) for name in names if _key(name) not in sizes
        }
        there = [name for name in names if name not in found]
        if there:
            ranges = [
                Range(_key(name), 0, min(sizes[_key(name)], _START_BYTES), number * _START_BYTES)
                for number, name in enumerate(there)
            ]
            with self._region(len(there) * _START_BYTES) as region:
                codes = self._client.read_ranges(ranges, region)
                for name, one, code in zip(there, ranges, codes, strict=True):
                    if code != one.nbytes:
                        found[name] = self.error(name, code)
                        continue
                    nbytes = sizes[one.key]
                    found[name] = MooncakeBlob(self, name, nbytes, bytes(region.view[one.to : one.to + one.nbytes]))
                    if nbytes <= _SMALL_BYTES:
                        self._large.discard((name.namespace, name.group))
        return found

    def read(self, name: ObjectName, offset: int, nbytes: int, buffers: Buffers) -> None:
        """Read a range of at most `piece_bytes`."""
        with self._region(nbytes) as region:
            (code,) = self._client.read_ranges([Range(_key(name), offset, nbytes, 0)], region)
            if code != nbytes:
                raise self.error(name, code)
            scatter(region.view, buffers)

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        if self.lookup([name]) == [True]:
            return None
        region = self._client.staging.take_for_write(nbytes)
        if region is None:
            self.dropped += 1
            return None
        return PendingMooncakeBlob(self, name, region)

    def publish(self, name: ObjectName, region: Region) -> bool:
        """Send the object. Returns False if it exists by now or finds no room."""
        with self._lock:
            if name in self._publishing:
                return False
            self._publishing.add(name)
        try:
            code = self._send(_key(name), region)
        finally:
            with self._lock:
                self._publishing.discard(name)
        if code not in (0, EXISTS, NO_ROOM):
            self._client.revoke(_key(name))
            raise self._client.fault(f"write {name}", code)
        self.dropped += code == NO_ROOM
        if code == 0:
            self._usage.add(region.nbytes)
        return code == 0

    def delete(self, names: Sequence[ObjectName]) -> int:
        if not names:
            return 0
        self._usage.forget()
        return self._client.remove([_key(name) for name in names], force=True).count(0)

    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        """`used_at` is the current time: Mooncake does not tell when an object was used."""
        wanted = {key: name for key, name in self._names() if namespace in (None, name.namespace)}
        keys = [key for key, name in wanted.items() if group in (None, name.group)]
        for key, nbytes in self._admin.sizes(keys):
            yield Stored(wanted[key], nbytes, time.time(), None, None)

    def touch(self, names: Sequence[ObjectName]) -> None:
        """Looking an object up renews its lease, and leases decide what is evicted."""
        self.lookup(names)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        self._client.upsert(_ABOUT + namespace, encode_description(info), self._pinned)

    def descriptions(self) -> dict[str, dict[str, str]]:
        keys = [key for key in self._admin.keys(_ABOUT) if is_namespace(key.removeprefix(_ABOUT))]
        found = {}
        for key, raw in zip(keys, self._client.get(keys) if keys else [], strict=True):
            info = decode_description(raw)
            if info is not None:
                found[key.removeprefix(_ABOUT)] = info
        return found

    def usage(self) -> Usage:
        return self._usage.get()

    def collect(self) -> Leftovers:
        """The master itself frees what dead writers have reserved, after --put_start_discard_timeout_sec."""
        return Leftovers(0, 0)

    def shrink(self, nbytes: int) -> int:
        """Remove objects, first those without a lease: the others were used a moment ago."""
        sizes = dict(self._admin.sizes([key for key, _ in self._names()]))
        excess, count, leased = sum(sizes.values()) - nbytes, 0, list(sizes)
        for force in (False, True):
            keys, leased = leased, []
            while keys and excess > 0:
                some: list[str] = []
                freed = 0
                while keys and freed < excess and len(some) < _MOST_AT_ONCE:
                    some.append(keys.pop())
                    freed += sizes[some[-1]]
                for key, code in zip(some, self._client.remove(some, force=force), strict=True):
                    count += code == 0
                    if code == LEASED:
                        leased.append(key)
                    else:
                        excess -= sizes[key]
        self.evicted += count
        self._usage.forget()
        return count

    def close(self) -> None:
        self._client.close()

    def error(self, name: ObjectName, code: int) -> StoreError:
        if code in (NOT_FOUND, NOT_READY):
            return MissingObject(f"{name}: not in {self._client.calls.label}")
        return self._client.fault(f"read {name}", code)

    def _send(self, key: str, region: Region) -> int:
        client, first = self._client, min(region.nbytes, _PUT_BYTES)
        code = client.begin_put(key, region, first)
        for wait_s in _ROOM_WAITS_S:
            if code != NO_ROOM:
                break
            time.sleep(wait_s)
            code = client.begin_put(key, region, first)
        for offset in range(first, region.nbytes, _PUT_BYTES):
            if code == 0:
                code = client.put(key, region, offset, min(_PUT_BYTES, region.nbytes - offset))
        return client.end_put(key) if code == 0 else code

    def _region(self, nbytes: int) -> Region:
        return self._client.staging.take(nbytes, self._client.calls.timeout_s)

    def _count(self) -> Usage:
        sizes = [nbytes for _, nbytes in self._admin.sizes([key for key, _ in self._names()])]
        return Usage(len(sizes), sum(sizes))

    def _names(self) -> Iterator[tuple[str, ObjectName]]:
        for key in self._admin.keys(_OBJECTS):
            parts = key.removeprefix(_OBJECTS).split("/")
            if len(parts) == 3 and is_namespace(parts[0]) and is_group(parts[1]) and is_key(parts[2]):
                yield key, ObjectName(*parts)


class MooncakeBlob(Blob):
    def __init__(self, blobs: MooncakeBlobs, name: ObjectName, nbytes: int, start: bytes) -> None:
        """`start`: the first bytes, which have come already."""
        self.nbytes = nbytes
        self.piece_bytes = blobs.piece_bytes
        self._blobs = blobs
        self._name = name
        self._start = memoryview(start)

    def read_at(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        wanted = max(0, min(nbytes, self.nbytes - offset))
        done = scatter(self._start[offset : offset + wanted], buffers)
        while done < wanted:
            length = min(wanted - done, self.piece_bytes)
            self._blobs.read(self._name, offset + done, length, skip(buffers, done))
            done += length
        return done

    def close(self) -> None:
        pass


class PendingMooncakeBlob(PendingBlob):
    def __init__(self, blobs: MooncakeBlobs, name: ObjectName, region: Region) -> None:
        self._blobs = blobs
        self._name = name
        self._region = region
        self._written: list[tuple[int, int]] = []

    def write_at(self, offset: int, buffers: Buffers) -> None:
        end = offset + total(buffers)
        gather(self._region.view[offset:end], buffers)
        self._written.append((offset, end))

    def publish(self) -> bool:
        self._clear_gaps()
        is_first = self._blobs.publish(self._name, self._region)
        self._region.release()
        return is_first

    def discard(self) -> None:
        self._region.release()

    def _clear_gaps(self) -> None:
        """Write zeros between rows: the region may hold bytes of another object."""
        done = 0
        for start, end in [*sorted(self._written), (self._region.nbytes, self._region.nbytes)]:
            if start > done:
                self._region.view[done:start] = bytes(start - done)
            done = max(done, end)


class MooncakeStore(BlobStore):
    def is_replaced(self, header: Header) -> bool:
        """Memory of a deleted object may be written again while it is read: an object that is gone was not corrupt."""
        return self.blobs.lookup([header.name]) == [False] or super().is_replaced(header)


def _key(name: ObjectName) -> str:
    return f"{_OBJECTS}{name}"
