"""Writing objects: they are gathered in registered memory and sent when they are complete.

The master reserves room under the object's key, which is the conditional create, and shows the key after the last byte
has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from hybridkv.store.blobs import PendingBlob
from hybridkv.store.buffers import Buffers, gather, total
from hybridkv.store.mooncake.client import EXISTS, NO_ROOM, Client, key_of
from hybridkv.store.mooncake.staging import Region
from hybridkv.store.names import ObjectName

_PUT_BYTES = 64 << 20
_ROOM_WAITS_S = (0.02, 0.05, 0.1)
"""A full store begins to evict when a write finds no room. So a write tries again after these times."""


class Writes:
    def __init__(self, client: Client, on_saved: Callable[[int], None]) -> None:
        """`on_saved` is called with the size of each object that was written."""
        self.dropped = 0
        self._client = client
        self._on_saved = on_saved
        self._lock = Lock()
        self._publishing: set[ObjectName] = set()

    def begin(self, name: ObjectName, nbytes: int) -> PendingBlob | None:
        """None: no memory is left to gather the object in."""
        region = self._client.staging.take_for_write(nbytes)
        if region is None:
            self._drop()
            return None
        return PendingMooncakeBlob(self, name, region)

    def publish(self, name: ObjectName, region: Region) -> bool:
        """Send the object. Returns False if it exists by now or finds no room."""
        with self._lock:
            if name in self._publishing:
                return False
            self._publishing.add(name)
        try:
            code = self._send(key_of(name), region)
        finally:
            with self._lock:
                self._publishing.discard(name)
        if code not in (0, EXISTS, NO_ROOM):
            self._client.revoke(key_of(name))
            raise self._client.fault(f"write {name}", code)
        if code == NO_ROOM:
            self._drop()
        if code == 0:
            self._on_saved(region.nbytes)
        return code == 0

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

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1


class PendingMooncakeBlob(PendingBlob):
    def __init__(self, writes: Writes, name: ObjectName, region: Region) -> None:
        self._writes = writes
        self._name = name
        self._region = region
        self._written: list[tuple[int, int]] = []

    def write_at(self, offset: int, buffers: Buffers) -> None:
        end = offset + total(buffers)
        gather(self._region.view[offset:end], buffers)
        self._written.append((offset, end))

    def publish(self) -> bool:
        self._clear_gaps()
        is_first = self._writes.publish(self._name, self._region)
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
