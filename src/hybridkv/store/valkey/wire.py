"""The words of RESP2: commands as bytes, answers as values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from hybridkv.store.buffers import Buffers, cut

Bytes = bytes | bytearray | memoryview
Reply: TypeAlias = "int | bytes | list[Reply] | ServerError | None"

_JOINED_BYTES = 1 << 14
"""Parts that are smaller are joined before they are sent."""


class ServerError(Exception):
    """An error that the server answered with. It concerns one command; the connection is fine."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class GarbledError(ConnectionError):
    """The server sent something that is no answer to what was asked."""


def encode(*arguments: Bytes | str | int) -> list[Bytes]:
    """A command in parts, which are sent one after another. Large arguments are parts of their own, not copied."""
    parts: list[Bytes] = []
    small = b"*%d\r\n" % len(arguments)
    for argument in arguments:
        data = str(argument).encode() if isinstance(argument, str | int) else argument
        if len(data) < _JOINED_BYTES:
            small += b"$%d\r\n%b\r\n" % (len(data), bytes(data))
        else:
            parts += [small + b"$%d\r\n" % len(data), data]
            small = b"\r\n"
    return [*parts, small]


def joined(parts: Iterable[Bytes]) -> list[memoryview]:
    """The parts, with runs of small ones joined."""
    views: list[memoryview] = []
    run: list[Bytes] = []
    for part in parts:
        if len(part) < _JOINED_BYTES:
            run.append(part)
            continue
        if run:
            views.append(memoryview(b"".join(run)))
            run = []
        views.append(memoryview(part))
    if run:
        views.append(memoryview(b"".join(run)))
    return views


def first(count: int, buffers: Buffers) -> bytes:
    return b"".join(cut(buffers, count))


def number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise GarbledError(f"{shown(text)} is no number")
    return int(text)


def error_of(line: bytes) -> ServerError:
    return ServerError(shown(line[1:]))


def shown(line: bytes) -> str:
    text = line[:200].decode("ascii", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def checked_end(end: memoryview, nbytes: int) -> int:
    if bytes(end) != b"\r\n":
        raise GarbledError(f"a string of {nbytes:,} bytes does not end where it should")
    return nbytes
