"""Reading objects: many are opened at once, and rows are range reads."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.errors import MissingObject, StoreError, StoreFault
from hybridkv.store.blobs import Blob
from hybridkv.store.buffers import Buffers, scatter, skip
from hybridkv.store.mooncake.client import INVALID, NOT_FOUND, NOT_READY, Client, Range, key_of
from hybridkv.store.mooncake.staging import Region
from hybridkv.store.names import ObjectName
from hybridkv.store.remote_blob import RemoteBlob

SMALL_BYTES = 64 << 10
"""Objects up to this size are read whole when they are opened."""
_START_BYTES = 16 << 10
"""Bytes of larger objects that are read when they are opened: the header, mostly."""
_MOST_AT_ONCE = 256
_PIECE_BYTES = 8 << 20


class Reads:
    def __init__(self, client: Client) -> None:
        self._client = client
        self.piece_bytes = min(_PIECE_BYTES, client.staging.read_bytes // 2)
        self._large: set[tuple[str, str]] = set()
        """Namespaces and groups whose last object was not small."""

    def open_all(self, names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        at_once = max(1, min(_MOST_AT_ONCE, self._client.staging.read_bytes // 2 // SMALL_BYTES))
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
        with self._region(len(names) * SMALL_BYTES) as region:
            codes = self._client.read_whole([key_of(name) for name in names], region, SMALL_BYTES)
            for number, (name, code) in enumerate(zip(names, codes, strict=True)):
                start = number * SMALL_BYTES
                if 0 < code <= SMALL_BYTES:
                    found[name] = MooncakeBlob(self, name, code, bytes(region.view[start : start + code]))
                elif code == INVALID:
                    self._large.add((name.namespace, name.group))
                else:
                    found[name] = self._error(name, code)
        return found

    def _open_large(self, names: Sequence[ObjectName]) -> dict[ObjectName, Blob | StoreError]:
        if not names:
            return {}
        sizes = self._client.sizes([key_of(name) for name in names])
        found: dict[ObjectName, Blob | StoreError] = {
            name: self._error(name, NOT_FOUND) for name in names if key_of(name) not in sizes
        }
        there = [name for name in names if name not in found]
        if there:
            ranges = [
                Range(key_of(name), 0, min(sizes[key_of(name)], _START_BYTES), number * _START_BYTES)
                for number, name in enumerate(there)
            ]
            with self._region(len(there) * _START_BYTES) as region:
                codes = self._client.read_ranges(ranges, region)
                for name, one, code in zip(there, ranges, codes, strict=True):
                    if code != one.nbytes:
                        found[name] = self._error(name, code)
                        continue
                    nbytes = sizes[one.key]
                    found[name] = MooncakeBlob(self, name, nbytes, bytes(region.view[one.to : one.to + one.nbytes]))
                    if nbytes <= SMALL_BYTES:
                        self._large.discard((name.namespace, name.group))
        return found

    def read(self, name: ObjectName, offset: int, nbytes: int, buffers: Buffers) -> None:
        """Read a range of at most `piece_bytes`."""
        with self._region(nbytes) as region:
            (code,) = self._client.read_ranges([Range(key_of(name), offset, nbytes, 0)], region)
            if code == INVALID:  # the range lies beyond the end
                raise MissingObject(f"{name}: it was deleted, and written again, while it was read")
            if code != nbytes:
                raise self._error(name, code)
            scatter(region.view, buffers)

    def _error(self, name: ObjectName, code: int) -> StoreError:
        if code in (NOT_FOUND, NOT_READY):
            return MissingObject(f"{name}: not in {self._client.calls.label}")
        return self._client.fault(f"read {name}", code)

    def _region(self, nbytes: int) -> Region:
        return self._client.staging.take(nbytes, self._client.calls.timeout_s)


class MooncakeBlob(RemoteBlob):
    def __init__(self, reads: Reads, name: ObjectName, nbytes: int, start: bytes) -> None:
        super().__init__(nbytes, start)
        self.piece_bytes = reads.piece_bytes
        self._reads = reads
        self._name = name

    def fetch(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        done = 0
        while done < nbytes:
            length = min(nbytes - done, self.piece_bytes)
            self._reads.read(self._name, offset + done, length, skip(buffers, done))
            done += length
        return done
