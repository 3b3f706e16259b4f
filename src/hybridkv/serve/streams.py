"""Server-sent events: sends a reply piece by piece while the client is connected."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridkv.errors import HybridKVError
from hybridkv.serve.jobs import ClientGone, StoppingError, while_connected


def data_event(data: str, name: str | None = None) -> bytes:
    """An event as it is sent. `data` has one line."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()


DONE = data_event("[DONE]")


class EventStream(Response):
    """Sends events as they arrive. A disconnect of the client ends the stream at once, even before the first event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        on_end: Callable[[], None],
        on_stop: Callable[[HybridKVError], bytes] | None = None,
    ) -> None:
        """`events`: as they are sent. `on_stop`: returns what is sent last by a server that stops; None: nothing is."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._on_stop = on_stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await while_connected(receive, self._send_all(send))
            except StoppingError as error:
                scope["state"]["outcome"] = "stopped"
                if self._on_stop is not None:
                    await _send_event(send, self._on_stop(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            scope["state"]["outcome"] = "disconnected"
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await _send_event(send, event)


async def _send_event(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})
