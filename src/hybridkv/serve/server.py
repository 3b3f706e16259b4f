"""Listens on an address until it is told to stop, then lets running requests finish."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

from starlette.types import ASGIApp

from hybridkv.errors import InputError
from hybridkv.renamed import refuses_old_names
from hybridkv.serve.connection_limits import ConnectionLimits
from hybridkv.serve.connections import Connections
from hybridkv.serve.middleware import Front
from hybridkv.serve.uvicorn_seam import StoppableServer


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
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # uvicorn raises the signal again after its shutdown: that must not keep the engine from closing.
                signal.signal(number, lambda *_: None)
        front = app if isinstance(app, Front) else None
        StoppableServer(
            app,
            front.connections if front else Connections(ConnectionLimits(), prefix="hybridkv"),
            stopped=self._stopped.is_set,
            shutdown_timeout=shutdown_timeout,
            on_ready=on_ready,
            on_stop=front.stop if front else lambda: None,
        ).run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop serving; `run` returns soon. May be called on any thread."""
        self._stopped.set()
