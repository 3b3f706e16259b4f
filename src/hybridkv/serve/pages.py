"""The page: its HTML at /, its scripts, styles and pictures under /ui/. The page's code is in the folder `ui`."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

from hybridkv.serve.access import PAGE, PAGE_FILES
from hybridkv.serve.failures import NotFoundError

_INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


class Pages:
    """The files of the page, read once."""

    def __init__(self) -> None:
        folder = resources.files("hybridkv.serve") / "ui"
        found = folder.iterdir() if folder.is_dir() else iter(())
        self._files = {one.name: _file(one.name, one.read_bytes()) for one in found if _kind(one.name)}

    def answer(self, name: str, request: Request) -> Response:
        """A file, or 304 if the client has it."""
        found = self._files.get(name)
        if found is None:
            raise NotFoundError(f"there is no file {name[:100]!r} here: the page is at {PAGE}")
        headers = {**_HEADERS, "ETag": found.etag}
        if found.etag in [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media_type)


def add_pages(app: FastAPI, pages: Pages) -> None:
    """Add the paths of the page. They are not part of the API that /openapi.json describes."""

    @app.api_route(PAGE, methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return pages.answer(_INDEX, request)

    @app.api_route(PAGE_FILES + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return pages.answer(name, request)


def _kind(name: str) -> str | None:
    return _TYPES.get(f".{name.rpartition('.')[2]}")


def _file(name: str, content: bytes) -> _File:
    return _File(content, _kind(name) or "", f'"{hashlib.sha256(content).hexdigest()[:32]}"')
