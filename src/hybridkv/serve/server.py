"""Listens on an address until it is told to stop, then lets running requests finish."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from hybridkv.errors import InputError
from hybridkv.renamed import refuses_old_names
from hybridkv.serve.middleware import Front

LOG = logging.getLogger("hybridkv.serve")
_BACKLOG = 2048
_LAST_WORDS_S = 1.0
"""Time for cancelled requests to send their clients an error."""
_POLL_S = 0.02


class Server:
    """An HTTP server on one address. The constructor binds it: an address in use fails before a model is loaded."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY only on sockets that name their protocol.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InputError(
                f"cannot listen on {host} port {port}: {reason}; choose another --port or --host"
            ) from None
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._stopped = threading.Event()

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")

    @refuses_old_names
    def run(self, app: ASGIApp, *, shutdown_timeout: int, on_ready: Callable[[], None]) -> None:
        """Serve until SIGINT, SIGTERM or `stop`. Running requests then have `shutdown_timeout` seconds to end.

        Signals reach only the main thread: on another thread, use `stop`.
        """
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, backlog=_BACKLOG, lifespan="on"
        )
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # uvicorn raises the signal again after its shutdown: that must not keep the engine from closing.
                signal.signal(number, lambda *_: None)
        on_stop = app.stop if isinstance(app, Front) else lambda: None
        _Stoppable(config, self._stopped, shutdown_timeout, on_ready, on_stop).run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop serving; `run` returns soon. May be called on any thread."""
        self._stopped.set()


class _Stoppable(uvicorn.Server):
    """A uvicorn server with a ready callback, a `stop` method and its own shutdown.

    uvicorn's shutdown ends the event loop while cancelled requests are still sending errors to their clients. From
    Python 3.12 on it also keeps waiting after a second Ctrl-C.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        stopped: threading.Event,
        shutdown_timeout: int,
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._stopped = stopped
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        return self._stopped.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, cancel slow ones, and disconnect clients that do not read."""
        state = self.server_state
        for server in self.servers:
            server.close()
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
        await self.lifespan.shutdown()

    @property
    def _is_empty(self) -> bool:
        return not self.server_state.tasks and not self.server_state.connections

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until `holds` returns True, at most `seconds`."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while not holds() and clock() < end:
            await asyncio.sleep(_POLL_S)
