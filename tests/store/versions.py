"""Objects as this and later versions of hybridkv write them, built by hand from the tables of docs/store.md."""

from __future__ import annotations

import random
import struct

from xxhash import xxh3_64_intdigest

from hybridkv.store import Guarded, ObjectName, Store, TieredStore
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blobs
from tests.store.samples import rows_of

LATER = ("version", "fields")
"""How a later version may differ: in the version number and all that follows, or in added fields."""


def written_by_hand(name: ObjectName, *, value: float = 1.0, position: int = 256, fields: bytes = b"") -> bytes:
    """An object of version 1 with `rows_of(name)`. `fields`: added to the header."""
    group, rows = name.group.encode(), rows_of(name)
    length = 16 + 70 + len(group) + 24 * len(rows) + len(fields) + 8
    header = struct.pack("<8sII", b"hybridkv", 1, length) + bytes.fromhex(name.namespace) + bytes.fromhex(name.key)
    header += struct.pack("<dQIH", value, position, len(rows), len(group)) + group
    body, end = b"", length
    for row in rows:
        offset = (end + 4095) // 4096 * 4096
        header += struct.pack("<QQQ", offset, len(row), xxh3_64_intdigest(row))
        body += bytes(offset - end) + row
        end = offset + len(row)
    header += fields
    return header + struct.pack("<Q", xxh3_64_intdigest(header)) + body


def later(name: ObjectName, kind: str) -> bytes:
    """An object of a later version. `kind`: one of `LATER`."""
    if kind == "fields":
        return written_by_hand(name, fields=b"added later")
    return struct.pack("<8sI", b"hybridkv", 2) + random.Random(str(name)).randbytes(20_000)


def plant(store: Store, name: ObjectName, raw: bytes) -> None:
    """Put these bytes into every backend of the store, as another program would."""
    for blobs in _blobs_of(store):
        pending = blobs.begin(name, len(raw), 1.0, 0)
        assert pending is not None
        pending.write_at(0, [memoryview(raw)])
        assert pending.publish()


def raw_bytes(store: Store, name: ObjectName) -> bytes:
    """The bytes of the object, which are the same in every backend."""
    found = set()
    for blobs in _blobs_of(store):
        blob = blobs.open(name)
        raw = bytearray(blob.nbytes)
        assert blob.read_at(0, [memoryview(raw)], blob.nbytes) == blob.nbytes
        blob.close()
        found.add(bytes(raw))
    (one,) = found
    return one


def _blobs_of(store: Store) -> list[Blobs]:
    if isinstance(store, TieredStore):
        return [blobs for tier in store.tiers for blobs in _blobs_of(tier)]
    if isinstance(store, Guarded):
        return _blobs_of(store.store)
    assert isinstance(store, BlobStore)
    return [store.blobs]
