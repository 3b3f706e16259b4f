"""Mooncake's store beside vLLM: its master, and a process that holds the memory, both on 127.0.0.1 over TCP.

The memory lives outside of vLLM (Mooncake calls it a standalone store), so that it outlives the engines. The package is
`mooncake-transfer-engine-non-cuda`, installed into a directory of its own: `make setup-mooncake`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

PATIENCE_S = 30.0
LIBRARIES = "Debian's libibverbs1, libnl-3-200 and libnl-route-3-200"


def why_not(package: Path, python: str) -> str | None:
    """Why Mooncake cannot run here; None if it can."""
    if not (package / "mooncake").is_dir():
        return f"{package} holds no package mooncake; make setup-mooncake installs it, --mooncake names another place"
    code = "from mooncake.store import MooncakeDistributedStore"
    tried = subprocess.run([python, "-c", code], capture_output=True, text=True, env=os.environ | _path(package))
    if tried.returncode == 0:
        return None
    return f"{tried.stderr.strip().splitlines()[-1]} (it needs {LIBRARIES}; LD_LIBRARY_PATH may name their place)"


def _path(package: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mooncake:
    """A running store. `environment` is what an engine needs to reach it."""

    def __init__(self, package: Path, scratch: Path, size_gib: int = 2) -> None:
        self._scratch = scratch
        self._metrics_port = _free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        master = f"127.0.0.1:{_free_port()}"
        config = scratch / "mooncake.json"
        config.write_text(
            json.dumps(
                {
                    "mode": "standalone-store",
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": master,
                    "protocol": "tcp",
                    "global_segment_size": 0,
                    "local_buffer_size": "512MB",
                }
            )
        )
        self.environment = _path(package) | {
            "MOONCAKE_CONFIG_PATH": str(config),
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
        }
        binaries = package / "mooncake"
        try:
            self._start(
                binaries / "mooncake_master",
                "--rpc_address=127.0.0.1",
                f"--rpc_port={master.split(':')[1]}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._metrics_port}",
            )
            self._wait_for("master_total_capacity_bytes", 0)
            self._start(
                binaries / "mooncake_client",
                "--host=127.0.0.1",
                f"--port={_free_port()}",
                f"--master_server_address={master}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                f"--global_segment_size={size_gib} GB",
            )
            self._wait_for("master_total_capacity_bytes", 1)
        except BaseException:
            self.close()
            raise

    def stored_bytes(self) -> int:
        return int(self._metric("master_allocated_bytes") or 0)

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, binary: Path, *options: str) -> None:
        with (self._scratch / f"{binary.name}.log").open("wb") as log:
            command = [str(binary), "--logtostderr", *options]
            self._processes[binary.name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._scratch)

    def _wait_for(self, metric: str, at_least: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (value := self._metric(metric)) is None or value < at_least:
            name, process = list(self._processes.items())[-1]
            if process.poll() is not None or time.monotonic() > deadline:
                log = (self._scratch / f"{name}.log").read_text()
                raise RuntimeError(f"{name} did not start: {log[-500:]}")
            time.sleep(0.1)

    def _metric(self, name: str) -> float | None:
        """A gauge of the master, summed over its labels; None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return None
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found)) if found else None
