"""The bytes of an object: a header, then rows that begin at multiples of 4096.

    magic, version, length of the header │ namespace, key, value, position, number of rows, group │ rows │ checksum
                                                              offset, length, checksum of each row ──┘

All numbers are little-endian. Bytes read from a store are untrusted: every length is checked against hard limits and
the real size before anything is allocated. Rows must lie exactly where `layout` puts rows of these lengths.

Several versions of hybridkv may share a store. A later version raises the version number, or adds fields between the
table of rows and the checksum. `read_header` raises UnknownFormat for both, which is not CorruptObject: such an object
must not be deleted. The layout of another version is unknown, so its checksum cannot be verified: damage to the version
number alone also raises UnknownFormat.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from hybridkv.errors import CorruptObject, StoreError, StoreInputError, UnknownFormat
from hybridkv.store.names import MOST_GROUP_LETTERS, ObjectName

MAGIC = b"hybridkv"
VERSION = 1
ROW_ALIGNMENT = 4096
MOST_ROWS = 16_384
MOST_OBJECT_BYTES = 2**38

_START = struct.Struct("<8sII")
_FIELDS = struct.Struct("<16s32sdQIH")
_ROW = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")
MOST_HEADER_BYTES = _START.size + _FIELDS.size + MOST_GROUP_LETTERS + MOST_ROWS * _ROW.size + _CHECKSUM.size


class StoredRow(NamedTuple):
    offset: int
    nbytes: int
    checksum: int


class Header(NamedTuple):
    """Decoded header of an object."""

    name: ObjectName
    value: float
    """Compute that a load of the object saves, per byte."""
    position: int
    """Number of tokens before the object's end."""
    rows: tuple[StoredRow, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole object."""
        return self.rows[-1].offset + self.rows[-1].nbytes


class Layout(NamedTuple):
    """Offsets of an object's rows, and its size."""

    offsets: tuple[int, ...]
    nbytes: int


def layout(group: str, row_bytes: Sequence[int]) -> Layout:
    """The only valid layout of rows of these lengths."""
    if not 1 <= len(row_bytes) <= MOST_ROWS:
        raise StoreInputError(f"{len(row_bytes)} rows: an object has 1 to {MOST_ROWS:,} rows")
    offsets, end = [], _header_bytes(len(group), len(row_bytes))
    for number, nbytes in enumerate(row_bytes):
        if not 1 <= nbytes <= MOST_OBJECT_BYTES:
            raise StoreInputError(f"row {number} of {nbytes:,} bytes: a row has 1 to {MOST_OBJECT_BYTES:,} bytes")
        offsets.append(-(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT)
        end = offsets[-1] + nbytes
    if end > MOST_OBJECT_BYTES:
        raise StoreInputError(f"an object of {end:,} bytes: the largest may have {MOST_OBJECT_BYTES:,}")
    return Layout(tuple(offsets), end)


def encode_header(header: Header) -> bytes:
    name, group = header.name, header.name.group.encode("ascii")
    length = _header_bytes(len(group), len(header.rows))
    parts = [
        _START.pack(MAGIC, VERSION, length),
        _FIELDS.pack(
            bytes.fromhex(name.namespace),
            bytes.fromhex(name.key),
            header.value,
            header.position,
            len(header.rows),
            len(group),
        ),
        group,
        *(_ROW.pack(*row) for row in header.rows),
    ]
    body = b"".join(parts)
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def read_header(name: ObjectName, nbytes: int, read: Callable[[int, int], bytes]) -> Header:
    """Read the header of an object of `nbytes` bytes. Raises CorruptObject or UnknownFormat.

    `read(offset, length)` may return fewer bytes than asked for.
    """
    start = read(0, min(nbytes, ROW_ALIGNMENT))
    length = _header_length(name, nbytes, start)
    raw = start[:length]
    if len(raw) < length:
        raw += read(len(raw), length - len(raw))
    if len(raw) != length:
        raise CorruptObject(f"{name}: its header of {length} bytes ends after {len(raw)}")
    if xxh3_64_intdigest(raw[: -_CHECKSUM.size]) != _CHECKSUM.unpack(raw[-_CHECKSUM.size :])[0]:
        raise CorruptObject(f"{name}: its header is not what was written")
    header = _decode(name, raw)
    if header.nbytes != nbytes:
        raise CorruptObject(f"{name}: it should have {header.nbytes:,} bytes and has {nbytes:,}")
    return header


def _header_length(name: ObjectName, nbytes: int, start: bytes) -> int:
    if len(start) < _START.size:
        raise CorruptObject(f"{name}: {len(start)} bytes are no object")
    magic, version, length = _START.unpack_from(start)
    if magic != MAGIC:
        raise CorruptObject(f"{name}: it is no object of hybridkv")
    if version != VERSION:
        raise _unknown(name, f"its format is version {version}, this program reads version {VERSION}")
    if not _header_bytes(1, 1) <= length <= min(MOST_HEADER_BYTES, nbytes):
        raise CorruptObject(f"{name}: a header of {length:,} bytes in an object of {nbytes:,}")
    return int(length)


def _decode(name: ObjectName, raw: bytes) -> Header:
    """Decode and check every field: a correct checksum does not show who wrote the header."""
    namespace, key, value, position, count, letters = _FIELDS.unpack_from(raw, _START.size)
    num_unknown = len(raw) - _header_bytes(letters, count)
    if not 1 <= count <= MOST_ROWS or num_unknown < 0:
        raise CorruptObject(f"{name}: {count:,} rows in a header of {len(raw):,} bytes")
    begin = _START.size + _FIELDS.size
    if (namespace.hex(), raw[begin : begin + letters], key.hex()) != (name.namespace, name.group.encode(), name.key):
        raise CorruptObject(f"{name}: another object lies under this name")
    if num_unknown:
        known = f"this program reads version {VERSION} without them"
        raise _unknown(name, f"its header has {num_unknown:,} bytes of unknown fields, {known}")
    if not math.isfinite(value) or value < 0:
        raise CorruptObject(f"{name}: a value of {value}")
    rows = tuple(StoredRow(*fields) for fields in _ROW.iter_unpack(raw[begin + letters : -_CHECKSUM.size]))
    try:
        offsets = layout(name.group, [row.nbytes for row in rows]).offsets
    except StoreError as error:
        raise CorruptObject(f"{name}: {error}") from None
    if any(row.offset != offset for row, offset in zip(rows, offsets, strict=True)):
        raise CorruptObject(f"{name}: its rows do not lie where rows of their lengths begin")
    return Header(name, value, position, rows)


def _unknown(name: ObjectName, reason: str) -> UnknownFormat:
    return UnknownFormat(
        f"{name}: {reason}; upgrade hybridkv, use another store, or remove old objects with 'hybridkv store gc'"
    )


def _header_bytes(letters: int, rows: int) -> int:
    return _START.size + _FIELDS.size + letters + rows * _ROW.size + _CHECKSUM.size
