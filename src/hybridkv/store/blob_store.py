"""A store on top of any backend's blobs. Headers, rows and checksums are handled here, once for all backends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import isfinite
from threading import Lock

from xxhash import xxh3_64

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault, StoreInputError, UnknownFormat
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage, header_of
from hybridkv.store.buffers import as_bytes, pieces, total
from hybridkv.store.counters import Counters
from hybridkv.store.names import ObjectName, check_group, check_namespace
from hybridkv.store.objects import Header, Layout, StoredRow, encode_header, layout
from hybridkv.store.shared_handle import SharedHandle
from hybridkv.store.store import EvictionHook, Leftovers, Reader, Store, Stored, StoreStats, Writer
from hybridkv.units import format_bytes

logger = logging.getLogger("hybridkv.store")

_HEADERS_AT_ONCE = 64
"""Headers that a listing reads in one round trip."""


class BlobStore(Store):
    """Keeps counters, and deletes corrupt objects. Objects of an unknown format are left alone."""

    keeps_corrupt = False
    """True for inspection tools: corrupt objects are not deleted, and nothing is logged about objects."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.counters = Counters()
        self._usage = Usage(0, 0)
        """Last known usage; returned while the backend fails."""
        self._is_too_small = False

    @property
    def size(self) -> int:
        return self.blobs.size

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        with self.counters.faults():
            found = self.blobs.lookup(names)
        with self.counters as stats:
            stats.hits += sum(found)
            stats.misses += len(found) - sum(found)
        return found

    def open(self, name: ObjectName) -> BlobReader:
        with self.counters.faults():
            return self._reader(name, self.blobs.open(name))

    @property
    def opens_together(self) -> int:
        return self.blobs.opens_together

    def open_all(self, names: Sequence[ObjectName]) -> list[Reader | StoreError]:
        with self.counters.faults():
            found = self.blobs.open_all(names)
        with self.counters as stats:  # one fault may stand in the place of several blobs
            stats.faults += len({id(one) for one in found if isinstance(one, StoreFault)})
        return [self._reader_or_error(*one) for one in zip(names, found, strict=True)]

    def _reader_or_error(self, name: ObjectName, found: Blob | StoreError) -> Reader | StoreError:
        if isinstance(found, StoreError):
            return found
        try:
            with self.counters.faults():
                return self._reader(name, found)
        except StoreError as error:
            return error

    def _reader(self, name: ObjectName, blob: Blob) -> BlobReader:
        try:
            header = header_of(name, blob)
        except CorruptObject as error:
            blob.close()
            self.drop_corrupt(name, error)
            raise
        except UnknownFormat as error:
            blob.close()
            self._count_unknown(error)
            raise
        except BaseException:
            blob.close()
            raise
        with self.counters as stats:
            stats.opened += 1
        return BlobReader(self, header, blob)

    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        where = _layout(name, row_bytes, value, position)
        with self.counters.faults():
            pending = self.blobs.begin(name, where.nbytes, value, position)
        if pending is None and where.nbytes > self.blobs.size and not self._is_too_small:
            self._is_too_small = True
            sizes = f"{format_bytes(self.blobs.size)} is too small for an object of {format_bytes(where.nbytes)}"
            logger.warning("%s: a store of %s, which is not kept; give it a larger size", name, sizes)
        return None if pending is None else BlobWriter(self, name, value, position, list(row_bytes), where, pending)

    def create_spare(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        where = _layout(name, row_bytes, value, position)
        with self.counters.faults():
            pending = self.blobs.begin_spare(name, where.nbytes, value, position)
        return None if pending is None else BlobWriter(self, name, value, position, list(row_bytes), where, pending)

    @property
    def idle_bytes(self) -> int:
        return self.blobs.idle_bytes

    def delete(self, names: Sequence[ObjectName]) -> int:
        with self.counters.faults():
            return self.blobs.delete(names)

    def objects(
        self, namespace: str | None = None, group: str | None = None, *, headers: bool = False
    ) -> Iterator[Stored]:
        if namespace is not None:
            check_namespace(namespace)
        if group is not None:
            check_group(group)
        listed = self.blobs.objects(namespace, group)
        while some := list(islice(listed, _HEADERS_AT_ONCE)):
            yield from self._with_headers(some) if headers else some

    def touch(self, names: Sequence[ObjectName]) -> None:
        with self.counters.faults():
            self.blobs.touch(names)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        check_namespace(namespace)
        with self.counters.faults():
            self.blobs.describe(namespace, info)

    def descriptions(self) -> dict[str, dict[str, str]]:
        with self.counters.faults():
            return self.blobs.descriptions()

    @property
    def stats(self) -> StoreStats:
        with suppress(StoreFault):
            self._usage = self.blobs.usage()
        blobs, usage = self.blobs, self._usage
        return replace(
            self.counters.copy(),
            objects=usage.objects,
            nbytes=usage.nbytes,
            spare_bytes=blobs.spare_bytes,
            evicted=blobs.evicted,
            dropped=blobs.dropped,
            round_trips=blobs.round_trips,
        )

    def collect(self) -> Leftovers:
        with self.counters.faults():
            return self.blobs.collect()

    def shrink(self, nbytes: int) -> int:
        with self.counters.faults():
            return self.blobs.shrink(nbytes)

    def on_evict(self, hook: EvictionHook | None) -> None:
        def evicted(name: ObjectName, blob: Blob) -> None:
            try:
                header = header_of(name, blob)
            except (CorruptObject, UnknownFormat, StoreFault):
                blob.close()
                return
            assert hook is not None
            hook(BlobReader(self, header, blob))

        self.blobs.on_evict = None if hook is None else evicted

    def close(self) -> None:
        self.blobs.close()

    def is_replaced(self, header: Header) -> bool:
        """Whether another object lies under the name by now. Its rows may differ in the last bits of their numbers."""
        try:
            blob = self.blobs.open(header.name)
            try:
                return header_of(header.name, blob) != header
            finally:
                blob.close()
        except (MissingObject, CorruptObject, UnknownFormat, StoreFault):
            return False

    def drop_corrupt(self, name: ObjectName, error: CorruptObject) -> None:
        """Count and delete a corrupt object. If the deletion fails, the next read finds it corrupt again."""
        with self.counters as stats:
            stats.corrupt += 1
            count = stats.corrupt
        if self.keeps_corrupt:
            return
        if _is_logged(count):
            logger.warning("%s; it is deleted (corrupt objects so far: %d)", error, count)
        with suppress(StoreFault), self.counters.faults():
            self.blobs.delete([name])

    def _count_unknown(self, error: UnknownFormat) -> None:
        with self.counters as stats:
            stats.unknown += 1
            count = stats.unknown
        if _is_logged(count) and not self.keeps_corrupt:
            logger.warning("%s; it is left alone (objects of an unknown format so far: %d)", error, count)

    def _with_headers(self, listed: Sequence[Stored]) -> list[Stored]:
        """Add value and position. An entry whose header cannot be read is returned as it is."""
        lacking = [stored for stored in listed if stored.value is None]
        blobs = self.blobs.open_all([stored.name for stored in lacking]) if lacking else []
        read: dict[ObjectName, Stored] = {}
        faults: list[StoreFault] = []
        for stored, blob in zip(lacking, blobs, strict=True):
            found = _with_header(stored, blob)
            if isinstance(found, StoreFault):
                faults.append(found)
            else:
                read[stored.name] = found
        if faults:  # all blobs are closed by now
            raise faults[0]
        return [read.get(stored.name, stored) for stored in listed]


class BlobReader(Reader):
    def __init__(self, store: BlobStore, header: Header, blob: Blob) -> None:
        self.header = header
        self._store = store
        self._blob = blob
        self._handle = SharedHandle(f"the reader of {header.name}", blob.close)

    def read(self, row: int, buffers: Sequence[memoryview]) -> None:
        name, views = self.header.name, as_bytes(buffers)
        entry = self.header.rows[_check_row(name, row, len(self.header.rows))]
        _check_length(name, row, entry.nbytes, views)
        with self._handle, self._store.counters.faults():
            try:
                self._read(entry, views)
            except CorruptObject as error:
                if self._store.is_replaced(self.header):
                    raise MissingObject(f"{name}: it was deleted, and written again, while it was read") from None
                self._store.drop_corrupt(name, error)
                raise
        with self._store.counters as stats:
            stats.read_bytes += entry.nbytes

    def _read(self, entry: StoredRow, views: Sequence[memoryview]) -> None:
        digest, offset = xxh3_64(), entry.offset
        for piece, wanted in pieces(views, entry.nbytes, self._blob.piece_bytes):
            found = self._blob.read_at(offset, piece, wanted)
            if found != wanted:
                raise CorruptObject(f"{self.header.name}: it ends after {offset + found:,} bytes, inside a row")
            for view in piece:
                digest.update(view)
            offset += wanted
        if digest.intdigest() != entry.checksum:
            raise CorruptObject(f"{self.header.name}: {entry.nbytes:,} bytes of a row are not those that were written")

    def close(self) -> None:
        self._handle.close()


class BlobWriter(Writer):
    def __init__(
        self,
        store: BlobStore,
        name: ObjectName,
        value: float,
        position: int,
        row_bytes: list[int],
        where: Layout,
        pending: PendingBlob,
    ) -> None:
        self._store = store
        self._name, self._value, self._position = name, value, position
        self._row_bytes, self._where = row_bytes, where
        self._pending_blob = pending
        self._checksums: dict[int, int] = {}
        self._begun: set[int] = set()
        self._committed = False
        self._lock = Lock()
        self._handle = SharedHandle(f"the writer of {name}", self._end)

    def write(self, row: int, buffers: Sequence[memoryview]) -> None:
        views = as_bytes(buffers)
        _check_row(self._name, row, len(self._row_bytes))
        _check_length(self._name, row, self._row_bytes[row], views)
        with self._handle, self._store.counters.faults():
            with self._lock:
                if row in self._begun:
                    raise StoreInputError(f"{self._name}: row {row} is written twice")
                self._begun.add(row)
            digest = xxh3_64()
            for view in views:
                digest.update(view)
            self._pending_blob.write_at(self._where.offsets[row], views)
            self._checksums[row] = digest.intdigest()

    def commit(self) -> bool:
        missing = [row for row in range(len(self._row_bytes)) if row not in self._checksums]
        if missing:
            self.abort()
            raise StoreInputError(f"{self._name}: commit without rows {missing[:8]}; nothing is kept")
        rows = [
            StoredRow(offset, nbytes, self._checksums[row])
            for row, (offset, nbytes) in enumerate(zip(self._where.offsets, self._row_bytes, strict=True))
        ]
        header = encode_header(Header(self._name, self._value, self._position, tuple(rows)))
        try:
            with self._handle, self._store.counters.faults():
                self._pending_blob.write_at(0, [memoryview(header)])
                first = self._pending_blob.publish()
                self._committed = True
        finally:
            self.abort()
        if first:
            with self._store.counters as stats:
                stats.saved += 1
                stats.saved_bytes += self._where.nbytes
        return first

    def abort(self) -> None:
        self._handle.close()

    def _end(self) -> None:
        if not self._committed:
            self._pending_blob.discard()


def _layout(name: ObjectName, row_bytes: Sequence[int], value: float, position: int) -> Layout:
    """The layout of a new object. Raises StoreInputError for arguments that no object may have."""
    if not isfinite(value) or value < 0 or not 0 <= position < 2**64:
        raise StoreInputError(f"value {value}, position {position}: both are numbers from 0 up")
    return layout(name.group, row_bytes)


def _with_header(stored: Stored, found: Blob | StoreError) -> Stored | StoreFault:
    try:
        if isinstance(found, StoreError):
            raise found
        try:
            header = header_of(stored.name, found)
        finally:
            found.close()
    except StoreFault as fault:
        return fault
    except (MissingObject, CorruptObject, UnknownFormat):
        return stored
    return stored._replace(value=header.value, position=header.position)


def _is_logged(count: int) -> bool:
    """True for the 1st, 2nd, 4th, 8th ...: a failing disk has thousands of bad objects."""
    return count & (count - 1) == 0


def _check_row(name: ObjectName, row: int, count: int) -> int:
    if not 0 <= row < count:
        raise StoreInputError(f"{name}: no row {row}, it has rows 0 to {count - 1}")
    return row


def _check_length(name: ObjectName, row: int, nbytes: int, views: Sequence[memoryview]) -> None:
    if total(views) != nbytes:
        raise StoreInputError(f"{name}: buffers of {total(views):,} bytes for row {row} of {nbytes:,}")
