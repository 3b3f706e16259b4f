"""Small objects for tests of stores."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from hashlib import sha256

from hybridkv.store import ObjectName, Reader, Store

NAMESPACE = "0123456789abcdef" * 2
OTHER_NAMESPACE = "fedcba9876543210" * 2
ROWS = (5000, 1, 4096, 12_345)


def name_of(number: int | str, group: str = "full", namespace: str = NAMESPACE) -> ObjectName:
    return ObjectName(namespace, group, sha256(str(number).encode()).hexdigest())


def rows_of(name: ObjectName, row_bytes: Sequence[int] = ROWS) -> list[bytes]:
    """Bytes that depend on the name, so that no object can be taken for another."""
    return _rows(str(name), tuple(row_bytes))


@functools.lru_cache(maxsize=512)
def _rows(name: str, row_bytes: tuple[int, ...]) -> list[bytes]:
    source = random.Random(name)
    return [source.randbytes(nbytes) for nbytes in row_bytes]


def save(
    store: Store, name: ObjectName, row_bytes: Sequence[int] = ROWS, *, value: float = 1.0, position: int = 256
) -> bool:
    """False: the store did not want it."""
    writer = store.create(name, row_bytes, value=value, position=position)
    if writer is None:
        return False
    with writer:
        for row, data in enumerate(rows_of(name, row_bytes)):
            writer.write(row, [memoryview(data)])
        writer.commit()
    return True


def read_row(reader: Reader, row: int) -> bytes:
    data = bytearray(reader.header.rows[row].nbytes)
    reader.read(row, [memoryview(data)])
    return bytes(data)


def load(store: Store, name: ObjectName) -> list[bytes]:
    with store.open(name) as reader:
        return [read_row(reader, row) for row in range(len(reader.header.rows))]
