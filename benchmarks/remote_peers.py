"""Plain clients of the servers that stores live on: what people would write without hybridkv. No checksums.

Each writes and reads values of equal size. A value that was read is copied to the caller's buffer, where an engine
needs it, unless the client can put it there itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from hybridkv.store.buffers import copy


class Peer(ABC):
    name: str

    @abstractmethod
    def write(self, key: str, value: memoryview) -> None: ...

    @abstractmethod
    def read(self, key: str, buffer: memoryview) -> None: ...

    @abstractmethod
    def read_range(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from a part of a larger value."""

    def close(self) -> None:
        return


class RedisPy(Peer):
    """redis-py with hiredis."""

    name = "redis-py with hiredis"

    def __init__(self, url: str, threads: int) -> None:
        import hiredis  # noqa: F401 - redis-py uses it if it is there
        import redis

        parts = urlsplit(url)
        where: dict[str, Any] = {"host": parts.hostname, "port": parts.port}
        if "+unix" in parts.scheme:
            where = {"unix_socket_path": parts.path}
        self._client: Any = redis.Redis(**where, max_connections=threads + 1)

    def write(self, key: str, value: memoryview) -> None:
        self._client.set(key, value)

    def read(self, key: str, buffer: memoryview) -> None:
        copy(buffer, memoryview(self._client.get(key)))

    def read_range(self, key: str, offset: int, buffer: memoryview) -> None:
        copy(buffer, memoryview(self._client.getrange(key, offset, offset + len(buffer) - 1)))

    def close(self) -> None:
        self._client.close()


class Obstore(Peer):
    """obstore, one request a value."""

    name = "obstore"

    def __init__(self, url: str, threads: int) -> None:
        import obstore
        from obstore.store import S3Store

        parts = urlsplit(url)
        options = parse_qs(parts.query)
        self._obstore: Any = obstore
        self._store: Any = S3Store(
            parts.netloc,
            prefix="plain",
            endpoint=options["endpoint"][0],
            region="us-east-1",
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True},
        )

    def write(self, key: str, value: memoryview) -> None:
        self._obstore.put(self._store, key, value, use_multipart=False)

    def read(self, key: str, buffer: memoryview) -> None:
        copy(buffer, memoryview(self._obstore.get(self._store, key).bytes()))

    def read_range(self, key: str, offset: int, buffer: memoryview) -> None:
        copy(buffer, memoryview(self._obstore.get_range(self._store, key, start=offset, length=len(buffer))))


class MooncakeClient(Peer):
    """Mooncake's own client. The caller's buffers are registered with it, so that it copies nothing itself."""

    name = "Mooncake's client"

    def __init__(self, url: str, threads: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._client: Any = MooncakeDistributedStore()
        self._registered: dict[int, int] = {}
        """Bytes by address."""
        self._lock = Lock()
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", urlsplit(url).netloc)
        assert code == 0, f"Mooncake's setup: {code}"

    def write(self, key: str, value: memoryview) -> None:
        code = self._client.put_from(key, self._address(value), len(value))
        assert code == 0, f"put_from: {code}"

    def read(self, key: str, buffer: memoryview) -> None:
        count = self._client.get_into(key, self._address(buffer), len(buffer))
        assert count == len(buffer), f"get_into: {count}"

    def read_range(self, key: str, offset: int, buffer: memoryview) -> None:
        address = self._address(buffer)
        found = self._client.get_into_ranges([address], [[key]], [[[0]]], [[[offset]]], [[[len(buffer)]]])
        assert found == [[[len(buffer)]]], f"get_into_ranges: {found}"

    def close(self) -> None:
        for address in self._registered:
            self._client.unregister_buffer(address)
        self._client.close()

    def _address(self, buffer: memoryview) -> int:
        address = int(np.frombuffer(buffer, np.uint8).ctypes.data)
        with self._lock:
            if self._registered.get(address, 0) < len(buffer):
                if address in self._registered:
                    self._client.unregister_buffer(address)
                code = self._client.register_buffer(address, len(buffer))
                assert code == 0, f"register_buffer: {code}"
                self._registered[address] = len(buffer)
        return address
