"""The seam to uvicorn: it runs the application; accepting, watching and closing connections are ours.

HTTP is always read by h11. With uvicorn's own choice it would be httptools wherever that is installed, and the states
that connections are watched by are h11's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybridkv.serve.connection_limits import peer_of
from hybridkv.serve.connections import Connections, Stage
from hybridkv.serve.failures import error_body

LOG = logging.getLogger("hybridkv.serve")
_BACKLOG = 2048
_OUT_OF_FILES_S = 0.1
"""Time until the next connection is accepted when there is no file descriptor for one."""
_UNREAD_S = 60
"""A client that reads nothing for so long, while more of its reply waits, is disconnected. Larger: such clients keep
connections from others for longer. Smaller: a reply is lost when the network fails for a moment."""
_TICKS_OF_A_SWEEP = 10
"""uvicorn has ten ticks a second."""
_LAST_WORDS_S = 1.0
"""Time for cancelled requests to send their clients an error."""
_POLL_S = 0.02


class HttpConnection(H11Protocol):
    """A connection that reports what it waits for."""

    def __init__(self, server: StoppableServer, peer: str) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.peer = peer
        self.stage = Stage.HEAD
        self.since = time.monotonic()
        self._book = server.book
        self._is_dropped = False

    @property
    def is_sent(self) -> bool:
        transport: asyncio.Transport | None = self.transport
        return transport is None or transport.get_write_buffer_size() == 0

    @property
    def is_silent(self) -> bool:
        return not self.conn.trailing_data[0]

    def drop(self, error: str | None) -> None:
        self._is_dropped = True
        transport: asyncio.Transport | None = self.transport
        if transport is not None:
            if error is not None:
                transport.write(_reply(408, error))
            transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._is_dropped:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._book.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._book.move(self, self._stage())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._book.move(self, self._stage())

    def _stage(self) -> Stage:
        if self.cycle is None:
            return Stage.HEAD
        if self.cycle.response_complete:
            is_idle = self.conn.their_state is h11.IDLE and self.is_silent
            return Stage.IDLE if is_idle else Stage.HEAD
        return Stage.BODY if self.conn.their_state is h11.SEND_BODY else Stage.REPLY


class StoppableServer(uvicorn.Server):
    """A uvicorn server with a ready callback, limits of connections, a `stop` method and its own shutdown.

    uvicorn's shutdown ends the event loop while cancelled requests are still sending errors to their clients. From
    Python 3.12 on it also keeps waiting after a second Ctrl-C. asyncio's servers accept as many connections as the
    backlog has before the first one can be closed, and log each that finds no file descriptor.
    """

    def __init__(
        self,
        app: ASGIApp,
        book: Connections,
        *,
        stopped: Callable[[], bool],
        shutdown_timeout: int,
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                proxy_headers=False,  # it would believe the X-Forwarded-For of any process of this machine
            )
        )
        self.book = book
        self._stopped = stopped
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._listeners: list[socket.socket] = []
        self._connecting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.book.open()
        for listener in sockets or []:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
            self._listeners.append(listener)
            self._listen(listener)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_OF_A_SWEEP == 0:
            self.book.sweep()
        return self._stopped() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, cancel slow ones, and disconnect clients that do not read."""
        state = self.server_state
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await asyncio.gather(*self._connecting)
        self._on_stop()
        if state.tasks:
            facts = {"requests": len(state.tasks), "shutdown_timeout": self._shutdown_timeout}
            LOG.info("stopping: a second Ctrl-C waits for nobody", extra={"facts": facts})
        for connection in list(state.connections):
            connection.shutdown()
        await self._until(lambda: self.force_exit or self._is_empty, self._shutdown_timeout)
        for task in list(state.tasks):
            task.cancel()
        await self._until(lambda: self._is_empty, _LAST_WORDS_S)
        for connection in list(state.connections):
            connection.transport.abort()
        await self._until(lambda: self._is_empty, _LAST_WORDS_S)
        self.book.close()
        await self.lifespan.shutdown()

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection: without a file descriptor, a second attempt would fail even if none waits."""
        loop = asyncio.get_running_loop()
        try:
            accepted, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self.book.out_of_files()
            loop.remove_reader(listener)
            loop.call_later(_OUT_OF_FILES_S, self._listen, listener)
            return
        peer = peer_of(address[0])
        error = self.book.admit(peer)
        if error is not None:
            _refuse(accepted, error)
            return
        connection = HttpConnection(self, peer)
        self.book.add(connection)
        task = loop.create_task(self._connect(accepted, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, accepted: socket.socket, connection: HttpConnection) -> None:
        accepted.setblocking(False)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_S)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # the client is disconnected
            self.book.remove(connection)
            accepted.close()

    @property
    def _is_empty(self) -> bool:
        return not self.server_state.tasks and not self.server_state.connections

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until `holds` returns True, at most `seconds`."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while not holds() and clock() < end:
            await asyncio.sleep(_POLL_S)


def _refuse(accepted: socket.socket, error: str) -> None:
    """Send status 503, if that takes no time, and close the connection."""
    with accepted, suppress(OSError):
        accepted.setblocking(False)
        accepted.send(_reply(503, error))
        accepted.recv(65536)  # the client might lose the reply if bytes of its own were left unread


def _reply(status: int, error: str) -> bytes:
    """An error of a request that no application has seen."""
    body = error_body(status, error).encode()
    reason = {408: "Request Timeout", 503: "Service Unavailable"}[status]
    later = "Retry-After: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{later}Connection: close\r\n\r\n"
    )
    return head.encode() + body
