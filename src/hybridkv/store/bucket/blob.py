"""One object in a bucket: open for reading, or gathered in memory until it is written in one request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import PendingBlob
from hybridkv.store.bucket.client import Client, Start
from hybridkv.store.buffers import Buffers, gather, total
from hybridkv.store.names import ObjectName
from hybridkv.store.remote_blob import RemoteBlob


class BucketBlob(RemoteBlob):
    """Reading raises MissingObject once the object is not the one that was opened."""

    def __init__(self, client: Client, name: ObjectName, key: str, start: Start) -> None:
        super().__init__(start.nbytes, start.data)
        self._client = client
        self._name = name
        self._key = key
        self._e_tag = start.e_tag

    def fetch(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        self._client.read(self._key, self._e_tag, offset, buffers, nbytes, str(self._name))
        return nbytes


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
