"""Listens on an address until it is told to stop, then lets running requests finish."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from hybridkv.errors import HybridKVError

_BACKLOG = 2048


class Server:
    """An address. It is taken at once, so that one in use is known before a model is loaded."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise HybridKVError(
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

    def run(self, app: ASGIApp, *, drain_s: int, on_ready: Callable[[], None]) -> None:
        """Serve until SIGINT, SIGTERM or `stop`, then for `drain_s` seconds at most until running requests have ended.

        Signals reach the main thread only: elsewhere, `stop` it.
        """
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=drain_s,
            lifespan="on",
        )
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # uvicorn raises the signal once more when it has shut down: that must not keep the engine from closing.
                signal.signal(number, lambda *_: None)
        _Stoppable(config, self._stopped, on_ready).run(sockets=[self._socket])

    def stop(self) -> None:
        """From any thread; `run` returns soon."""
        self._stopped.set()


class _Stoppable(uvicorn.Server):
    """Tells when requests are taken, and can be told to stop."""

    def __init__(self, config: uvicorn.Config, stopped: threading.Event, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopped = stopped
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        return self._stopped.is_set() or await super().on_tick(counter)
