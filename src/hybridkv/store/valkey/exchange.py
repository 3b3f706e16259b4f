"""Commands to one server and their answers, in one round trip."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.errors import StoreFault
from hybridkv.store.breaker import Breaker
from hybridkv.store.buffers import Buffers
from hybridkv.store.valkey.connections import Pool
from hybridkv.store.valkey.resp import Connection
from hybridkv.store.valkey.wire import Bytes, Reply, ServerError, encode

Answer: TypeAlias = "Reply | StoreFault"
"""StoreFault: the server did not answer this command."""

_SMALL_BYTES = 4096
_ASKING = encode("ASKING")
_UNAVAILABLE = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN")
"""Errors that concern the server, not the command."""


@dataclass(slots=True, eq=False)
class Node:
    """One server."""

    pool: Pool
    breaker: Breaker | None
    """None: the only server. Its store has a breaker."""

    @property
    def is_well(self) -> bool:
        return self.breaker is None or not self.breaker.resting

    def fault(self, error: Exception) -> StoreFault:
        return error if isinstance(error, StoreFault) else StoreFault(f"{self.pool.place}: {self._reason(error)}")

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.pool.timeout:g} s"
        if isinstance(error, ssl.SSLError):
            return f"TLS: {error.reason or error}"
        return (error.strerror if isinstance(error, OSError) else None) or str(error)


@dataclass(slots=True)
class Command:
    parts: Sequence[Bytes]
    target: int | Node
    """A slot, or a server."""
    most: int = _SMALL_BYTES
    """Bytes of the longest answer."""
    into: Buffers | None = None
    """Buffers of `most` bytes that the answer goes to. The answer is then its length."""
    num_flags: int = 0
    """If not 0: each of `parts` is a command that is answered by 0 or 1. The answer is the list of answers."""


@dataclass(slots=True)
class Todo:
    """A command, by its number, and whether the server must be told that its slot is on the move."""

    number: int
    is_asking: bool = False


class Exchange:
    """`send`, then `receive`. Several exchanges with different servers are sent before any is received."""

    def __init__(self, node: Node, todo: list[Todo], commands: Sequence[Command]) -> None:
        self.node = node
        self.todo = todo
        self._commands = commands
        self._connection: Connection | None = None
        self._was_idle = False
        self._is_skipped = False
        self._num_answers = 0
        self._sent_at = 0.0
        self.error: StoreFault | None = None
        self.is_unavailable = False
        """Whether the server answers that it cannot serve now."""

    @property
    def is_under_way(self) -> bool:
        return self._connection is not None

    @property
    def is_stale(self) -> bool:
        """Whether a connection that was kept from an earlier call turned out dead."""
        return self.error is not None and self._was_idle and not self._num_answers

    def send(self, *, fresh: bool = False) -> None:
        node, self.error = self.node, None
        if node.breaker is not None and not node.breaker.admit(again=True):
            self.error, self._is_skipped = StoreFault(f"{node.pool.place} rests after a fault"), True
            return
        try:
            self._connection, self._was_idle = node.pool.take(fresh=fresh)
            self._connection.start(self._nbytes())
            self._connection.send(self._parts())
            self._sent_at = time.monotonic()
        except (OSError, StoreFault) as error:
            self._fail(error)
        except BaseException:
            self.drop()
            raise

    def receive(self, answers: list[Answer]) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.extend(time.monotonic() - self._sent_at)  # meanwhile the caller was busy with other servers
        try:
            for todo in self.todo:
                command = self._commands[todo.number]
                answer = _asked_answer if todo.is_asking else _answer
                answers[todo.number] = self._judged(answer(connection, command))
                self._num_answers += 1
        except OSError as error:
            self._fail(error)
            return
        except BaseException:
            self.drop()
            raise
        self._connection = None
        self.node.pool.give(connection)
        if self.node.breaker is not None:
            self.node.breaker.succeed(0)

    def _judged(self, answer: Reply) -> Answer:
        if isinstance(answer, ServerError) and answer.code in _UNAVAILABLE:
            self.is_unavailable = True
            return self.node.fault(answer)
        return answer

    def settle(self, answers: list[Answer]) -> None:
        """Commands without an answer are answered by the error."""
        if self.error is not None:
            for todo in self.todo[self._num_answers :]:
                answers[todo.number] = self.error

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fail(self, error: Exception) -> None:
        self.drop()
        self.error = self.node.fault(error)

    def report(self) -> None:
        """Tell the server's breaker about the error."""
        if self.error is not None and self.node.breaker is not None and not self._is_skipped:
            self.node.breaker.fail(0, self.error)

    def _nbytes(self) -> int:
        """Bytes that move in both directions, apart from small answers."""
        total = 0
        for todo in self.todo:
            command = self._commands[todo.number]
            total += sum(map(len, command.parts)) + (command.most if command.into is not None else 0)
        return total

    def _parts(self) -> Iterator[Bytes]:
        for todo in self.todo:
            command = self._commands[todo.number]
            if todo.is_asking and command.num_flags:
                yield from (part for one in command.parts for part in (*_ASKING, one))
                continue
            if todo.is_asking:
                yield from _ASKING
            yield from command.parts


def _answer(connection: Connection, command: Command) -> Reply:
    if command.into is not None:
        return connection.reply_into(command.into, command.most)
    if command.num_flags:
        return _flags(connection.flags(command.num_flags, command.most))
    return connection.reply(command.most)


def _asked_answer(connection: Connection, command: Command) -> Reply:
    """The answer after ASKING, which has an answer of its own."""
    if not command.num_flags:
        connection.reply(_SMALL_BYTES)
        return _answer(connection, command)
    return _flags([connection.reply(_SMALL_BYTES) for _ in range(2 * command.num_flags)][1::2])


def _flags(answers: list[Reply]) -> Reply:
    """The answers, or the first error among them: all are of one slot."""
    return next((answer for answer in answers if isinstance(answer, ServerError)), answers)


def is_moved(answer: Answer) -> bool:
    return isinstance(answer, ServerError) and answer.code in ("MOVED", "ASK")
