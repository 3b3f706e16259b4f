"""RESP2, the protocol of Valkey and Redis, on one socket. Answers are untrusted: every length is bounded.

Values are sent from the caller's buffers and received into them, without a copy in between. After any OSError the
connection is out of step with the server and must be closed.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence

from hybridkv.store.buffers import Buffers, cut, scatter, skip
from hybridkv.store.valkey.wire import (
    Bytes,
    GarbledError,
    Reply,
    ServerError,
    checked_end,
    error_of,
    first,
    joined,
    number,
    shown,
)

_BUFFER_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 15
_MOST_DEPTH = 8
_MOST_PARTS = 512
"""Buffers in one system call. Linux takes 1024."""
_ITEM_BYTES = 16
"""What an item of an array counts for the limit on a reply."""
_SLOWEST = 16 << 20
"""Bytes a second that a slow connection moves at least. A call may take so much longer than the timeout."""


class Connection:
    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._timeout = timeout
        self._deadline = 0.0
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._begin = self._end = 0
        self._room = 0
        if self._is_plain:  # a socket timeout of Python would cost a call of `poll` for each receive
            sock.settimeout(None)
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6) or (timeout < 1))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            sock.settimeout(timeout)

    def is_idle(self) -> bool:
        """Whether the connection is open and no byte waits on it."""
        if self._begin != self._end:
            return False
        try:
            if not self._is_plain:
                self._sock.settimeout(0)
                try:
                    self._sock.recv(1)
                finally:
                    self._sock.settimeout(self._timeout)
                return False
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._sock.close()

    def start(self, nbytes: int) -> None:
        """Start the clock of a call that moves `nbytes` in both directions."""
        self._deadline = time.monotonic() + self._timeout + nbytes / _SLOWEST

    def extend(self, seconds: float) -> None:
        """Give the call more time."""
        self._deadline += seconds

    def send(self, parts: Iterable[Bytes]) -> None:
        views = joined(parts)
        while views:
            try:
                if self._is_plain:
                    views = skip(views, self._sock.sendmsg(views[:_MOST_PARTS]))
                else:
                    self._sock.sendall(views.pop(0))
            except BlockingIOError:
                raise TimeoutError from None
            self._check_time()

    def reply(self, most: int) -> Reply:
        """Receive an answer of at most `most` bytes."""
        self._room = most
        return self._reply(0)

    def flags(self, count: int, most: int) -> list[Reply]:
        """Receive answers of which most are 0 or 1. Many are decoded at once."""
        self._room = most
        found: list[Reply] = []
        while len(found) < count:
            ready = min(count - len(found), (self._end - self._begin) // 4)
            data = bytes(memoryview(self._buffer)[self._begin : self._begin + 4 * ready])
            bits, frame = data[1::4], (data[::4], data[2::4], data[3::4])
            if ready and frame == (b":" * ready, b"\r" * ready, b"\n" * ready) and not bits.strip(b"01"):
                found += [bit - ord("0") for bit in bits]
                self._begin += 4 * ready
            else:
                found.append(self._reply(0))
        return found

    def reply_into(self, buffers: Buffers, nbytes: int) -> int | ServerError:
        """Receive a string of at most `nbytes` into the buffers, which hold as many. Returns its length.

        The content of the buffers is undefined if the string is shorter than `nbytes`.
        """
        if self._begin == self._end and self._is_plain and len(buffers) < _MOST_PARTS:
            header = b"$%d\r\n" % nbytes
            found = bytearray(len(header))
            count = self._receive_some([memoryview(found), *buffers])
            if found == header:
                self._receive([*skip(buffers, count - len(header)), end := memoryview(bytearray(2))])
                return checked_end(end, nbytes)
            self._push_back(first(count, [memoryview(found), *buffers]))
        line = self._line()
        if line[:1] == b"-":
            return error_of(line)
        length = number(line[1:]) if line[:1] == b"$" else -1
        if not 0 <= length <= nbytes:
            raise GarbledError(f"{shown(line)} is no string of at most {nbytes:,} bytes")
        self._take(cut(buffers, length), length)
        return length

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        self._spend(_ITEM_BYTES)
        if kind == b":":
            return number(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return error_of(line)
        length = number(rest) if kind in (b"$", b"*") else -2
        if length == -1:
            return None
        if length < 0 or depth >= _MOST_DEPTH:
            raise GarbledError(f"{shown(line)} is no answer")
        if kind == b"*":
            self._spend(length * _ITEM_BYTES)
            return [self._reply(depth + 1) for _ in range(length)]
        self._spend(length)
        return self._string(length)

    def _string(self, length: int) -> bytes:
        if self._end - self._begin >= length + 2:
            begin, self._begin = self._begin, self._begin + length + 2
            checked_end(memoryview(self._buffer)[begin + length : self._begin], length)
            return bytes(memoryview(self._buffer)[begin : begin + length])
        data = bytearray(length)
        self._take([memoryview(data)], length)
        return bytes(data)

    def _take(self, buffers: Buffers, length: int) -> None:
        """Fill the buffers with the next `length` bytes, first from those that have come already, and skip the end."""
        end = memoryview(bytearray(2))
        targets = [*buffers, end]
        ready = memoryview(self._buffer)[self._begin : min(self._end, self._begin + length + 2)]
        count = scatter(ready, targets)
        self._begin += count
        self._receive(skip(targets, count))
        checked_end(end, length)

    def _receive(self, buffers: Buffers) -> None:
        views = [view for view in buffers if len(view)]
        while views:
            views = skip(views, self._receive_some(views[:_MOST_PARTS], socket.MSG_WAITALL))

    def _receive_some(self, views: Sequence[memoryview], flags: int = 0) -> int:
        try:
            count = self._sock.recvmsg_into(views, 0, flags)[0] if self._is_plain else self._sock.recv_into(views[0])
        except BlockingIOError:
            raise TimeoutError from None
        if count == 0:
            raise ConnectionResetError("the server closed the connection")
        self._check_time()
        return count

    def _line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._begin, self._end)) < 0:
            if self._end - self._begin > _MOST_LINE_BYTES:
                raise GarbledError(f"a line of more than {_MOST_LINE_BYTES:,} bytes")
            self._fill()
        line = bytes(memoryview(self._buffer)[self._begin : at])
        self._begin = at + 2
        return line

    def _fill(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            rest = self._buffer[self._begin : self._end]
            self._buffer = rest + bytearray(max(_BUFFER_BYTES, len(rest)))
            self._begin, self._end = 0, len(rest)
        self._end += self._receive_some([memoryview(self._buffer)[self._end :]])

    def _push_back(self, data: bytes) -> None:
        self._buffer = bytearray(data) + bytearray(_BUFFER_BYTES)
        self._begin, self._end = 0, len(data)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError

    def _spend(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise GarbledError("an answer that is far longer than what was asked for")
