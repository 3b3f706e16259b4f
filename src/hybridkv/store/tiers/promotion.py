"""Promotion: rows that a load reads from a slow tier are also written to the faster tiers, without a second read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import numpy as np

from hybridkv.errors import StoreError
from hybridkv.store.buffers import as_bytes, gather
from hybridkv.store.objects import Header
from hybridkv.store.store import Store
from hybridkv.store.tiers.copy_queue import CopyQueue, CopyTask
from hybridkv.store.tiers.io import write_object


class Promotion:
    """Promotion of one object. The object is promoted only if all its rows are read."""

    def __init__(
        self, header: Header, stores: Sequence[Store], copies: CopyQueue, on_end: Callable[[bool], None]
    ) -> None:
        """`copies` has reserved room. `on_end` is called once: whether the object was written to one of `stores`."""
        self._header = header
        self._stores = stores
        self._copies = copies
        self._on_end = on_end
        self._lock = Lock()
        self._rows: dict[int, memoryview] = {}
        self._is_closed = False

    def add(self, row: int, buffers: Sequence[memoryview]) -> None:
        """Copy a row that was read and verified. The last row queues the object for writing."""
        try:
            data = np.empty(self._header.rows[row].nbytes, np.uint8).data
            gather(data, as_bytes(buffers))
        except MemoryError:  # the load itself continues
            self.close()
            return
        with self._lock:
            if self._is_closed:
                return
            self._rows[row] = data
            self._is_closed = is_whole = len(self._rows) == len(self._header.rows)
        if is_whole and not self._copies.send(CopyTask(self._header.nbytes, self._write)):
            self._on_end(False)

    def close(self) -> None:
        """Cancel the promotion if rows are missing: the load reads no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._rows.clear()
        self._copies.release(self._header.nbytes)
        self._on_end(False)

    def _write(self) -> None:
        is_written = False
        try:
            with suppress(StoreError):
                is_written = write_object(self._header, self._rows.__getitem__, self._stores)
        finally:
            self._rows.clear()
            self._on_end(is_written)
