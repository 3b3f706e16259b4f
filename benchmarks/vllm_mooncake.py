"""Mooncake's store beside vLLM: its master, and a process that holds the memory, both on 127.0.0.1 over TCP.

The servers are those of the store's tests. What is added here is the configuration that vLLM's connector reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.store.servers.mooncake import MooncakeServer, environment, why_not

__all__ = ["Mooncake", "why_not"]


class Mooncake:
    """A running store. `environment` is what an engine needs to reach it."""

    def __init__(self, package: Path, scratch: Path, size_gib: int = 2) -> None:
        self._server = MooncakeServer(scratch, f"{size_gib} GB", package)
        config = scratch / "mooncake.json"
        config.write_text(
            json.dumps(
                {
                    "mode": "standalone-store",
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": self._server.master_address,
                    "protocol": "tcp",
                    "global_segment_size": 0,
                    "local_buffer_size": "512MB",
                }
            )
        )
        self.environment = environment(package) | {
            "MOONCAKE_CONFIG_PATH": str(config),
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
        }
        self._server.start()

    def stored_bytes(self) -> int:
        return int(self._server.metric("master_allocated_bytes") or 0)

    def close(self) -> None:
        self._server.stop()
