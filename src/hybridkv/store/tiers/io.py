"""Reads from the fastest tier that has an object, with fallback to the next; writes to several tiers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault
from hybridkv.store.counters import Counters
from hybridkv.store.names import ObjectName
from hybridkv.store.objects import Header
from hybridkv.store.store import Reader, Store, Writer


class Listener(Protocol):
    """Receives the rows that are read."""

    def add(self, row: int, buffers: Sequence[memoryview]) -> None: ...

    def close(self) -> None: ...


class TieredReader(Reader):
    """Falls back to the next store that has the object when a read fails. All copies of a name are equal."""

    def __init__(self, stores: Sequence[Store], level: int, first: Reader, counters: Counters) -> None:
        """`first`: the reader of the fastest store that has the object, which is at `level`."""
        self._stores = stores
        self._counters = counters
        self._lock = Lock()
        self._readers = [first]
        self._is_closed = False
        self.level = level
        """Index of the store that is read from."""
        self.listener: Listener | None = None
        self.header = first.header

    def read(self, row: int, buffers: Sequence[memoryview]) -> None:
        while True:
            reader = self._readers[-1]
            try:
                reader.read(row, buffers)
                break
            except (MissingObject, CorruptObject, StoreFault) as error:
                self._turn_from(reader, error)
        with self._counters as stats:
            stats.read_bytes += self.header.rows[row].nbytes
        if self.listener is not None:
            self.listener.add(row, buffers)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        with self._lock:
            self._is_closed = True
            for reader in self._readers:
                reader.close()

    def _turn_from(self, reader: Reader, error: StoreError) -> None:
        """Open the next store's copy, unless another thread has done so. Raises `error` if there is none."""
        with self._lock:
            if reader is not self._readers[-1]:
                return
            if self._is_closed:
                raise error
            (following,) = open_highest(self._stores, [self.header.name], self.level + 1)
            if isinstance(following, StoreError):
                raise error from None
            self.level = following.level
            self._readers.append(following.reader)
            if [row.nbytes for row in following.reader.header.rows] != [row.nbytes for row in self.header.rows]:
                raise error


class Opened(NamedTuple):
    level: int
    reader: Reader


def open_highest(stores: Sequence[Store], names: Sequence[ObjectName], level: int = 0) -> list[Opened | StoreError]:
    """Open each object in the first store from `level` on that can. Each store is asked once for all that are left."""
    found: list[Opened | StoreError] = [MissingObject(f"{name}: in no tier") for name in names]
    left = list(range(len(names)))
    for here in range(level, len(stores)):
        for number, one in zip(left, stores[here].open_all([names[number] for number in left]), strict=True):
            if isinstance(one, Reader):
                found[number] = Opened(here, one)
            elif not isinstance(one, MissingObject):
                found[number] = one
        left = [number for number in left if isinstance(found[number], StoreError)]
        if not left:
            break
    return found


class TieredWriter(Writer):
    """Writes to several stores. A store that fails is left out; the call raises only if none is left."""

    def __init__(self, writers: Sequence[Writer], nbytes: int, counters: Counters | None = None) -> None:
        self._writers = list(writers)
        self._nbytes = nbytes
        self._counters = counters
        self._lock = Lock()

    def write(self, row: int, buffers: Sequence[memoryview]) -> None:
        for writer in self._alive():
            try:
                writer.write(row, buffers)
            except StoreFault as error:
                self._leave_out(writer, error)

    def commit(self) -> bool:
        first = False
        for writer in self._alive():
            try:
                first = writer.commit() or first
            except StoreFault as error:
                self._leave_out(writer, error)
        if first and self._counters is not None:
            with self._counters as stats:
                stats.saved += 1
                stats.saved_bytes += self._nbytes
        return first

    def abort(self) -> None:
        for writer in self._alive():
            writer.abort()

    def _alive(self) -> list[Writer]:
        with self._lock:
            return list(self._writers)

    def _leave_out(self, writer: Writer, error: StoreFault) -> None:
        writer.abort()
        with self._lock:
            if writer in self._writers:
                self._writers.remove(writer)
            if not self._writers:
                raise error


def begin_writing(
    stores: Sequence[Store], name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int
) -> list[Writer]:
    """Begin an object in every store that accepts it. Raises a store's fault only if there is no writer at all."""
    writers: list[Writer] = []
    trouble: StoreFault | None = None
    try:
        for store in stores:
            try:
                writer = store.create(name, row_bytes, value=value, position=position)
            except StoreFault as error:
                trouble = error
                continue
            if writer is not None:
                writers.append(writer)
    except BaseException:
        for writer in writers:
            writer.abort()
        raise
    if trouble is not None and not writers:
        raise trouble
    return writers


def copy_object(reader: Reader, store: Store) -> bool:
    """Copy an object to `store`. False: the store did not accept it (it exists there, or there is no room)."""
    sizes = [row.nbytes for row in reader.header.rows]
    buffer = np.empty(max(sizes), np.uint8).data

    def read(row: int) -> memoryview:
        data = buffer[: sizes[row]]
        reader.read(row, [data])
        return data

    return write_object(reader.header, read, [store])


def write_object(header: Header, row_of: Callable[[int], memoryview], stores: Sequence[Store]) -> bool:
    """Write an object to all stores that accept it; `row_of` is called once for each row. False: none accepted it."""
    sizes = [row.nbytes for row in header.rows]
    writers = begin_writing(stores, header.name, sizes, value=header.value, position=header.position)
    if not writers:
        return False
    with TieredWriter(writers, sum(sizes)) as writer:
        for row in range(len(sizes)):
            writer.write(row, [row_of(row)])
        writer.commit()
    return True
