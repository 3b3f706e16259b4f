"""An object on its way up, made of rows that someone reads anyway: the tier they come from is not read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import numpy as np

from hybridkv.errors import StoreError
from hybridkv.store.buffers import as_bytes, gather
from hybridkv.store.courier import Courier, Errand
from hybridkv.store.objects import Header
from hybridkv.store.store import Store
from hybridkv.store.tier_io import write_object


class Lift:
    """All rows or nothing: an object that is not read whole stays where it is."""

    def __init__(
        self, header: Header, stores: Sequence[Store], courier: Courier, on_end: Callable[[bool], None]
    ) -> None:
        """`courier` has reserved room for it. `on_end` is told, once, whether it was written to one of `stores`."""
        self._header = header
        self._stores = stores
        self._courier = courier
        self._on_end = on_end
        self._lock = Lock()
        self._rows: dict[int, memoryview] = {}
        self._is_closed = False

    def add(self, row: int, buffers: Sequence[memoryview]) -> None:
        """A row that was read, and found right. It is copied; the last one sends the object off."""
        try:
            data = np.empty(self._header.rows[row].nbytes, np.uint8).data
            gather(data, as_bytes(buffers))
        except MemoryError:  # whoever reads has what it wants
            self.close()
            return
        with self._lock:
            if self._is_closed:
                return
            self._rows[row] = data
            self._is_closed = is_whole = len(self._rows) == len(self._header.rows)
        if is_whole and not self._courier.send(Errand(self._header.nbytes, self._write)):
            self._on_end(False)

    def close(self) -> None:
        """No more rows come."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._rows.clear()
        self._courier.release(self._header.nbytes)
        self._on_end(False)

    def _write(self) -> None:
        is_written = False
        try:
            with suppress(StoreError):
                is_written = write_object(self._header, self._rows.__getitem__, self._stores)
        finally:
            self._rows.clear()
            self._on_end(is_written)
