"""Ports of servers that tests start."""

from __future__ import annotations

import socket
import subprocess
import time

_PATIENCE_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process accepts connections. Raises RuntimeError if it ends, or if it takes too long."""
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    process.kill()
    raise RuntimeError(f"{process.args!r} does not listen on port {port}; it ended with {process.wait()}")
