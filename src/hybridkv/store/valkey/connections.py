"""Connections to one server: opened, authenticated, kept for the next call."""

from __future__ import annotations

import os
import socket
import ssl
from collections import deque
from threading import Lock
from typing import NamedTuple

from hybridkv.errors import StoreFault
from hybridkv.store.valkey.resp import Connection
from hybridkv.store.valkey.wire import Reply, ServerError, encode

_MOST_IDLE = 32
_CONNECT_S = 2.0
_HELLO_BYTES = 1 << 16
_REFUSED = ("WRONGPASS", "NOAUTH", "NOPERM")


class RefusedError(StoreFault):
    """The server does not accept the user, the password or the database."""


class Login(NamedTuple):
    """How every connection of a store begins."""

    user: str
    password: str | None
    database: int
    tls: ssl.SSLContext | None
    timeout: float

    def commands(self) -> list[list[bytes]]:
        hello: list[bytes | str] = ["HELLO", "2"]
        if self.password is not None:
            hello += ["AUTH", self.user or "default", self.password]
        found = [encode(*hello, "SETNAME", "hybridkv")]
        if self.database:
            found.append(encode("SELECT", self.database))
        return [[bytes(part) for part in parts] for parts in found]

    def __repr__(self) -> str:
        return f"Login(user={self.user!r}, database={self.database})"


class Place(NamedTuple):
    """Where a server listens: a host and a port, or the path of a Unix socket."""

    host: str
    port: int

    @property
    def is_path(self) -> bool:
        return self.port == 0

    def __str__(self) -> str:
        return self.host if self.is_path else f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Trips:
    """Counts the times that a thread waited for a server."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.count = 0

    def add(self) -> None:
        with self._lock:
            self.count += 1


class Pool:
    """Idle connections to one server. The one used last is taken first."""

    def __init__(self, place: Place, login: Login, trips: Trips) -> None:
        self.place = place
        self.timeout = login.timeout
        self._login = login
        self._trips = trips
        self._lock = Lock()
        self._idle: deque[Connection] = deque()
        self._closed = False
        self._pid = os.getpid()
        self.mode = ""
        """As the server says at login: standalone, cluster or sentinel."""

    def take(self, *, fresh: bool = False) -> tuple[Connection, bool]:
        """A connection, and whether it was used before. Raises OSError or RefusedError."""
        while not fresh:
            with self._lock:
                if self._pid != os.getpid():  # the parent process goes on using its connections
                    self._idle, self._pid = deque(), os.getpid()
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.is_idle():
                return connection, True
            connection.close()
        return self._open(), False

    def give(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _open(self) -> Connection:
        connection = Connection(self._connect(), self._login.timeout)
        try:
            self._log_in(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> socket.socket:
        timeout = min(_CONNECT_S, self._login.timeout)
        if self.place.is_path:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(timeout)
                sock.connect(self.place.host)
            except BaseException:
                sock.close()
                raise
            return sock
        try:
            sock = socket.create_connection(self.place, timeout)
        except UnicodeError:
            raise OSError("no host has such a name") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._login.tls is not None:
                return self._login.tls.wrap_socket(sock, server_hostname=self.place.host)
        except BaseException:
            sock.close()
            raise
        return sock

    def _log_in(self, connection: Connection) -> None:
        commands = self._login.commands()
        self._trips.add()
        connection.start(0)
        connection.send(part for parts in commands for part in parts)
        replies = [connection.reply(_HELLO_BYTES) for _ in commands]
        for reply in replies:
            if isinstance(reply, ServerError):
                raise _refusal(self.place, self._login, reply)
        self.mode = _mode(replies[0])


def _refusal(place: Place, login: Login, error: ServerError) -> StoreFault:
    if error.code in _REFUSED:
        user = f"user {login.user!r}" if login.user else "the default user"
        way = "check the user in the URL, and password_file= or HYBRIDKV_VALKEY_PASSWORD"
        reason = "NOAUTH: a password is needed" if error.code == "NOAUTH" else error
        return RefusedError(f"{place} refuses {user} ({reason}); {way}")
    if "unknown command" in str(error):
        # the server's text quotes what it was sent, and so the password
        return RefusedError(f"{place} does not know HELLO: this store needs Redis 6.2, or any Valkey")
    if "DB index" in str(error) or "SELECT" in str(error):
        return RefusedError(f"{place} has no database {login.database} ({error}); name another, as in /0")
    text = str(error)
    return StoreFault(f"{place}: {text.replace(login.password, '***') if login.password else text}")


def _mode(hello: Reply) -> str:
    """The field `mode` of the answer to HELLO."""
    if isinstance(hello, list):
        for name, value in zip(hello[::2], hello[1::2], strict=False):
            if name == b"mode" and isinstance(value, bytes):
                return value.decode("ascii", "replace")
    return ""
