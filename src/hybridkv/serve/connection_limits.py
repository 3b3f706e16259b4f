"""How many connections a server may have: options, and what the file descriptors of the process allow."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import resource
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.errors import InputError

LOG = logging.getLogger("hybridkv.serve")
_MOST = 16384
"""Connections at most unless an option says otherwise. More of them take more memory (some 100 KiB each at worst)."""
_FEW = 512
"""A limit below this is logged at the start."""
_LEAST = 8
_LEAST_RESERVE, _MOST_RESERVE = 64, 1024
"""File descriptors that are kept for stores, weights and logs: an eighth of all, within these bounds."""
_SHARE_OF_ADDRESS = 0.75
"""Larger: a proxy, whose clients all have its address, has more connections. Smaller: more are left for others."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections."""

    max_connections: int | None = None
    """None: as many as file descriptors allow, at most 16384."""
    max_per_address: int | None = None
    """Connections of one IPv4 address, or of one IPv6 network of 64 bits. None: three quarters of all."""
    receive_timeout_s: float = 20.0
    """Time for the head of a request. Its body may pause for as long, and has to come at 1 KiB/s."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max connections", self.max_connections),
            ("max connections per address", self.max_per_address),
        ):
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: at least 1 client must be let in")
        if not (math.isfinite(self.receive_timeout_s) and self.receive_timeout_s > 0):
            raise InputError(f"receive timeout {self.receive_timeout_s} s: choose a number above 0")


class Room(NamedTuple):
    """Limits in numbers."""

    connections: int
    of_one_address: int


def room_for(limits: ConnectionLimits, files_each: int) -> Room:
    """Return how many connections fit now. A small number, and one below the limits, is logged.

    `files_each`: file descriptors that one connection may need.
    """
    allowed = _allowed_files()
    kept = len(os.listdir("/dev/fd")) + min(max(_LEAST_RESERVE, allowed // 8), _MOST_RESERVE)
    fitting = max((allowed - kept) // files_each, _LEAST)
    if fitting < (limits.max_connections or _FEW):
        LOG.warning(
            f"at most {fitting} connections at once: this process may open {allowed} files, and keeps {kept} for "
            "stores, weights and logs; raise `ulimit -n` for more"
        )
    connections = min(limits.max_connections or _MOST, fitting)
    share = max(int(connections * _SHARE_OF_ADDRESS), 1)
    return Room(connections, min(limits.max_per_address or share, connections))


def peer_of(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the first 64 bits of an IPv6 one. Names are left as is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def _allowed_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31
