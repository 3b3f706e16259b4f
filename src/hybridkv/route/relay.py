"""Passes the reply of a worker to the client, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridkv.route.upstream import Reply
from hybridkv.serve.failures import error_body, status_of
from hybridkv.serve.jobs import ClientGone, StoppingError, while_connected

_RELAYED = ("content-type", "retry-after", "www-authenticate", "cache-control", "x-accel-buffering")
_LAST_EVENT = b"data: [DONE]\n\n"


def is_event_stream(reply: httpx.Response) -> bool:
    kind: str = reply.headers.get("content-type", "")
    return kind.startswith("text/event-stream")


def whole_reply(reply: Reply) -> Response:
    return Response(reply.content, reply.status, _headers(reply.headers))


class RelayedStream(Response):
    """Sends a worker's server-sent events as they arrive. It owns the connection to the worker."""

    def __init__(self, reply: httpx.Response, owned: AsyncExitStack, on_first_byte: Callable[[], None]) -> None:
        super().__init__(status_code=reply.status_code, headers=_headers(reply.headers))
        del self.headers["content-length"]
        self.owned = owned
        """Closed when the stream ends or the client disconnects."""
        self._reply = reply
        self._on_first_byte = on_first_byte
        self._is_done = False
        """Clients hang up after the last event, which may come before the end of the worker's reply."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await while_connected(receive, self._send_all(send))
            except StoppingError as error:
                scope["state"]["outcome"] = "stopped"
                await _send_error(send, status_of(error), str(error))
            except httpx.TransportError:
                scope["state"]["outcome"] = "failed"
                await _send_error(send, 502, "the decode worker has hung up before the reply was complete: try again")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            scope["state"]["outcome"] = "completed" if self._is_done else "disconnected"
        finally:
            await self.owned.aclose()

    async def _send_all(self, send: Send) -> None:
        pieces: AsyncIterator[bytes] = self._reply.aiter_raw()
        is_first = True
        async for piece in pieces:
            if is_first:
                self._on_first_byte()
                is_first = False
            self._is_done = piece.endswith(_LAST_EVENT)
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _send_error(send: Send, status: int, message: str) -> None:
    """An event; the blank line before it ends one that may be incomplete."""
    event = f"\n\ndata: {error_body(status, message)}\n\n"
    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})


def _headers(given: Mapping[str, str]) -> dict[str, str]:
    return {name: given[name] for name in _RELAYED if name in given}
