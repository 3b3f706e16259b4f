"""All connections of a server: which one is closed when there are too many, and what is counted of that.

It knows no HTTP and no event loop: it is told what each connection waits for.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from itertools import takewhile
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridkv.serve.connection_limits import ConnectionLimits, Room, room_for

LOG = logging.getLogger("hybridkv.serve")
REFUSED = ("full", "address", "files")
"""Why a new connection is refused: there are too many, too many of its address, or no file descriptor is left."""
DROPPED = ("idle", "head", "body", "slow_head", "slow_body")
"""Why a connection is closed: the first three make room for a new one, the others send their request too slowly."""
_STALLED_S = 5.0
"""A request of whose body nothing has arrived for this long may be closed for a new connection."""
_IDLE_S = 10.0
"""uvicorn closes an idle connection after 5 s, unless the rest of a body has come after the reply."""
_BETWEEN_REPORTS_S = 60.0


class Stage(Enum):
    """State of a connection: what it waits for. To make room, connections of the first states are closed first."""

    IDLE = "idle"
    """Another request, of which nothing has arrived."""
    HEAD = "head"
    """The head of a request, or the rest of a body that was answered before it had arrived."""
    BODY = "body"
    """The body of a request."""
    REPLY = "reply"
    """The server's reply: the connection is not closed for another."""


class Connection(Protocol):
    """A client's connection, as the book of all connections sees it."""

    peer: str
    """As `peer_of` returns it."""
    stage: Stage
    since: float
    """When the stage began; for a body, when its latest bytes arrived."""

    @property
    def is_sent(self) -> bool:
        """False while a part of a reply has not been sent."""

    @property
    def is_silent(self) -> bool:
        """True if nothing of a request has arrived."""

    def drop(self, error: str | None) -> None:
        """Close the connection now. With an error, its client gets status 408 before."""


class _Shelf:
    """Connections of one address, or all."""

    def __init__(self) -> None:
        self.members: set[Connection] = set()
        self.waiting: dict[Stage, dict[Connection, None]] = {stage: {} for stage in Stage}
        """By stage; the first of each has been in it for the longest time."""

    def add(self, connection: Connection) -> None:
        self.members.add(connection)
        self.waiting[connection.stage][connection] = None

    def remove(self, connection: Connection) -> None:
        self.members.discard(connection)
        self.waiting[connection.stage].pop(connection, None)

    def since(self, then: float, stage: Stage) -> list[Connection]:
        """Connections that have been in this stage since then."""
        return list(takewhile(lambda one: one.since <= then, self.waiting[stage]))

    def spare(self, now: float) -> Connection | None:
        """The connection that is closed when room is needed, or None if none may be."""
        for stage in (Stage.IDLE, Stage.HEAD, Stage.BODY):
            found = next((one for one in self.waiting[stage] if one.is_sent), None)
            if found is not None and (stage is not Stage.BODY or now - found.since >= _STALLED_S):
                return found
        return None


class Connections(Collector):
    """The connections of one server. As a collector: their metrics, whose names begin with `prefix`."""

    def __init__(self, limits: ConnectionLimits, *, prefix: str, files_each: int = 1) -> None:
        """`files_each`: file descriptors that one connection may need."""
        self.limits = limits
        self.room = Room(0, 0)
        self.refused: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._prefix = prefix
        self._files_each = files_each
        self._all = _Shelf()
        self._by_peer: dict[str, _Shelf] = {}
        self._logged: Counter[str] = Counter()
        self._next_report = 0.0

    def open(self) -> None:
        """Determine the limits. Called before the first connection, when all else is loaded."""
        self.room = room_for(self.limits, self._files_each)

    def admit(self, peer: str) -> str | None:
        """Make room for a connection of `peer`. Returns None, or the error if there is none."""
        own, (all_of_them, most) = self._by_peer.get(peer), self.room
        if own is not None and most < all_of_them and len(own.members) >= most and not self._make_room(own):
            self.refused["address"] += 1
            return (
                f"this address has too many connections, at most {most}: close some, or start the "
                "server with a larger --max-connections-per-address"
            )
        if len(self._all.members) >= all_of_them and not self._make_room(self._all):
            self.refused["full"] += 1
            return f"there are too many connections, at most {all_of_them}: try again later"
        return None

    def out_of_files(self) -> None:
        """No connection could be accepted: close one if one may be."""
        self.refused["files"] += 1
        self._make_room(self._all)

    def add(self, connection: Connection) -> None:
        self._all.add(connection)
        self._by_peer.setdefault(connection.peer, _Shelf()).add(connection)

    def move(self, connection: Connection, stage: Stage) -> None:
        """The connection is in this stage now. In stage `BODY`: some of the body has arrived."""
        if connection not in self._all.members or (stage is connection.stage and stage is not Stage.BODY):
            return
        shelves = (self._all, self._by_peer[connection.peer])
        for shelf in shelves:
            shelf.remove(connection)
        connection.stage, connection.since = stage, time.monotonic()
        for shelf in shelves:
            shelf.add(connection)

    def remove(self, connection: Connection) -> None:
        """The connection is closed. A second call has no effect."""
        if connection not in self._all.members:
            return
        self._all.remove(connection)
        own = self._by_peer[connection.peer]
        own.remove(connection)
        if not own.members:
            del self._by_peer[connection.peer]

    def count_slow_body(self) -> None:
        """A request was refused because its body came too slowly."""
        self.dropped["slow_body"] += 1

    def sweep(self) -> None:
        """Close connections that take too long to send a request. Once a minute, log what was refused and dropped."""
        now, timeout_s = time.monotonic(), self.limits.receive_timeout_s
        late = self._all.since(now - timeout_s, Stage.HEAD) + self._all.since(now - max(timeout_s, _IDLE_S), Stage.IDLE)
        for connection in late:
            if connection.is_sent:
                self._drop_late(connection)
        if now >= self._next_report and self._log():
            self._next_report = now + _BETWEEN_REPORTS_S

    def close(self) -> None:
        """The server has stopped: log what was refused and dropped since the last line."""
        self._log()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        name = f"{self._prefix}_connections"
        yield GaugeMetricFamily(name, "Open connections", value=len(self._all.members))
        yield GaugeMetricFamily(f"{name}_limit", "Most connections", value=self.room.connections)
        refused = CounterMetricFamily(f"{name}_refused", "Connections that were not let in", labels=["reason"])
        for reason in REFUSED:
            refused.add_metric([reason], self.refused[reason])
        dropped = CounterMetricFamily(f"{name}_dropped", "Connections closed by the server", labels=["reason"])
        for reason in DROPPED:
            dropped.add_metric([reason], self.dropped[reason])
        yield from (refused, dropped)

    def _make_room(self, shelf: _Shelf) -> bool:
        spare = shelf.spare(time.monotonic())
        if spare is None:
            return False
        self.dropped[spare.stage.value] += 1
        self.remove(spare)
        spare.drop(None)
        return True

    def _drop_late(self, connection: Connection) -> None:
        """A connection that has sent nothing, such as one that a browser keeps ready, is closed without a word."""
        error = None
        if not connection.is_silent:
            self.dropped["slow_head"] += 1
            error = f"the head of the request has not arrived within {self.limits.receive_timeout_s:g} s: send it again"
        self.remove(connection)
        connection.drop(error)

    def _log(self) -> bool:
        """Log how many were refused and dropped since the last line. Returns False if none were."""
        counts = Counter({f"refused_{reason}": count for reason, count in self.refused.items()})
        counts.update({f"dropped_{reason}": count for reason, count in self.dropped.items()})
        new, self._logged = counts - self._logged, counts
        if new:
            facts = {**new, "open": len(self._all.members), "limit": self.room.connections}
            LOG.warning("connections were refused or dropped", extra={"facts": facts})
        return bool(new)
