"""A blob on a server. What has come already is not asked for again, and small reads bring along what follows them."""

from __future__ import annotations

from abc import abstractmethod
from threading import Lock
from typing import NamedTuple

import numpy as np

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import Blob
from hybridkv.store.buffers import Buffers, cut, scatter, skip

_AHEAD_BYTES = 256 << 10
"""Bytes that a small read fetches: rows are read in order, so the next ones are most likely needed soon."""
_SMALL_BYTES = _AHEAD_BYTES // 2


class _Piece(NamedTuple):
    """Bytes that have come, with their offset."""

    offset: int
    data: memoryview


class RemoteBlob(Blob):
    """Backends implement `fetch`."""

    def __init__(self, nbytes: int, first: bytes | memoryview) -> None:
        """`first`: the first bytes, which came when the blob was opened."""
        self.nbytes = nbytes
        self._first = _Piece(0, memoryview(first))
        self._last = self._first
        """What the last small read fetched."""
        self._small = Lock()
        """Held by a small read: others most likely find their bytes in what it fetches."""
        self._fault: StoreFault | None = None
        """The fault of the last small read that failed."""

    @abstractmethod
    def fetch(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        """Fill the buffers, which hold `nbytes`, from the server. Returns the number of bytes that came."""

    def read_at(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        wanted = max(0, min(nbytes, self.nbytes - offset))
        done = _served(self._first, offset, buffers, wanted)
        if wanted - done >= _SMALL_BYTES:
            return done + self.fetch(offset + done, cut(skip(buffers, done), wanted - done), wanted - done)
        if done == wanted:
            return done
        before = self._fault
        with self._small:
            if self._fault is not None and self._fault is not before:
                raise self._fault  # else threads would wait for a dead server one after another
            try:
                return done + self._read_small(offset + done, cut(skip(buffers, done), wanted - done), wanted - done)
            except StoreFault as fault:
                self._fault = fault
                raise

    def close(self) -> None:
        self._first = self._last = _Piece(0, memoryview(b""))

    def _read_small(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        done = _served(self._last, offset, buffers, nbytes)
        if done == nbytes:
            return done
        data = np.empty(min(_AHEAD_BYTES, self.nbytes - offset - done), np.uint8).data
        count = self.fetch(offset + done, [data], len(data))
        self._last = _Piece(offset + done, data[:count])
        return done + scatter(data[: min(count, nbytes - done)], skip(buffers, done))


def _served(piece: _Piece, offset: int, buffers: Buffers, nbytes: int) -> int:
    """Copy the bytes from `offset` on that the piece has, at most `nbytes`. Returns how many."""
    begin = offset - piece.offset
    if not 0 <= begin < len(piece.data):
        return 0
    return scatter(piece.data[begin : begin + nbytes], buffers)
