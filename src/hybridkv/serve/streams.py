"""Server-sent events: sends a reply piece by piece while the client is connected."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridkv.serve.failures import error_body, status_of
from hybridkv.serve.jobs import ClientGone, StoppingError, while_connected

DONE = "[DONE]"


class EventStream(Response):
    """Sends events as they arrive. A disconnect of the client ends the stream at once, even before the first event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await while_connected(receive, self._send_all(send))
            except StoppingError as error:
                scope["state"]["outcome"] = "stopped"
                for event in (error_body(status_of(error), str(error)), DONE):
                    await _send_event(send, event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            scope["state"]["outcome"] = "disconnected"
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await _send_event(send, event)


async def _send_event(send: Send, event: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
