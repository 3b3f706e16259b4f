"""Middleware before every endpoint: who may enter, limits of the body, request ids, access log.

The request's state has its `request_id` and its `caller`. Endpoints may set two fields of it: `facts` for the log, and
`outcome` where the status does not show it (a stream's status is sent before its outcome is known).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridkv.serve.access import Access
from hybridkv.serve.connections import Connections
from hybridkv.serve.cors import Cors
from hybridkv.serve.failures import CLIENT_GONE, NO_SPACE, failure, is_anthropic, status_of
from hybridkv.serve.jobs import StoppingError
from hybridkv.serve.request_body import RequestBody

LOG = logging.getLogger("hybridkv.serve")
_OUTCOMES = {CLIENT_GONE: "disconnected", 429: "busy", NO_SPACE: "busy"}

Ended = Callable[[str, str, Mapping[str, Any]], None]
"""Called with the path, the outcome and the state of every request."""


class _Visit:
    """One HTTP request, from its arrival to the last byte of its reply."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = _clean_id(Headers(scope=scope).get("x-request-id"))
        self.path: str = scope["path"]
        self.state: dict[str, Any] = scope.setdefault("state", {})
        self.state["request_id"] = self.id
        self.is_begun = False
        self.is_answered = False
        self._method: str = scope["method"]
        self._status = CLIENT_GONE
        self._start = time.monotonic()
        self._send = send

    @property
    def outcome(self) -> str:
        told: str | None = self.state.get("outcome")
        if told is not None:
            return told
        if self._status < 400:
            return "completed"
        return _OUTCOMES.get(self._status, "refused" if self._status < 500 else "failed")

    async def tell(self, message: Message) -> None:
        """Send a part of the reply."""
        if message["type"] == "http.response.start":
            self.is_begun = True
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            if is_anthropic(self.path):
                headers["request-id"] = self.id
        else:
            self.is_answered = not message.get("more_body", False)
        await self._send(message)

    def log(self, level: int) -> None:
        facts = {
            "request": self.id,
            "method": self._method,
            "path": self.path,
            "status": self._status,
            "outcome": self.outcome,
            "seconds": round(time.monotonic() - self._start, 4),
            **self.state.get("facts", {}),
        }
        LOG.log(logging.WARNING if self.outcome == "failed" else level, "request", extra={"facts": facts})


class Front:
    """ASGI middleware around an application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        connections: Connections,
        max_body_bytes: int,
        on_end: Ended,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stop`: called on the event loop when the server begins to stop."""
        self.stop = on_stop
        self.connections = connections
        self._app = app
        self._gate = Cors(self._enter, access.cors_origins)
        self._on_end = on_end
        self._access = access
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, visit = Headers(scope=scope), _Visit(scope, send)
        visit.state["caller"] = self._access.caller(headers, visit.path)
        body = RequestBody(
            headers,
            receive,
            max_bytes=self._max_body_bytes,
            timeout_s=self.connections.limits.receive_timeout_s,
            is_answered=lambda: visit.is_begun,
            on_slow=self.connections.count_slow_body,
        )
        try:
            await self._gate(scope, body.receive, visit.tell)
        except asyncio.CancelledError:  # for example while a slow body is read
            visit.state["outcome"] = "stopped"
            if visit.is_begun:
                raise
            await failure(503, str(StoppingError()), scope=scope)(scope, receive, visit.tell)
        except BaseException as error:
            visit.state["outcome"] = "failed"
            if not visit.is_answered or not isinstance(error, Exception):
                raise
            LOG.error("a bug", exc_info=error, extra={"facts": {"request": visit.id}})
        finally:
            visit.log(logging.DEBUG if self._access.is_open(visit.path) else logging.INFO)
            self._on_end(visit.path, visit.outcome, visit.state)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if its caller may enter."""
        caller, headers = scope["state"]["caller"], Headers(scope=scope)
        refusal = self._access.refusal(caller, scope["method"], scope["path"], headers)
        if refusal is not None:
            await failure(status_of(refusal), str(refusal), scope=scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _clean_id(given: str | None) -> str:
    """The client's request id if it is safe in a header and a log, or else a new one."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
