"""Blobs as values of a Mooncake store, one key each. Mooncake's master decides what is evicted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from hybridkv.errors import StoreError
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage
from hybridkv.store.descriptions import decode_description, encode_description
from hybridkv.store.mooncake.admin import Admin
from hybridkv.store.mooncake.client import LEASED, OBJECTS, Client, key_of
from hybridkv.store.mooncake.reading import Reads
from hybridkv.store.mooncake.usage import RecentUsage
from hybridkv.store.mooncake.writing import Writes
from hybridkv.store.names import ObjectName, is_group, is_key, is_namespace
from hybridkv.store.objects import Header
from hybridkv.store.store import Leftovers, Stored

_ABOUT = "hybridkv-v1/about/"
_REMOVED_AT_ONCE = 256


class MooncakeBlobs(Blobs):
    opens_together = 64

    def __init__(self, client: Client, admin: Admin, pinned: object) -> None:
        """`pinned`: the client's configuration of values that are never evicted."""
        self._client = client
        self._admin = admin
        self._pinned = pinned
        self._made_before = client.calls.made
        self._usage = RecentUsage(self._count)
        self._reads = Reads(client)
        self._writes = Writes(client, self._usage.add)

    def renewed(self) -> MooncakeBlobs:
        """The same client with counters from zero."""
        return MooncakeBlobs(self._client, self._admin, self._pinned)

    @property
    def round_trips(self) -> int:  # type: ignore[override]
        return self._client.calls.made - self._made_before

    @property
    def dropped(self) -> int:  # type: ignore[override]
        return self._writes.dropped

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        return self._client.exist([key_of(name) for name in names]) if names else []

    def open(self, name: ObjectName) -> Blob:
        (found,) = self._reads.open_all([name])
        if isinstance(found, StoreError):
            raise found
        return found

    def open_all(self, names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        return self._reads.open_all(names)

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        if self.lookup([name]) == [True]:
            return None
        return self._writes.begin(name, nbytes)

    def delete(self, names: Sequence[ObjectName]) -> int:
        if not names:
            return 0
        self._usage.forget()
        return self._client.remove([key_of(name) for name in names], force=True).count(0)

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
                while keys and freed < excess and len(some) < _REMOVED_AT_ONCE:
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

    def _count(self) -> Usage:
        sizes = [nbytes for _, nbytes in self._admin.sizes([key for key, _ in self._names()])]
        return Usage(len(sizes), sum(sizes))

    def _names(self) -> Iterator[tuple[str, ObjectName]]:
        for key in self._admin.keys(OBJECTS):
            parts = key.removeprefix(OBJECTS).split("/")
            if len(parts) == 3 and is_namespace(parts[0]) and is_group(parts[1]) and is_key(parts[2]):
                yield key, ObjectName(*parts)


class MooncakeStore(BlobStore):
    def is_replaced(self, header: Header) -> bool:
        """Memory of a deleted object may be written again while it is read: an object that is gone was not corrupt."""
        return self.blobs.lookup([header.name]) == [False] or super().is_replaced(header)
