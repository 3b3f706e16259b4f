"""Keys on the server. The hash tag {ab}, the first two digits of an object's key, is its shard.

Everything about an object lies in its shard, and so in one slot of a cluster:

    hybridkv-v1:{ab}:o:<namespace>/<group>/<key>   the object: a string
    hybridkv-v1:{ab}:meta                          hash: <namespace>/<group>/<key> -> "bytes value position"
    hybridkv-v1:{ab}:used                          sorted set: <namespace>/<group>/<key> by the time of its last use
    hybridkv-v1:{ab}:usage                         hash: objects and bytes of the shard's index
    hybridkv-v1:about                              hash: namespace -> description
    hybridkv-v1:evicting                           lock of the process that evicts
"""

from __future__ import annotations

import math
from binascii import crc_hqx
from typing import NamedTuple

from hybridkv.errors import StoreInputError
from hybridkv.store.names import ObjectName

ROOT = "hybridkv-v1"
ABOUT = f"{ROOT}:about"
LOCK = f"{ROOT}:evicting"
NUM_SLOTS = 16_384
MOST_VALUE_BYTES = 512 << 20
"""Longest string of a server whose `proto-max-bulk-len` was not changed."""
SHARDS = [f"{number:02x}" for number in range(256)]


class Shard(NamedTuple):
    """The keys of a shard's index, and its slot."""

    meta: str
    used: str
    usage: str
    slot: int


def slot_of(key: str) -> int:
    """The slot of a key without a hash tag, or of a hash tag."""
    return crc_hqx(key.encode(), 0) % NUM_SLOTS


def _shard(digits: str) -> Shard:
    start = f"{ROOT}:{{{digits}}}"
    return Shard(f"{start}:meta", f"{start}:used", f"{start}:usage", slot_of(digits))


INDEX: dict[str, Shard] = {digits: _shard(digits) for digits in SHARDS}


def shard_of(name: ObjectName) -> str:
    return name.key[:2]


def object_key(name: ObjectName) -> str:
    return f"{ROOT}:{{{name.key[:2]}}}:o:{name.namespace}/{name.group}/{name.key}"


def pattern(namespace: str | None, group: str | None) -> str:
    """Glob pattern of objects' keys."""
    return f"{ROOT}:{{??}}:o:{namespace or '*'}/{group or '*'}/*"


def name_of_key(key: bytes) -> ObjectName | None:
    """None if this is no key of an object."""
    start, _, field = key.partition(b":o:")
    name = name_of_field(field)
    return name if name is not None and start == f"{ROOT}:{{{name.key[:2]}}}".encode() else None


def name_of_field(field: bytes) -> ObjectName | None:
    """The name in an index. None if it is none."""
    try:
        return ObjectName(*field.decode("ascii").split("/", 2))
    except (StoreInputError, ValueError, TypeError):
        return None


class Worth(NamedTuple):
    nbytes: int
    value: float | None
    position: int | None


def encode_worth(value: float | None, position: int | None) -> str:
    """The part of an entry after the number of bytes, which the server adds."""
    return "- -" if value is None or position is None else f"{value!r} {position}"


def decode_worth(entry: bytes) -> Worth:
    """An entry of an index. What cannot be read is unknown, and 0 bytes."""
    parts = entry.split(b" ")
    nbytes = int(parts[0]) if parts[0].isdigit() and len(parts[0]) < 19 else 0
    try:
        value, position = float(parts[1]), int(parts[2])
    except (ValueError, IndexError):
        return Worth(nbytes, None, None)
    if not math.isfinite(value) or value < 0 or not 0 <= position < 2**64:
        return Worth(nbytes, None, None)
    return Worth(nbytes, value, position)
