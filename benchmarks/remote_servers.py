"""The servers of `store_remote.py`, each with the URLs of its stores and the plain client that it is compared with."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from remote_peers import MooncakeClient, Obstore, Peer, RedisPy

from tests.store.servers import mooncake, s3, valkey


class Server(ABC):
    name: str
    urls: list[str]

    @classmethod
    def why_not(cls) -> str | None:
        """Why it cannot run here; None if it can."""
        return None

    @abstractmethod
    def peer(self, url: str, threads: int) -> Peer: ...

    def clear(self) -> None:
        """Remove the values of plain clients."""
        return

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self.start(Path(self._folder.name))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()
        self._folder.cleanup()

    @abstractmethod
    def start(self, folder: Path) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...


class Valkey(Server):
    name = "valkey"

    @classmethod
    def why_not(cls) -> str | None:
        return None if find_spec("hiredis") else "hiredis is not installed: make setup"

    def start(self, folder: Path) -> None:
        self._server = valkey.ValkeyServer().start()
        self.urls = [self._server.unix_url, self._server.url]

    def peer(self, url: str, threads: int) -> Peer:
        return RedisPy(url, threads)

    def clear(self) -> None:
        self._server.ask("FLUSHALL")

    def stop(self) -> None:
        self._server.stop()


class S3(Server):
    name = "s3"

    def start(self, folder: Path) -> None:
        os.environ.update(s3.CREDENTIALS)
        self._server = s3.S3Server(folder / "s3").start()
        self.urls = [self._server.url("bench")]

    def peer(self, url: str, threads: int) -> Peer:
        return Obstore(url, threads)

    def stop(self) -> None:
        self._server.stop()


class Mooncake(Server):
    name = "mooncake"

    @classmethod
    def why_not(cls) -> str | None:
        return mooncake.why_not()

    def start(self, folder: Path) -> None:
        mooncake.make_importable()
        self._server = mooncake.MooncakeServer(folder, size="2 GB")
        self._server.start()
        self.urls = [self._server.url.replace("buffer=64MiB", "buffer=512MiB")]
        self._client = self._server.client()

    def peer(self, url: str, threads: int) -> Peer:
        return MooncakeClient(url, threads)

    def clear(self) -> None:
        self._client.remove_by_regex("^plain-", True)

    def stop(self) -> None:
        self._client.close()
        self._server.stop()


SERVERS: dict[str, type[Server]] = {one.name: one for one in (Valkey, S3, Mooncake)}
