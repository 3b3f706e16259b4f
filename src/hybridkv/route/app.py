"""The endpoints of a router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.responses import Response

from hybridkv import __version__
from hybridkv.errors import InputError
from hybridkv.route.pool import Pool
from hybridkv.route.router import Router
from hybridkv.serve.access import Access
from hybridkv.serve.connection_limits import ConnectionLimits
from hybridkv.serve.connections import Connections
from hybridkv.serve.failures import answer_failures, failure
from hybridkv.serve.middleware import Front
from hybridkv.serve.replies import Health
from hybridkv.serve.service import CHAT, COMPLETIONS

_FILES_EACH = 3
"""A client's connection, and one to each of two workers."""
_LEAST_REPLY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Options of a router."""

    prefill: tuple[str, ...]
    """URLs of prefill workers."""
    decode: tuple[str, ...]
    """URLs of decode workers."""
    api_keys: tuple[str, ...] = ()
    """API keys; a request must have one of them. Empty: no key is needed. Workers get what the client sends."""
    max_body_bytes: int = 16 * 2**20
    prefill_timeout_s: float = 120.0
    """After this time the decode worker computes the prompt itself."""
    is_early: bool = False
    """Ask both workers at once, under a transfer id that the router chooses."""
    max_reply_bytes: int = 64 * 2**20
    """Most bytes of a worker's reply that is no stream: the router reads it to its end before the client gets it."""
    rest_s: float = 5.0
    """Time for which a worker is skipped that could not be reached."""
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """The last three: as in the server's options."""

    def __post_init__(self) -> None:
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if not urls:
                raise InputError(f"no {role} worker: name one with --{role}, such as --{role} http://127.0.0.1:8100")
            for url in urls:
                _check_url(role, url)
            if len({url.rstrip("/") for url in urls}) < len(urls):
                raise InputError(f"--{role} names a worker twice: name each once")
        if not self.prefill_timeout_s > 0:
            raise InputError(f"prefill timeout {self.prefill_timeout_s} s: choose more than 0")
        if self.max_reply_bytes < _LEAST_REPLY_BYTES:
            raise InputError(f"max reply {self.max_reply_bytes} bytes: no reply would fit; choose 1KiB or more")


def make_router(options: RouteOptions) -> Front:
    """An ASGI application that routes requests to workers."""
    prefill, decode = (
        Pool(role, [url.rstrip("/") for url in urls], options.rest_s)
        for role, urls in (("prefill", options.prefill), ("decode", options.decode))
    )
    router = Router(
        prefill,
        decode,
        prefill_timeout_s=options.prefill_timeout_s,
        is_early=options.is_early,
        max_reply_bytes=options.max_reply_bytes,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await router.close()

    app = FastAPI(title="hybridkv route", version=__version__, lifespan=lifespan, redirect_slashes=False)
    answer_failures(app)
    _add_endpoints(app, router)

    def count(path: str, outcome: str, state: Mapping[str, Any]) -> None:
        if path in (COMPLETIONS, CHAT):
            router.metrics.ended(outcome)

    access = Access(options.api_keys, allowed_hosts=options.allowed_hosts, cors_origins=options.cors_origins)
    connections = Connections(options.connections, prefix="hybridkv_route", files_each=_FILES_EACH)
    router.metrics.add(connections)
    return Front(app, access=access, connections=connections, max_body_bytes=options.max_body_bytes, on_end=count)


def _add_endpoints(app: FastAPI, router: Router) -> None:
    @app.post(COMPLETIONS, response_model=None)
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await router.answer(request, COMPLETIONS)

    @app.post(CHAT, response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer messages."""
        return await router.answer(request, CHAT)

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        """What a decode worker serves."""
        return await router.models(request)

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        return await router.models(request, name)

    @app.get("/health", response_model=Health)
    async def health(request: Request) -> Health | Response:
        """Whether a decode worker can serve requests."""
        return Health(status="ok") if await router.is_healthy(request) else failure(503, "no decode worker is healthy")

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(router.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _check_url(role: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        has_address = parts.hostname is not None and parts.port != 0
    except ValueError:
        has_address = False
    if not has_address or parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
        raise InputError(f"--{role} {url!r}: write http://HOST:PORT, such as http://127.0.0.1:8100")
