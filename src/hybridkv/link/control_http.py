"""HTTP below the control server: bounded connections, deadlines for reading, replies in one packet."""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hybridkv.link.control import to_json

LOG = logging.getLogger("hybridkv.link")
_DRAIN_BYTES = 2**16
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 16\r\n\r\n" + b'{"error":"busy"}'
_POLL_S = 0.05


class Listener(ThreadingHTTPServer):
    """Accepts connections, one thread for each, `max_connections` at most; further ones get a 503."""

    request_queue_size = 128

    def __init__(self, host: str, port: int, max_connections: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        super().__init__((host, port), handler)
        self._accepting = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="link-accept", daemon=True)
        self._accepting.start()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks DNS for the host's name

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="link-serve", daemon=True
        )
        with self._lock:
            has_room = not self._is_closed and len(self._open) < self._max_connections
            if has_room:
                self._open[request] = thread
        if has_room:
            thread.start()
        else:
            self._turn_away(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.exception("a connection of the link has failed")

    def close(self, timeout_s: float) -> None:
        """Close all connections. Threads whose handlers run longer than `timeout_s` end when their handlers return."""
        self.shutdown()
        self.server_close()
        with self._lock:
            self._is_closed = True
            still_open = dict(self._open)
        for connection in still_open:
            _shut(connection)
        end = time.monotonic() + timeout_s
        for thread in (self._accepting, *still_open.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _turn_away(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            connection.send(_BUSY)
        except OSError:
            LOG.debug("a connection that was turned away had gone")
        self.shutdown_request(connection)


class JsonRequests(BaseHTTPRequestHandler, ABC):
    """Reads requests within a deadline and answers JSON. A subclass implements `answer_post`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    request_s = 10.0
    """Seconds for a request to arrive, and for a reply to be taken."""
    idle_s = 300.0
    """Seconds between two requests of a connection that has sent an authenticated call."""
    is_proven = False

    @abstractmethod
    def answer_post(self) -> None:
        """Answer a POST request: read its body, or skip it."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._incoming, _DRAIN_BYTES)

    def handle_one_request(self) -> None:
        self._incoming.begin(self.idle_s if self.is_proven else self.request_s, self.request_s)
        try:
            super().handle_one_request()
        except OSError:  # the client has gone or is too slow
            self.close_connection = True

    def do_POST(self) -> None:
        self.answer_post()

    def read_body(self, max_bytes: int) -> bytes | None:
        """The request's body. None: it is refused, and the refusal is sent."""
        size = self._body_size(max_bytes)
        if size is None:
            return None
        body = self.rfile.read(size)
        if len(body) < size:
            self.close_connection = True
            return None
        return body

    def skip_body(self, max_bytes: int) -> bool:
        """Read and drop the body: the connection stays usable. False: it is refused, and the refusal is sent."""
        left = self._body_size(max_bytes)
        if left is None:
            return False
        while left:
            read = len(self.rfile.read(min(left, _DRAIN_BYTES)))
            if not read:
                self.close_connection = True
                return False
            left -= read
        return True

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += ["Connection: close"] if self.close_connection else []
        head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode("latin-1")
        self.connection.settimeout(self.request_s)
        self.connection.sendall(head + body)

    def refuse(self, status: int, error: str, **more: object) -> None:
        """Send an error and close the connection: the body may be unread."""
        self.close_connection = True
        self.reply(status, to_json({"error": error, **more}))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class's errors, as JSON; an unknown method is a 404."""
        self.refuse(404 if code == HTTPStatus.NOT_IMPLEMENTED else code, "not found" if code == 501 else "bad request")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _body_size(self, max_bytes: int) -> int | None:
        text = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not text.isascii() or not text.isdigit() or len(text) > 18:
            self.refuse(411, "a Content-Length is needed")
            return None
        if int(text) > max_bytes:
            self.refuse(413, f"the body has more than {max_bytes} bytes")
            return None
        return int(text)


class _TimedReader(io.RawIOBase):
    """A socket's bytes. A request must arrive within a time from its first byte, however slowly it trickles."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._first_s = self._rest_s = 0.0
        self._deadline: float | None = None

    def begin(self, first_s: float, rest_s: float) -> None:
        """The next request: `first_s` until its first byte, `rest_s` from there to its last."""
        self._first_s, self._rest_s = first_s, rest_s
        self._deadline = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._first_s if self._deadline is None else self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._rest_s
        return count


def _shut(connection: socket.socket) -> None:
    """Wake the thread that reads or writes a connection."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        LOG.debug("a connection of the link was closed already")
