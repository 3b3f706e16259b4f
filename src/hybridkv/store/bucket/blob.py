"""One object in a bucket: open for reading, or gathered in memory until it is written in one request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import Blob, PendingBlob
from hybridkv.store.bucket.client import Client, Start
from hybridkv.store.buffers import Buffers, gather, scatter, skip, total
from hybridkv.store.names import ObjectName


class BucketBlob(Blob):
    """Its first bytes came with `open`. Reading the others raises MissingObject once the object is not the same."""

    def __init__(self, client: Client, name: ObjectName, key: str, start: Start) -> None:
        self.nbytes = start.nbytes
        self._client = client
        self._name = name
        self._key = key
        self._start = start

    def read_at(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        nbytes = max(0, min(nbytes, self.nbytes - offset))
        done = scatter(self._start.data[offset : offset + nbytes], buffers)
        if done < nbytes:
            rest = skip(buffers, done)
            self._client.read(self._key, self._start.e_tag, offset + done, rest, nbytes - done, str(self._name))
        return nbytes

    def close(self) -> None:
        pass


class PendingBucketBlob(PendingBlob):
    def __init__(
        self, name: ObjectName, nbytes: int, publish: Callable[[memoryview], bool], give_back: Callable[[], None]
    ) -> None:
        """Exactly one of `publish` and `give_back` is called, once."""
        self._publish = publish
        self._give_back = give_back
        try:
            self._data = np.zeros(nbytes, np.uint8).data  # gaps between rows must not show old memory
        except MemoryError:
            raise StoreFault(f"{name}: no {nbytes:,} bytes of memory left") from None

    def write_at(self, offset: int, buffers: Buffers) -> None:
        gather(self._data[offset : offset + total(buffers)], buffers)

    def publish(self) -> bool:
        return self._publish(self._data)

    def discard(self) -> None:
        self._give_back()
