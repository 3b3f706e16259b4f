"""Pages of other origins (CORS): which ones may use the paths under /v1, as browsers ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

CORS_PATHS = "/v1/"
_KNOWS_PRIVATE_NETWORKS = "allow_private_network" in signature(CORSMiddleware).parameters
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("X-Request-Id", "Retry-After")
"""Headers of replies that pages may read."""


class Cors:
    """ASGI middleware. Without origins, it does nothing."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._open = app
        if origins:
            # Headers of requests are not restricted: OpenAI's client has many of its own. Chromium asks whether a page
            # of the internet may use a server of its own network. Older versions of Starlette do not answer that.
            local: dict[str, Any] = {"allow_private_network": True} if _KNOWS_PRIVATE_NETWORKS else {}
            self._open = CORSMiddleware(
                app, origins, allow_methods=_METHODS, allow_headers=["*"], expose_headers=_EXPOSED, **local
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._open if scope["path"].startswith(CORS_PATHS) else self._app
        await app(scope, receive, send)
