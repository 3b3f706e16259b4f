"""The proxy of the fault tests does what the tests rely on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.store.servers.proxy import Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """In front of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with Proxy(("127.0.0.1", listener.getsockname()[1])) as proxy:
        yield proxy
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def exchange(proxy: Proxy, data: bytes, timeout: float = 5.0) -> bytes:
    """What comes back until so many bytes have come, or the connection is closed."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout) as sock:
        sock.sendall(data)
        found = b""
        while len(found) < len(data) and (more := sock.recv(1 << 16)):
            found += more
        return found


def test_bytes_pass_and_connections_are_counted(proxy: Proxy) -> None:
    data = bytes(range(256)) * 1000
    assert exchange(proxy, data) == data
    assert exchange(proxy, b"x") == b"x"
    assert proxy.connections == 2


def test_replies_are_cut_after_so_many_bytes(proxy: Proxy) -> None:
    proxy.cut_after = 1000
    assert exchange(proxy, bytes(5000)) == bytes(1000)
    proxy.cut_after, proxy.cut_requests_after = None, 10
    assert exchange(proxy, bytes(50)) in (bytes(10), b"")


def test_replies_are_late_or_never_come(proxy: Proxy) -> None:
    proxy.delay_s = 0.1
    begin = time.monotonic()
    assert exchange(proxy, b"x") == b"x"
    assert time.monotonic() - begin >= 0.1
    proxy.silent = True
    with pytest.raises(TimeoutError):
        exchange(proxy, b"x", timeout=0.2)


def test_answers_are_made_up(proxy: Proxy) -> None:
    proxy.answer = b"!?"
    assert exchange(proxy, b"ab") == b"!?"


def test_connections_are_refused_and_cut(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        assert proxy.open_connections == 1
        proxy.cut()
        assert sock.recv(1) == b""
    proxy.refuse = True
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as sock:
        assert sock.recv(1) == b""
