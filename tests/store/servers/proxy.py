"""A TCP proxy that misbehaves on demand: it cuts, delays, keeps silent, or answers with anything.

    with Proxy(("127.0.0.1", server.port)) as proxy:
        proxy.cut_after = 1000  # of a connection's bytes from the server
        connect(f"valkey://{proxy.host}")

Attributes may be changed at any time, and count for connections that are open already.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Self

_CHUNK = 1 << 16


class Proxy:
    def __init__(self, target: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> None:
        """`target`: host and port, or the path of a Unix socket. `tls`: what clients speak to the proxy."""
        self.target = target
        self.tls = tls
        self.cut_after: int | None = None
        """Close a connection once so many bytes of the server have passed on it."""
        self.cut_requests_after: int | None = None
        """The same for bytes of the client."""
        self.cut_next = 0
        """Cut so many connections when something comes from their clients, before it is passed on."""
        self.delay_s = 0.0
        """Wait so long before each chunk of the server (64 KiB at most) is passed on."""
        self.silent = False
        """Pass nothing of the server on; connections stay open."""
        self.deaf = False
        """Read nothing from clients, so that their writes block in the end."""
        self.refuse = False
        """Close new connections at once."""
        self.answer: bytes | None = None
        """Send this for each chunk of the client, in place of what the server says. The server gets nothing."""
        self.connections = 0
        """Connections accepted so far."""
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        with self._lock:
            return len(self._pairs)

    def start(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop listening and cut all connections. A second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if self._thread is not None:
            self._thread.join(5)
        self.cut()

    def cut(self) -> None:
        """Cut all connections now."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _shut(*pair)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refuse:
                client.close()
                continue
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        """Connect a client to the server, and pass bytes in both directions until one of them closes."""
        try:
            if self.tls is not None:
                client = self.tls.wrap_socket(client, server_side=True)
            server = _connect(self.target)
        except OSError:
            client.close()
            return
        client.settimeout(None)
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        back = threading.Thread(target=self._pass, args=(server, client, True), daemon=True)
        back.start()
        self._pass(client, server, False)
        back.join()
        with self._lock:
            self._pairs.discard(pair)
        client.close()
        server.close()

    def _pass(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if not is_reply and self._listener is not None:
                    while self.deaf and self._listener is not None:
                        time.sleep(0.01)
                    if self.cut_next > 0:
                        self.cut_next -= 1
                        break
                    if self.answer is not None:
                        source.sendall(self.answer)
                        continue
                if is_reply:
                    time.sleep(self.delay_s)
                    while self.silent and self._listener is not None:
                        time.sleep(0.01)
                most = self.cut_after if is_reply else self.cut_requests_after
                if most is not None:
                    data = data[: max(0, most - passed)]
                target.sendall(data)
                passed += len(data)
                if most is not None and passed >= most:
                    break
        _shut(source, target)


def _connect(target: tuple[str, int] | str) -> socket.socket:
    if isinstance(target, tuple):
        return socket.create_connection(target, 5)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(target)
    return sock


def _shut(*socks: socket.socket) -> None:
    for sock in socks:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
