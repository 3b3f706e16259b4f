"""Middleware before every endpoint: API keys, body size limit, request ids, access log.

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

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridkv.serve.access import KEY_NEEDED, Access
from hybridkv.serve.failures import CLIENT_GONE, NO_SPACE, failure
from hybridkv.serve.jobs import StoppingError
from hybridkv.units import format_bytes

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
            MutableHeaders(scope=message)["x-request-id"] = self.id
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
        max_body_bytes: int,
        on_end: Ended,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stop`: called on the event loop when the server begins to stop."""
        self.stop = on_stop
        self._app = app
        self._on_end = on_end
        self._access = access
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, visit = Headers(scope=scope), _Visit(scope, send)
        caller = visit.state["caller"] = self._access.caller(headers)
        try:
            if not self._access.may_enter(visit.path, caller):
                await failure(401, KEY_NEEDED)(scope, receive, visit.tell)
            else:
                await self._app(scope, self._limited(headers, receive), visit.tell)
        except asyncio.CancelledError:  # for example while a slow body is read
            visit.state["outcome"] = "stopped"
            if visit.is_begun:
                raise
            await failure(503, str(StoppingError()))(scope, receive, visit.tell)
        except BaseException as error:
            visit.state["outcome"] = "failed"
            if not visit.is_answered or not isinstance(error, Exception):
                raise
            LOG.error("a bug", exc_info=error, extra={"facts": {"request": visit.id}})
        finally:
            visit.log(logging.DEBUG if self._access.is_open(visit.path) else logging.INFO)
            self._on_end(visit.path, visit.outcome, visit.state)

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """A `receive` that refuses too large bodies as soon as their size is known, and does not buffer them."""
        announced, seen = headers.get("content-length", ""), 0

        async def limited() -> Message:
            nonlocal seen
            if announced.isdigit() and len(announced) < 20 and int(announced) > self._max_body_bytes:
                raise self._too_large()
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> HTTPException:
        most = format_bytes(self._max_body_bytes)
        return HTTPException(
            413, f"the body has more than {most}: send less, or start the server with a larger --max-body"
        )


def _clean_id(given: str | None) -> str:
    """The client's request id if it is safe in a header and a log, or else a new one."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
