"""Servers that stand for workers: they record what they get and answer as told. A router in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from hybridkv.route import RouteOptions, make_router
from hybridkv.serve import Server

PATIENCE_S = 20.0
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "h"}
PIECE = b"x" * (1 << 16)
EVENTS = [b'data: {"a": "\xc3\xa4"}\n\n', b": comment\n\n", b'data: {"b": 2}\n\ndata: [DONE]\n\n']
LINK = {"role": "prefill", "host": "10.0.0.7", "port": 5600, "engine_id": "e"}


class StandIn:
    """A worker. `bodies`: what it got; `seen`: the headers; `strays`: other paths; `reply`: what it answers."""

    def __init__(self, name: str) -> None:
        self.url = ""
        self.name = name
        self.bodies: list[Any] = []
        self.seen: list[dict[str, str]] = []
        self.strays: list[str] = []
        self.reply: Any = {"from": name}
        self.status = 200
        self.params: Any = PARAMS if name.startswith("prefill") else None
        self.link: Any = None
        self.links_asked = 0
        self.is_held = False
        self.is_ready: Callable[[], bool] = lambda: True
        """It answers no request before this holds."""
        self.events: list[bytes] | None = None
        self.endless: str | None = None
        """Content type of replies that never end, in pieces of `PIECE`."""
        self.health_is_endless = False
        self.num_sent = 0
        """Pieces of endless replies that it could send."""
        self.ended = threading.Event()
        """Set when a held request was cancelled."""
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/v1/link", self.tell_link),
                Route("/health", self.health),
                Route("/{path:path}", self.anything, methods=["GET", "POST", "DELETE"]),
            ]
        )

    async def complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.seen.append(dict(request.headers))
        while not self.is_ready():
            await asyncio.sleep(0.005)
        if self.is_held:
            await self._hold(request)
        if self.endless is not None:
            return self._never_ending(self.endless)
        if self.events is not None:
            return StreamingResponse(self._events(request), media_type="text/event-stream; charset=utf-8")
        reply = {**self.reply, "kv_transfer_params": self.params} if isinstance(self.reply, dict) else self.reply
        return JSONResponse(reply, self.status, headers={"Retry-After": "7"} if self.status == 429 else None)

    async def _events(self, request: Request) -> Any:
        assert self.events is not None
        try:
            for event in self.events:
                if event == b"hold":
                    await asyncio.sleep(PATIENCE_S)
                if event == b"die":
                    raise RuntimeError("dies")
                yield event
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.ended.set()
            raise

    async def _hold(self, request: Request) -> None:
        """Until it is let go, or the client hangs up."""
        while self.is_held:
            if await request.is_disconnected():
                self.ended.set()
                return
            await asyncio.sleep(0.005)

    def let_go_when_left(self) -> None:
        """Hold a request until its client hangs up, and no later ones."""
        self.ended.wait(PATIENCE_S)
        self.is_held = False

    def _never_ending(self, media_type: str) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield PIECE
                    self.num_sent += 1
                    await asyncio.sleep(0)
            finally:
                self.ended.set()

        return StreamingResponse(pieces(), self.status, media_type=media_type)

    async def models(self, request: Request) -> Response:
        self.seen.append(dict(request.headers))
        if self.endless is not None:
            return self._never_ending(self.endless)
        return JSONResponse({"data": [self.name, request.scope["raw_path"].decode()]})

    async def tell_link(self, request: Request) -> Response:
        self.links_asked += 1
        self.seen.append(dict(request.headers))
        return JSONResponse(self.link) if self.link is not None else Response(status_code=404)

    async def health(self, request: Request) -> Response:
        self.seen.append(dict(request.headers))
        if self.health_is_endless:
            return self._never_ending("application/json")
        return Response(status_code=self.status)

    async def anything(self, request: Request) -> Response:
        """Answer a path that a router must never ask for."""
        self.strays.append(request.scope["raw_path"].decode())
        return JSONResponse({"a secret of": self.name})


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    server, ready = Server("127.0.0.1", 0), threading.Event()
    thread = threading.Thread(target=lambda: server.run(app, shutdown_timeout=0, on_ready=ready.set))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield server.url
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def standing_in(name: str) -> Iterator[StandIn]:
    one = StandIn(name)
    with listening(one.app) as one.url:
        yield one
        one.is_held = False


class Routed:
    """A router."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def post(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def raw(self, head: str) -> tuple[int, bytes]:
        """Send a request as it is written here; returns the status and the body of the reply."""
        with socket.create_connection(("127.0.0.1", int(self.url.split(":")[-1])), timeout=PATIENCE_S) as one:
            one.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1"))
            got = b"".join(iter(lambda: one.recv(65536), b""))
        top, _, body = got.partition(b"\r\n\r\n")
        return int(top.split()[1]), body

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            one.name.removeprefix("hybridkv_route_")
            + "".join(f"|{v}" for k, v in sorted(one.labels.items())): one.value
            for family in families
            for one in family.samples
        }

    def vanish(self, is_time: Callable[[bytes], bool], **body: Any) -> None:
        """Send a request, and hang up when `is_time` says so of what has come."""
        content = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", int(self.url.split(":")[-1]))) as one:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
            one.sendall(head.encode() + content)
            one.settimeout(0.01)
            got, end = b"", time.monotonic() + PATIENCE_S
            while not is_time(got) and time.monotonic() < end:
                with suppress(TimeoutError):
                    got += one.recv(65536)


@contextmanager
def routing(prefill: list[StandIn | str], decode: list[StandIn | str], **options: Any) -> Iterator[Routed]:
    first, second = (tuple(one if isinstance(one, str) else one.url for one in few) for few in (prefill, decode))
    with listening(make_router(RouteOptions(first, second, **options))) as url:
        yield Routed(url)


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"http://127.0.0.1:{one.getsockname()[1]}"
