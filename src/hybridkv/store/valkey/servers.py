"""All servers of a store: one, or a cluster whose servers each hold some slots.

A call sends its commands to all servers that they concern before it reads any answer. A server of a cluster that fails
is skipped for a while (circuit breaker); the others serve on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

from hybridkv.errors import StoreFault
from hybridkv.store.breaker import Breaker
from hybridkv.store.valkey.connections import Login, Place, Pool, Trips
from hybridkv.store.valkey.exchange import Answer, Command, Exchange, Node, Todo, is_moved
from hybridkv.store.valkey.keys import NUM_SLOTS
from hybridkv.store.valkey.wire import Reply, ServerError, encode

_MOST_REDIRECTS = 4
_MOST_NODES = 1000
_MAP_BYTES = 16 << 20
_REFRESH_S = 1.0


class Servers:
    def __init__(self, place: Place, login: Login, label: str) -> None:
        """Connect to the first server, which tells about the others. Raises StoreFault."""
        self.label = label
        self.trips = Trips()
        self._login = login
        self._lock = Lock()
        self._first = Node(Pool(place, login, self.trips), None)
        self._nodes: dict[Place, Node] = {place: self._first}
        self._slots: list[Node | None] = []
        """Servers by slot. Empty: not a cluster."""
        self._is_stale = False
        self._refreshed_at = 0.0
        self._closed = False
        try:
            connection, _ = self._first.pool.take()
        except OSError as error:
            raise self._first.fault(error) from None
        self._first.pool.give(connection)
        if self._first.pool.mode == "cluster":
            self._slots = [None] * NUM_SLOTS
            self._nodes = {}
            self._refresh([self._first])

    @property
    def is_cluster(self) -> bool:
        return bool(self._slots)

    @property
    def others_serve(self) -> bool:
        """Whether a server of a cluster is well, while another fails."""
        return self.is_cluster and any(node.is_well for node in self._nodes.values())

    def nodes(self) -> list[Node]:
        """The servers that hold slots."""
        if not self._slots:
            return [self._first]
        return list({id(node): node for node in self._slots if node is not None}.values())

    def run(self, commands: Sequence[Command], *, again: bool = True) -> list[Answer]:
        """Run commands, in one round trip if no slot has moved. Answers stand in the order of the commands.

        `again`: the commands may be sent a second time if an idle connection turns out dead.
        """
        if self._closed:
            raise StoreFault(f"{self.label} is closed")
        if self._is_stale and time.monotonic() - self._refreshed_at > _REFRESH_S:
            self._refresh([*self.nodes(), self._first])
        answers: list[Answer] = [None] * len(commands)
        groups: dict[int, Exchange] = {}
        for number, command in enumerate(commands):
            node = command.target if isinstance(command.target, Node) else self._node(command.target)
            if node is None:
                answers[number] = StoreFault(f"{self.label}: no server has slot {command.target}")
                self._is_stale = True
            elif id(node) in groups:
                groups[id(node)].todo.append(Todo(number))
            else:
                groups[id(node)] = Exchange(node, [Todo(number)], commands)
        for _ in range(1 + _MOST_REDIRECTS):
            if not groups:
                break
            self._round(list(groups.values()), answers, again)
            groups = self._redirected(groups, commands, answers)
        return answers

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = [*self._nodes.values(), self._first]
        for node in nodes:
            node.pool.close()

    def _node(self, slot: int) -> Node | None:
        return self._slots[slot] if self._slots else self._first

    def _round(self, exchanges: Sequence[Exchange], answers: list[Answer], again: bool) -> None:
        self._once(exchanges, answers, fresh=False)
        late = [one for one in exchanges if again and one.is_stale]
        if late:
            self._once(late, answers, fresh=True)
        for one in exchanges:
            one.report()
            one.settle(answers)
            if self.is_cluster and (one.error is not None or one.is_unavailable):
                self._is_stale = True

    def _once(self, exchanges: Sequence[Exchange], answers: list[Answer], fresh: bool) -> None:
        try:
            for one in exchanges:
                one.send(fresh=fresh)
            if any(one.is_under_way for one in exchanges):
                self.trips.add()
            for one in exchanges:
                one.receive(answers)
        finally:  # nothing to do unless the thread was interrupted
            for one in exchanges:
                one.drop()

    def _redirected(
        self, groups: dict[int, Exchange], commands: Sequence[Command], answers: list[Answer]
    ) -> dict[int, Exchange]:
        """Commands that were answered by the name of another server."""
        if not self.is_cluster:
            return {}
        found: dict[int, Exchange] = {}
        for todo in [todo for one in groups.values() for todo in one.todo]:
            answer = answers[todo.number]
            if isinstance(answer, ServerError) and is_moved(answer):
                node = self._follow(answer)
                if node is not None:
                    exchange = found.setdefault(id(node), Exchange(node, [], commands))
                    exchange.todo.append(Todo(todo.number, answer.code == "ASK"))
        return found

    def _follow(self, answer: ServerError) -> Node | None:
        """The server that a redirection names. None if it makes no sense."""
        parts = str(answer).split(" ")
        host, _, port = parts[-1].rpartition(":")
        if len(parts) != 3 or not parts[1].isdigit() or not port.isdigit():
            return None
        slot = int(parts[1])
        with self._lock:
            node = self._known(Place(host or self._first.pool.place.host, int(port)))
            if answer.code == "MOVED" and slot < NUM_SLOTS and node is not None:
                self._slots[slot] = node
                self._is_stale = True
        return node

    def _known(self, place: Place) -> Node | None:
        """The server at this place. Call with the lock."""
        if place not in self._nodes:
            if not 0 < place.port < 65_536 or len(self._nodes) >= _MOST_NODES:
                return None
            breaker = Breaker(f"{self.label}: server {place}", time.monotonic)
            self._nodes[place] = Node(Pool(place, self._login, self.trips), breaker)
        return self._nodes[place]

    def _refresh(self, sources: Sequence[Node]) -> None:
        """Ask the servers, one after another, until one knows which server has which slot."""
        self._refreshed_at, self._is_stale = time.monotonic(), False
        fault = StoreFault(f"{self.label}: no server of the cluster answers")
        for source in sources:
            answers: list[Answer] = [None]
            command = Command(encode("CLUSTER", "SLOTS"), source, _MAP_BYTES)
            self._round([Exchange(source, [Todo(0)], [command])], answers, again=True)
            if isinstance(answers[0], list):
                self._adopt(source, answers[0])
                return
            fault = answers[0] if isinstance(answers[0], StoreFault) else fault
        self._is_stale = True
        if not any(self._slots):
            raise fault

    def _adopt(self, source: Node, ranges: list[Reply]) -> None:
        with self._lock:
            slots: list[Node | None] = [None] * NUM_SLOTS
            for one in ranges:
                if not isinstance(one, list) or len(one) < 3:
                    continue
                begin, end, primary = one[:3]
                place = _place(primary, source.pool.place.host)
                if isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end < NUM_SLOTS and place:
                    slots[begin : end + 1] = [self._known(place)] * (end + 1 - begin)
            kept = set(map(id, slots))
            gone = [place for place, node in self._nodes.items() if id(node) not in kept]
            self._slots = slots
            for place in gone:
                self._nodes.pop(place).pool.close()


def _place(primary: Reply, default: str) -> Place | None:
    """Host and port of a server in the answer to CLUSTER SLOTS."""
    if not isinstance(primary, list) or len(primary) < 2 or not isinstance(primary[1], int):
        return None
    host = primary[0].decode("ascii", "replace") if isinstance(primary[0], bytes) else ""
    return Place(host if host and host != "?" else default, primary[1])
