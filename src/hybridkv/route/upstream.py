"""HTTP from a router to its workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from hybridkv.route.pool import Worker

CONNECT_S = 5.0
_QUESTION_S = 5.0
"""For what a worker answers without computing."""
_KEEP_ALIVE_S = 3.0
"""Shorter than uvicorn's 5 s: a kept connection is not closed by the worker just when it is used."""
_ANY_HOST = ("0.0.0.0", "::", "")


class Link(NamedTuple):
    """Where a prefill worker's KV can be fetched."""

    host: str
    port: int


class Upstream:
    """A pool of connections to all workers."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEEP_ALIVE_S)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        # Workers are named by the operator: no proxy of the environment stands between.
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, follow_redirects=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, worker: Worker, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """The whole reply."""
        with worker.busy():
            return await self._http.post(worker.url + path, content=_json(body), headers=_of_post(headers))

    @asynccontextmanager
    async def stream(
        self, worker: Worker, path: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """The reply's status and headers; its body is still to be read. Leaving the context hangs up."""
        with worker.busy():
            async with self._http.stream(
                "POST", worker.url + path, content=_json(body), headers=_of_post(headers)
            ) as reply:
                yield reply

    async def get(self, worker: Worker, path: str, headers: Mapping[str, str]) -> httpx.Response:
        timeout = httpx.Timeout(_QUESTION_S)
        return await self._http.get(worker.url + path, headers={**_PLAIN, **headers}, timeout=timeout)

    async def link_of(self, worker: Worker, headers: Mapping[str, str]) -> Link | None:
        """Where a prefill worker's KV can be fetched, or None if it does not say."""
        try:
            reply = await self.get(worker, "/v1/link", headers)
            told = reply.json() if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        match told:
            case {"role": "prefill", "host": str(host), "port": int(port)}:
                return Link(urlsplit(worker.url).hostname or host if host in _ANY_HOST else host, port)
        return None


_PLAIN = {"accept-encoding": "identity"}
"""Replies are relayed as they are: httpx must not ask for a compression that the client does not know."""


def _of_post(headers: Mapping[str, str]) -> dict[str, str]:
    return {**_PLAIN, "content-type": "application/json", **headers}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
