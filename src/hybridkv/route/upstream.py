"""HTTP from a router to its workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from hybridkv.route.forwarding import VIA, WorkerHeaders
from hybridkv.route.pool import Worker
from hybridkv.units import format_bytes

CONNECT_S = 5.0
_QUESTION_S = 5.0
"""For the whole of what a worker answers without computing."""
_KEEP_ALIVE_S = 3.0
"""Shorter than uvicorn's 5 s: a kept connection is not closed by the worker just when it is used."""
_ANY_HOST = ("0.0.0.0", "::", "")


class Link(NamedTuple):
    """Where a prefill worker's KV can be fetched."""

    host: str
    port: int


class Reply(NamedTuple):
    """A worker's reply that was read to its end."""

    status: int
    headers: httpx.Headers
    content: bytes


class ReplyTooLarge(Exception):  # noqa: N818 - the worker's error, not ours
    """A worker's reply has more bytes than the router reads. Its text is for the client."""


class Upstream:
    """A pool of connections to all workers."""

    def __init__(self, max_reply_bytes: int) -> None:
        self._max_reply_bytes = max_reply_bytes
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEP_ALIVE_S)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        # Replies are relayed as they are: httpx must not ask for a compression that the client does not know.
        always = {b"accept-encoding": b"identity", b"via": VIA}
        # Workers are named by the operator: no proxy of the environment stands between.
        self._http = httpx.AsyncClient(
            headers=always, limits=limits, timeout=timeout, trust_env=False, follow_redirects=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, worker: Worker, path: str, body: dict[str, Any], headers: WorkerHeaders) -> Reply:
        """The whole reply. Raises ReplyTooLarge."""
        async with self.stream(worker, path, body, headers) as reply:
            return await self.read(worker, reply)

    @asynccontextmanager
    async def stream(
        self, worker: Worker, path: str, body: dict[str, Any], headers: WorkerHeaders
    ) -> AsyncIterator[httpx.Response]:
        """The reply's status and headers; its body is still to be read. Leaving the context hangs up."""
        content = json.dumps(body, separators=(",", ":")).encode()
        sent = {b"content-type": b"application/json", **headers}
        with worker.busy():
            async with self._http.stream("POST", worker.url + path, content=content, headers=sent) as reply:
                yield reply

    async def read(self, worker: Worker, reply: httpx.Response) -> Reply:
        """Read the body of a reply that is no stream. Raises ReplyTooLarge."""
        pieces, size = list[bytes](), 0
        async for piece in reply.aiter_raw():
            size += len(piece)
            if size > self._max_reply_bytes:
                most = format_bytes(self._max_reply_bytes)
                raise ReplyTooLarge(
                    f"the reply of the worker {worker.url} has more than {most}: ask for less, or for a stream, or "
                    "start the router with a larger --max-reply"
                )
            pieces.append(piece)
        return Reply(reply.status_code, reply.headers, b"".join(pieces))

    async def get(self, worker: Worker, path: str, headers: WorkerHeaders) -> Reply:
        """The whole reply. Raises ReplyTooLarge, and httpx.ReadTimeout for one that does not end in time."""
        try:
            async with (
                asyncio.timeout(_QUESTION_S),
                self._http.stream("GET", worker.url + path, headers=headers) as reply,
            ):
                return await self.read(worker, reply)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"{worker.url}: no complete reply after {_QUESTION_S:g} s") from error

    async def link_of(self, worker: Worker, headers: WorkerHeaders) -> Link | None:
        """Where a prefill worker's KV can be fetched, or None if it does not say."""
        try:
            reply = await self.get(worker, "/v1/link", headers)
            told = json.loads(reply.content) if reply.status == 200 else None
        except (httpx.HTTPError, ReplyTooLarge, ValueError, RecursionError):
            return None
        match told:
            case {"role": "prefill", "host": str(host), "port": int(port)}:
                return Link(urlsplit(worker.url).hostname or host if host in _ANY_HOST else host, port)
        return None
