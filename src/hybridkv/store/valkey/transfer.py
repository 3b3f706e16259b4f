"""Bytes of one object: read by ranges, written at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

import numpy as np

from hybridkv.errors import MissingObject, StoreFault
from hybridkv.store.blobs import PendingBlob
from hybridkv.store.buffers import Buffers, gather, total
from hybridkv.store.names import ObjectName
from hybridkv.store.remote_blob import RemoteBlob
from hybridkv.store.valkey.exchange import Command
from hybridkv.store.valkey.index import Index, reply
from hybridkv.store.valkey.keys import INDEX, object_key, shard_of
from hybridkv.store.valkey.room import Room
from hybridkv.store.valkey.servers import Servers
from hybridkv.store.valkey.wire import ServerError, encode

FIRST_BYTES = 68 << 10
"""What comes along when an object is opened: its header, and 64 KiB of rows."""


def slot(name: ObjectName) -> int:
    return INDEX[shard_of(name)].slot


def exist(names: Sequence[ObjectName], shard: str) -> Command:
    """Whether each of these objects of one shard exists."""
    parts = [b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key) for key in map(_raw_key, names)]
    return Command(parts, INDEX[shard].slot, 256 * len(names), num_flags=len(names))


def _raw_key(name: ObjectName) -> bytes:
    return object_key(name).encode()


class ValkeyBlob(RemoteBlob):
    piece_bytes = 16 << 20
    """The server copies what it sends."""

    def __init__(self, servers: Servers, name: ObjectName, nbytes: int, first: bytes) -> None:
        super().__init__(nbytes, first)
        self._servers = servers
        self._name = name

    def fetch(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        name = self._name
        get = encode("GETRANGE", object_key(name), offset, offset + nbytes - 1)
        (answer,) = self._servers.run([Command(get, slot(name), nbytes, buffers)])
        if isinstance(answer, StoreFault) and self._servers.others_serve:
            raise MissingObject(f"{name}: {answer}")
        found = reply(self._servers, answer)
        if not isinstance(found, int) or found == 0:
            raise MissingObject(f"{name}: it was deleted while it was read")
        return found


class PendingValkeyBlob(PendingBlob):
    """Rows are gathered in memory. Parts between rows are zero."""

    def __init__(
        self, servers: Servers, index: Index, room: Room, name: ObjectName, nbytes: int, value: float, position: int
    ) -> None:
        self._data = np.zeros(nbytes, np.uint8)
        self._servers = servers
        self._index = index
        self._room = room
        self._name = name
        self._value, self._position = value, position
        self._lock = Lock()
        self._is_over = False

    def write_at(self, offset: int, buffers: Buffers) -> None:
        gather(self._data.data[offset : offset + total(buffers)], buffers)

    def publish(self) -> bool:
        """Send the object and its entry together. The server keeps the object only if the name is free."""
        key = object_key(self._name)
        put = Command(encode("SET", key, self._data.data, "NX"), slot(self._name))
        enter = self._index.enter(self._name, self._value, self._position, time.time())
        was_put, was_entered = self._servers.run([put, enter], again=False)
        if was_put == b"OK" and isinstance(was_entered, ServerError):  # its memory is full
            self._servers.run([Command(encode("UNLINK", key), slot(self._name))])
            reply(self._servers, was_entered)
        first = reply(self._servers, was_put) == b"OK"
        self._end(kept=first)
        return first

    def discard(self) -> None:
        self._end(kept=False)

    def _end(self, kept: bool) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._room.give_back(len(self._data), kept=kept)
