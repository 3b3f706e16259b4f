"""A Mooncake store on 127.0.0.1 over TCP: its master, and a process that holds the memory.

The memory lives in a process of its own (Mooncake calls it a standalone store), so that it outlives its clients. The
package is `mooncake-transfer-engine-non-cuda` in a directory of its own: `make setup-mooncake`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PACKAGE = Path(__file__).resolve().parents[3] / ".venv-mooncake"
PATIENCE_S = 30.0
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
_IMPORT = "from mooncake.store import MooncakeDistributedStore"


def environment(package: Path) -> dict[str, str]:
    """What a process needs to import Mooncake's client, or to run its programs."""
    found = {"PYTHONPATH": str(package), "LD_LIBRARY_PATH": str(package / "lib")}
    return {name: os.pathsep.join(filter(None, (path, os.environ.get(name)))) for name, path in found.items()}


@cache
def why_not(package: Path = PACKAGE, python: str = sys.executable) -> str | None:
    """Why Mooncake cannot run here; None if it can."""
    if not (package / "mooncake").is_dir():
        return f"{package} holds no package mooncake: make setup-mooncake installs it"
    tried = subprocess.run(
        [python, "-c", _IMPORT], capture_output=True, text=True, env=os.environ | environment(package), check=False
    )
    return None if tried.returncode == 0 else f"Mooncake does not run: {tried.stderr.strip().splitlines()[-1]}"


def make_importable(package: Path = PACKAGE) -> None:
    """Let this process import Mooncake's client."""
    for library in _LIBRARIES:
        if (package / "lib" / library).exists():
            ctypes.CDLL(str(package / "lib" / library), ctypes.RTLD_GLOBAL)
    os.environ.setdefault("GLOG_minloglevel", "3")
    if str(package) not in sys.path:
        sys.path.append(str(package))


class MooncakeServer:
    """`with MooncakeServer(folder) as server: open_store(server.url)`. Logs go to the folder."""

    def __init__(
        self, folder: Path, size: str = "256 MB", package: Path = PACKAGE, options: tuple[str, ...] = ()
    ) -> None:
        """`options`: more of the master's."""
        self._folder, self._size, self._package, self._options = folder, size, package, options
        self._port, self.admin_port = _free_port(), _free_port()
        self.master_address = f"127.0.0.1:{self._port}"
        self.master: subprocess.Popen[bytes] | None = None
        self.holder: subprocess.Popen[bytes] | None = None
        """The process that holds the memory."""

    @property
    def url(self) -> str:
        return f"mooncake://{self.master_address}?admin=127.0.0.1:{self.admin_port}&buffer=64MiB"

    def start(self) -> None:
        try:
            self.start_master()
            self.start_holder()
        except BaseException:
            self.kill()
            raise

    def start_master(self) -> None:
        self.master = self._start(
            "mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self._port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.admin_port}",
            *self._options,
        )
        self._wait_for(self.master, "master_total_capacity_bytes", 0)

    def start_holder(self) -> None:
        before = self.metric("master_total_capacity_bytes") or 0
        self.holder = self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={_free_port()}",
            f"--master_server_address={self.master_address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={self._size}",
        )
        self._wait_for(self.holder, "master_total_capacity_bytes", before + 1)

    def stop(self) -> None:
        for process in filter(None, (self.holder, self.master)):
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in filter(None, (self.holder, self.master)):
            process.kill()
            process.wait()

    def client(self) -> Any:
        """Mooncake's plain client in this process. Closing it takes a second."""
        make_importable(self._package)
        client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", self.master_address)
        if code != 0:
            raise RuntimeError(f"Mooncake's client cannot connect to {self.master_address}: error code {code}")
        return client

    def metric(self, name: str) -> float | None:
        """A gauge of the master, summed over its labels; None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return None
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found)) if found else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        command = [str(self._package / "mooncake" / program), "--logtostderr", *options]
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, env=os.environ | environment(self._package)
            )

    def _wait_for(self, process: subprocess.Popen[bytes], metric: str, at_least: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (value := self.metric(metric)) is None or value < at_least:
            if process.poll() is not None or time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-500:] for path in self._folder.glob("mooncake_*.log"))
                raise RuntimeError(f"{process.args!r} did not start: {logs}")
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
