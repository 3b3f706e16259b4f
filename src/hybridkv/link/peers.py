"""Producers that a consumer may ask: their addresses, and what was agreed on when it connected."""

from __future__ import annotations

import threading
import time
from base64 import b64decode, b64encode
from typing import Any

from hybridkv.link.agent import Agent
from hybridkv.link.control_client import ControlClient
from hybridkv.link.errors import LinkError, LinkMismatch
from hybridkv.link.geometry import Geometry
from hybridkv.link.producer import VERSION
from hybridkv.link.runs import Cutter
from hybridkv.link.secret import Secret
from hybridkv.link.stats import LinkStats


class Peer:
    """One producer. Thread-safe."""

    def __init__(
        self, url: str, secret: Secret, engine_id: str, agent: Agent, geometry: Geometry, stats: LinkStats
    ) -> None:
        """`engine_id`, `agent` and `geometry` are the consumer's."""
        self.url = url
        self.client = ControlClient(url, secret)
        self.lease_s = 0.0
        self.engine_id = ""
        """Engine id of the process that was connected to last."""
        self._own_id = engine_id
        self._agent = agent
        self._geometry = geometry
        self._stats = stats
        self._lock = threading.Lock()
        self._cutter: Cutter | None = None
        self._num_connected = 0

    @property
    def cutter(self) -> Cutter:
        if self._cutter is None:
            raise LinkError(f"{self.url} is not connected")
        return self._cutter

    def connect(self, *, after: int = 0) -> int:
        """Exchange geometry and metadata, unless that was done. Returns the number of times that it was.

        `after`: the producer has forgotten this engine since the connection of that number. Several claims notice it,
        and one of them connects: the others' would disturb its writes.
        """
        with self._lock:
            if self._num_connected > after:
                return self._num_connected
            begin = time.monotonic()
            answer = self.client.call("connect", self._card())
            try:
                self._cutter = Cutter(Geometry.from_json(answer["geometry"]), self._geometry)
            except LinkMismatch as error:
                raise LinkMismatch(f"{self.url} cannot feed this engine: {error}") from error
            self._agent.add(b64decode(answer["metadata"]))
            self.lease_s = float(answer["lease_s"])
            self.engine_id = str(answer["engine_id"])
            self._stats.spent("connect", time.monotonic() - begin)
            self._num_connected += 1
            return self._num_connected

    def _card(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "engine_id": self._own_id,
            "geometry": self._geometry.to_json(),
            "metadata": b64encode(self._agent.metadata).decode(),
            "place": list(self._agent.place),
        }

    def close(self) -> None:
        self.client.close()
