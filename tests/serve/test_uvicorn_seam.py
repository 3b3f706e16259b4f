"""The seam to uvicorn: these tests fail when a part of uvicorn or h11 that it relies on has moved."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybridkv.serve import Server
from hybridkv.serve.connection_limits import ConnectionLimits
from hybridkv.serve.connections import Connection, Connections, Stage
from hybridkv.serve.uvicorn_seam import HttpConnection, StoppableServer

POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Book(Connections):
    """Remembers the stages of one connection."""

    def __init__(self) -> None:
        super().__init__(ConnectionLimits(), prefix="test")
        self.seen: list[Stage | None] = []

    def move(self, connection: Connection, stage: Stage) -> None:
        self.seen.append(stage)
        super().move(connection, stage)

    def remove(self, connection: Connection) -> None:
        self.seen.append(None)
        super().remove(connection)


async def reply(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            message: Message = await receive()
            await send({"type": f"{message['type']}.complete"})
        return
    if scope["path"] == "/":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def stages(*sent: bytes) -> list[Stage | None]:
    """The stages that a connection goes through when its client sends this, each part after the server has had time."""
    book, listening = Book(), Server("127.0.0.1", 0)
    is_stopped = False

    async def talk() -> None:
        nonlocal is_stopped
        _, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        for number, part in enumerate(sent, 1):
            writer.write(part)
            while len(book.seen) < number:
                await asyncio.sleep(0.001)
            for _ in range(20):  # turns of the event loop
                await asyncio.sleep(0.002)
        writer.close()
        while book.seen[-1] is not None:
            await asyncio.sleep(0.001)
        is_stopped = True

    talking: list[asyncio.Task[None]] = []
    server = StoppableServer(
        reply,
        book,
        stopped=lambda: is_stopped,
        shutdown_timeout=1,
        on_ready=lambda: talking.append(asyncio.get_running_loop().create_task(talk())),
        on_stop=lambda: None,
    )
    asyncio.run(server.serve(sockets=[listening._socket]))
    return book.seen


@pytest.mark.parametrize(("sent", "expected"), [
    ((GET[:20], GET[20:]), [Stage.HEAD, Stage.REPLY, Stage.IDLE, None]),
    ((GET, GET[:20]), [Stage.REPLY, Stage.IDLE, Stage.HEAD, None]),
    ((POST + b"12", b"34"), [Stage.BODY, Stage.REPLY, Stage.IDLE, None]),
    ((POST + b"1234" + GET[:5],), [Stage.REPLY, Stage.HEAD, None]),
    ((POST.replace(b" / ", b" /unread ") + b"12", b"34"), [Stage.BODY, Stage.HEAD, Stage.IDLE, None]),
])  # fmt: skip
def test_a_connection_tells_its_stages(sent: tuple[bytes, ...], expected: list[Stage | None]) -> None:
    assert stages(*sent) == expected


def test_what_is_overridden_is_there() -> None:
    for ours, theirs in ((HttpConnection, H11Protocol), (StoppableServer, uvicorn.Server)):
        for name, method in vars(ours).items():
            if inspect.isfunction(method) and hasattr(theirs, name) and not name.startswith("__"):
                assert list(inspect.signature(method).parameters) == list(
                    inspect.signature(getattr(theirs, name)).parameters
                )
    overridden = {"connection_made", "connection_lost", "data_received", "on_response_complete"}
    assert overridden <= set(vars(H11Protocol))
    assert {"startup", "on_tick", "shutdown"} <= set(vars(uvicorn.Server))


def test_http_is_read_by_h11_wherever_httptools_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = type(sys)("httptools")
    monkeypatch.setitem(sys.modules, "httptools", fake)
    server = StoppableServer(
        reply, Book(), stopped=lambda: True, shutdown_timeout=0, on_ready=lambda: None, on_stop=lambda: None
    )
    server.config.load()
    assert server.config.http_protocol_class is H11Protocol
    assert issubclass(HttpConnection, H11Protocol)
