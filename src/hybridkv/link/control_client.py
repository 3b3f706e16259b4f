"""Sends control messages to an engine that knows the shared secret. `control` describes the protocol."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

from hybridkv.errors import InputError
from hybridkv.link import control
from hybridkv.link.channel import Channel, Reply
from hybridkv.link.errors import LinkError, PeerSilent, Refused
from hybridkv.link.secret import Secret


class ControlClient:
    """Calls one peer. Safe on any thread: each call in progress has a connection of its own, which is kept.

    It connects at the first call.
    """

    def __init__(
        self,
        url: str,
        secret: Secret,
        *,
        timeout_s: float = 5.0,
        max_connections: int = 8,
        max_body_bytes: int = control.MAX_BODY_BYTES,
    ) -> None:
        self.url = url
        self._host, self._port = link_address(url)
        self._secret = secret
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._slots = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._is_closed = False

    def call(self, method: str, params: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """What the peer's handler returns. Raises PeerDown, PeerSilent, PeerUnproven, Refused or another LinkError.

        The call is executed at most once by a process of the peer.
        """
        body = control.to_json({"method": method, "params": params})
        if len(body) > self._max_body_bytes:
            raise InputError(f"a link call {method!r} of {len(body)} bytes: {self._max_body_bytes} are allowed")
        left_s = self._timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        if not self._slots.acquire(timeout=left_s):
            raise PeerSilent(f"{self.url}: all connections were busy for {left_s} s; check that the peer answers")
        try:
            reply = self._exchange(body, left_s - (time.monotonic() - start))
        finally:
            self._slots.release()
        return self._result(method, reply)

    def close(self) -> None:
        """Close idle connections now, and others at the end of their calls."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _exchange(self, body: bytes, timeout_s: float) -> Reply:
        with self._lock:
            if self._is_closed:
                raise LinkError(f"{self.url}: this client was closed; make a new one")
            channel = self._idle.pop() if self._idle else self._new_channel()
        try:
            reply = channel.call(body, timeout_s)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append(channel)
                return reply
        channel.close()
        return reply

    def _new_channel(self) -> Channel:
        return Channel(self.url, self._host, self._port, self._secret, self._max_body_bytes)

    def _result(self, method: str, reply: Reply) -> dict[str, Any]:
        """The result in an authenticated reply."""
        message = control.to_object(reply.body) or {}
        match message:
            case {"result": dict(result)}:
                return result
            case {"refused": str(reason), "kind": str(kind)}:
                raise Refused(reason, kind)
        raise LinkError(f"link call {method!r} has failed in {self.url}: {message.get('failed')}; its log says why")


def link_address(url: str) -> tuple[str, int]:
    """Host and port of a link."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme != "http" or parts.path not in ("", "/"):
        raise InputError(f"link address {url!r}: write http://HOST:PORT, such as http://127.0.0.1:5600")
    return host, port
