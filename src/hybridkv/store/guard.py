"""Circuit breaker around a store: callers continue without a store that fails, and use it again once it works.

After a fault the store is skipped: lookups return False and nothing is written. The backoff is 1 s, doubled up to 60 s;
after each backoff one trial is let through: a write, or lookups until a read has succeeded or failed. Reads and writes
have separate breakers: a full disk can still be read. Objects that are missing, corrupt or of an unknown format are not
faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault, UnknownFormat
from hybridkv.store.breaker import Breaker
from hybridkv.store.counters import Counters
from hybridkv.store.names import ObjectName
from hybridkv.store.store import EvictionHook, Leftovers, Reader, Store, Stored, StoreStats, Writer

# Stages of a transfer. A breaker closes only after a call has succeeded at the stage that failed or a later one.
_BEGUN, _OPEN, _MOVED = 0, 1, 2


class Guarded(Store):
    """`open`, `read`, `write`, `commit` raise StoreFault. `lookup`, `create`, `touch`, `describe`, `delete` do not."""

    def __init__(self, store: Store, label: str = "store", clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self.label = label
        self._reading = Breaker(f"{label}: reading", clock)
        self._writing = Breaker(f"{label}: writing", clock)
        self._counters = Counters()

    @property
    def size(self) -> int:
        return self.store.size

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        if self._reading.admit(again=True):
            try:
                with self._watched(self._reading, _BEGUN):
                    return self.store.lookup(names)
            except StoreFault:
                return [False] * len(names)
        self._skip(len(names))
        return [False] * len(names)

    def open(self, name: ObjectName) -> Reader:
        if self._reading.resting:
            self._skip(1)
            raise StoreFault(f"{name}: {self.label} rests after a fault")
        with self._watched(self._reading, _OPEN):
            return _GuardedReader(self, self.store.open(name))

    @property
    def opens_together(self) -> int:
        return self.store.opens_together

    def open_all(self, names: Sequence[ObjectName]) -> list[Reader | StoreError]:
        if self._reading.resting:
            self._skip(len(names))
            return [StoreFault(f"{name}: {self.label} rests after a fault") for name in names]
        found: Sequence[Reader | StoreError]
        try:
            found = self.store.open_all(names)
        except StoreFault as fault:
            found = [fault] * len(names)
        return [self._watched_reader(one) for one in found]

    def _watched_reader(self, found: Reader | StoreError) -> Reader | StoreError:
        try:
            with self._watched(self._reading, _OPEN):
                if isinstance(found, StoreError):
                    raise found
                return _GuardedReader(self, found)
        except StoreError as error:
            return error

    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        return self._created(lambda: self.store.create(name, row_bytes, value=value, position=position))

    def create_spare(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        return self._created(lambda: self.store.create_spare(name, row_bytes, value=value, position=position))

    def _created(self, create: Callable[[], Writer | None]) -> Writer | None:
        if not self._writing.admit():
            self._skip(1)
            return None
        try:
            with self._watched(self._writing, _BEGUN):
                writer = create()
        except StoreFault:
            return None
        return None if writer is None else _GuardedWriter(self, writer)

    @property
    def idle_bytes(self) -> int:
        return self.store.idle_bytes

    def delete(self, names: Sequence[ObjectName]) -> int:
        deleted: list[int] = []
        self._leniently(len(names), lambda: deleted.append(self.store.delete(names)))
        return sum(deleted)

    def objects(
        self, namespace: str | None = None, group: str | None = None, *, headers: bool = False
    ) -> Iterator[Stored]:
        return self.store.objects(namespace, group, headers=headers)

    def touch(self, names: Sequence[ObjectName]) -> None:
        self._leniently(len(names), lambda: self.store.touch(names))

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        self._leniently(1, lambda: self.store.describe(namespace, info))

    def descriptions(self) -> dict[str, dict[str, str]]:
        return self.store.descriptions()

    @property
    def stats(self) -> StoreStats:
        stats = self.store.stats
        return replace(stats, skipped=stats.skipped + self._counters.copy().skipped)

    def collect(self) -> Leftovers:
        return self.store.collect()

    def shrink(self, nbytes: int) -> int:
        return self.store.shrink(nbytes)

    def on_evict(self, hook: EvictionHook | None) -> None:
        self.store.on_evict(hook)

    def close(self) -> None:
        self.store.close()

    def read(self, reader: Reader, row: int, buffers: Sequence[memoryview]) -> None:
        with self._watched(self._reading, _MOVED):
            reader.read(row, buffers)

    def write(self, writer: Writer, row: int, buffers: Sequence[memoryview]) -> None:
        with self._watched(self._writing, _OPEN):
            writer.write(row, buffers)

    def commit(self, writer: Writer) -> bool:
        with self._watched(self._writing, _MOVED):
            return writer.commit()

    @contextmanager
    def _watched(self, breaker: Breaker, reach: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            breaker.fail(reach, error)
            raise StoreFault(f"{self.label}: {error.strerror or error}") from error
        except StoreFault as error:
            breaker.fail(reach, error)
            raise
        except (MissingObject, CorruptObject, UnknownFormat):
            breaker.succeed(reach)
            raise
        breaker.succeed(reach)

    def _leniently(self, count: int, call: Callable[[], None]) -> None:
        """Make an optional call: skipped while the breaker is open. Its faults go to the breaker, not the caller."""
        if self._writing.resting:
            self._skip(count)
            return
        with suppress(StoreFault), self._watched(self._writing, _BEGUN):
            call()

    def _skip(self, count: int) -> None:
        with self._counters as stats:
            stats.skipped += count


class _GuardedReader(Reader):
    def __init__(self, guard: Guarded, reader: Reader) -> None:
        self._guard = guard
        self._reader = reader
        self.header = reader.header

    def read(self, row: int, buffers: Sequence[memoryview]) -> None:
        self._guard.read(self._reader, row, buffers)

    def close(self) -> None:
        self._reader.close()


class _GuardedWriter(Writer):
    def __init__(self, guard: Guarded, writer: Writer) -> None:
        self._guard = guard
        self._writer = writer

    def write(self, row: int, buffers: Sequence[memoryview]) -> None:
        self._guard.write(self._writer, row, buffers)

    def commit(self) -> bool:
        return self._guard.commit(self._writer)

    def abort(self) -> None:
        self._writer.abort()
