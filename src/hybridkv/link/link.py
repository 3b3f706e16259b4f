"""A link of one engine: both halves on one NIXL agent, and the server that other engines call."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridkv.errors import InputError
from hybridkv.link.agent import Agent
from hybridkv.link.arena import Arena
from hybridkv.link.consumer import Consumer
from hybridkv.link.control_client import link_address
from hybridkv.link.control_server import ControlServer
from hybridkv.link.geometry import Geometry
from hybridkv.link.peers import Peer
from hybridkv.link.producer import Producer
from hybridkv.link.secret import read_secret
from hybridkv.link.stats import LinkStats

LOG = logging.getLogger("hybridkv.link")
ROLES = ("prefill", "decode", "both")
_EXPIRE_EVERY_S = 0.2
_STILL_WRITTEN: list[tuple[Agent, Arena]] = []
"""Arenas of closed links that peers may still write to, or that writes still read."""
_EVERYWHERE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Options of a link."""

    role: str
    """prefill: computes prompts for others. decode: takes prompts of others. both."""
    peers: Sequence[str] = ()
    """Link addresses of engines with role prefill, as http://HOST:PORT; for role decode."""
    host: str = "127.0.0.1"
    """Address that this engine's link listens on, UCX included, and by which its peers know it."""
    port: int = 0
    """Port for calls of other engines; 0: any that is free."""
    secret_file: Path | None = None
    """File with the secret that all linked engines share. Without one: $HYBRIDKV_LINK_SECRET."""
    lease_s: float = 60.0
    """How long a computed prompt waits for an engine that does not renew its lease."""
    timeout_s: float = 30.0
    """A request whose prompt has not come by then computes it."""
    offer_share: float = 0.5
    """Share of the arena that prompts which wait for their engine may keep. If a new one makes them take more, the
    oldest that were not claimed are given up. Larger: less memory for other requests while many prompts wait."""
    checksums: bool = True
    """Whether the engine that receives verifies a checksum of each parcel."""

    def check(self) -> None:
        if self.role not in ROLES:
            raise InputError(f"role {self.role!r}: choose {', '.join(ROLES)}")
        if isinstance(self.peers, str):
            raise InputError(f"peers {self.peers!r}: pass a list of addresses")
        if self.consumes and not self.peers:
            raise InputError(f"role {self.role} without a peer: give the link address of each engine that prefills")
        if self.peers and not self.consumes:
            raise InputError(
                f"peer {self.peers[0]} for role {self.role}: only role decode or both takes prompts of peers"
            )
        if self.host in _EVERYWHERE:
            raise InputError(
                f"link host {self.host!r}: name one address, the one by which the other engines reach this one"
            )
        if not 0 <= self.port <= 65535:
            raise InputError(f"link port {self.port}: choose 0 (any free one) to 65535")
        for name, value in (("lease", self.lease_s), ("timeout", self.timeout_s)):
            if not 0.1 <= value <= 86400:
                raise InputError(f"link {name} {value:g} s: choose 0.1 to 86400")
        if not 0 < self.offer_share <= 1:
            raise InputError(
                f"link offer share {self.offer_share:g}: choose more than 0 and at most 1, all of the memory"
            )
        for url in self.peers:
            link_address(url)

    @property
    def produces(self) -> bool:
        return self.role != "decode"

    @property
    def consumes(self) -> bool:
        return self.role != "prefill"


class Link:
    """The link of one engine. The arena must stay where it is until `close`."""

    def __init__(self, options: LinkOptions, geometry: Geometry, arena: Arena) -> None:
        options.check()
        secret = read_secret(options.secret_file)
        self.options = options
        self.engine_id = uuid.uuid4().hex
        self.stats = LinkStats()
        self.on_change: Callable[[], None] = _nobody
        """Called on any thread when an arrival is over or settled."""
        self.on_release: Callable[[str], None] = _nobody_released
        """Called on any thread when the pages of a request need no pin any more."""
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self.server: ControlServer | None = None
        self._peers = {address: url for url in options.peers for address in _addresses(url)}
        self._is_closed = threading.Event()
        self._arena = arena
        self._agent = agent = Agent(self.engine_id, arena.place, options.host)
        if options.produces:
            self.producer = Producer(
                self.engine_id,
                agent,
                arena,
                geometry,
                self.stats,
                lease_s=options.lease_s,
                checksums=options.checksums,
                on_release=lambda request_id: self.on_release(request_id),
            )
            self.server = ControlServer(options.host, options.port, secret, self._handle)
            threading.Thread(target=self._expire, name="hybridkv-leases", daemon=True).start()
        if options.consumes:
            peers = [Peer(url, secret, self.engine_id, agent, geometry, self.stats) for url in options.peers]
            self.consumer = Consumer(
                self.engine_id,
                agent,
                arena,
                peers,
                self.stats,
                timeout_s=options.timeout_s,
                on_change=lambda: self.on_change(),
            )

    @property
    def port(self) -> int:
        """The port for calls of other engines; 0 if none call."""
        return 0 if self.server is None else self.server.port

    def peer_at(self, host: str, port: int) -> str | None:
        """The peer with this address, if it is configured."""
        return self._peers.get((host, port))

    def close(self) -> None:
        """End all transfers. If a write is still in progress after a moment, the arena is never freed."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        is_quiet = self.producer is None or self.producer.close()
        if self.server is not None:  # a consumer takes a producer that does not listen for dead: its writes end first
            self.server.close()
        is_quiet = (self.consumer is None or self.consumer.close()) and is_quiet
        if is_quiet:
            self._agent.close()
        else:
            LOG.warning("writes of linked engines are in progress: their memory is kept until the process ends")
            _STILL_WRITTEN.append((self._agent, self._arena))

    def _handle(self, method: str, params: dict[str, Any], session: str) -> dict[str, Any]:
        assert self.producer is not None
        return self.producer.handle(method, params)

    def _expire(self) -> None:
        assert self.producer is not None
        while not self._is_closed.wait(_EXPIRE_EVERY_S):
            self.producer.expire()


def _addresses(url: str) -> set[tuple[str, int]]:
    """Host and port as they were given, and the addresses that the host has by now."""
    host, port = link_address(url)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # it may get a name later; then it is known by this name only
        found = []
    return {(host, port)} | {(str(address[0]), port) for *_, address in found}


def _nobody() -> None:
    """Default of `on_change`: no engine listens."""


def _nobody_released(request_id: str) -> None:
    """Default of `on_release`: no engine listens."""
