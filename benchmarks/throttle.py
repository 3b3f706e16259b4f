"""A store of a given bandwidth around another one: what a slower disk or network would be like."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.store import Leftovers, ObjectName, Reader, Store, Stored, StoreStats, Writer


class RowTime(NamedTuple):
    group: str
    row: int
    began: float
    ended: float


class ThrottledStore(Store):
    """Reads take as long as `bytes_per_s` says, all readers together; everything else takes no longer than it does."""

    def __init__(self, store: Store, bytes_per_s: float | None) -> None:
        self._store = store
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.rows: list[RowTime] = []
        """Every row that was read."""

    @property
    def size(self) -> int:
        return self._store.size

    def open(self, name: ObjectName) -> Reader:
        return _ThrottledReader(self, self._store.open(name))

    def pass_through(self, nbytes: int) -> None:
        """Wait until so many bytes have come through, after all those before them."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        return self._store.lookup(names)

    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        return self._store.create(name, row_bytes, value=value, position=position)

    def delete(self, names: Sequence[ObjectName]) -> int:
        return self._store.delete(names)

    def objects(
        self, namespace: str | None = None, group: str | None = None, *, headers: bool = False
    ) -> Iterator[Stored]:
        return self._store.objects(namespace, group, headers=headers)

    def touch(self, names: Sequence[ObjectName]) -> None:
        self._store.touch(names)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        self._store.describe(namespace, info)

    def descriptions(self) -> dict[str, dict[str, str]]:
        return self._store.descriptions()

    @property
    def stats(self) -> StoreStats:
        return self._store.stats

    def collect(self) -> Leftovers:
        return self._store.collect()

    def shrink(self, nbytes: int) -> int:
        return self._store.shrink(nbytes)

    def on_evict(self, hook: Callable[[Reader], None] | None) -> None:
        self._store.on_evict(hook)

    def close(self) -> None:
        """The store behind it serves others."""


class _ThrottledReader(Reader):
    def __init__(self, throttle: ThrottledStore, reader: Reader) -> None:
        self._throttle = throttle
        self._reader = reader
        self.header = reader.header

    def read(self, row: int, buffers: Sequence[memoryview]) -> None:
        began = time.perf_counter()
        self._throttle.pass_through(sum(map(len, buffers)))
        self._reader.read(row, buffers)
        self._throttle.rows.append(RowTime(self.header.name.group, row, began, time.perf_counter()))

    def close(self) -> None:
        self._reader.close()
