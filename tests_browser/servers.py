"""`hybridkv serve` as a process, with the demo model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 120.0
SMALL = ("--memory", "64MiB", "--device", "cpu", "--shutdown-timeout", "1")


class Served:
    """A server that starts in the background. `launch` may be called again after `stop`: it has the same address."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._options = options
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **environment,
        }  # threads that spin slow a busy machine
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        self._is_ready = threading.Event()
        self.launch()

    def launch(self) -> None:
        command = [str(Path(sys.executable).with_name("hybridkv")), "serve", *SMALL, "--port", str(self.port)]
        process = subprocess.Popen(
            [*command, *self._options],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._process = process
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, args=(process, self._is_ready), daemon=True).start()

    def wait(self) -> Served:
        """Return as soon as it answers."""
        is_ready = self._is_ready.wait(PATIENCE_S)
        if not is_ready or self._process is None or self._process.poll() is not None:
            self.stop()
            raise RuntimeError(f"the server has not started:\n{''.join(self._log)}")
        return self

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def chat(self, text: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
        """A chat of one message, made past the page."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
        reply.raise_for_status()
        replied: dict[str, Any] = reply.json()
        return replied

    def _read(self, process: subprocess.Popen[str], is_ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._log.append(line)
            if line.startswith("curl "):
                is_ready.set()
        is_ready.set()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
