"""Converts errors to HTTP replies, in Anthropic's format on its endpoints and in OpenAI's on all others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from math import isnan
from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from hybridkv.engine import EngineError
from hybridkv.errors import HybridKVError, InputError, RequestError
from hybridkv.serve.hidden_folder import NoSpaceError
from hybridkv.serve.jobs import ClientGone, StoppingError, TooBusyError
from hybridkv.serve.requests import EITHER

CLIENT_GONE = 499
NO_SPACE = 507
_SUBJECT = re.compile("^(Input|List|String|Dictionary)(?= should)")
RETRY_AFTER_S = 1
_MAX_CHARS = 1000
"""Most characters of an error message, since it may quote what a client sent."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {408: "timeout_error", 503: "overloaded_error", 507: "overloaded_error"}
"""Those of Anthropic that are not OpenAI's."""
TOO_LONG = "context_length_exceeded"
"""The code of a prompt that leaves no room for a reply. Some clients check it."""
MESSAGES = "/v1/messages"
"""Anthropic's endpoint. Those of its own are below it."""
TEXT_PATHS = ("/v1/completions", "/v1/chat/completions", MESSAGES, "/v1/responses")
"""Endpoints that generate text."""


class KeyNeededError(RequestError):
    """The request has no valid key."""


class ForbiddenError(RequestError):
    """The caller may not do this."""


class NotFoundError(RequestError):
    """There is no such thing, or it is not the caller's."""


class UnknownModelError(NotFoundError):
    """The request names a model that is not served."""


class TooLongError(RequestError):
    """The prompt leaves no room for a reply."""


_STATUSES: dict[type[HybridKVError], int] = {KeyNeededError: 401, ForbiddenError: 403, NotFoundError: 404}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> str:
    """The error as ASCII-only JSON: a message may quote anything a client sent, even invalid text."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = code or HTTPStatus(status).name.lower()
    return json.dumps({"error": {"message": _shown(message), "type": kind, "param": param, "code": code}})


def anthropic_error_body(status: int, message: str, code: str | None = None, request_id: str | None = None) -> str:
    """The error in Anthropic's format. Its clients find a prompt that is too long by the words of the message."""
    kind = _ANTHROPIC_TYPES.get(status) or _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = f"prompt is too long: {message}" if code == TOO_LONG else message
    return json.dumps({"type": "error", "error": {"type": kind, "message": _shown(told)}, "request_id": request_id})


def _shown(message: str) -> str:
    return message if len(message) <= _MAX_CHARS else message[:_MAX_CHARS] + "..."


def is_anthropic(path: str) -> bool:
    """Whether clients of this path expect Anthropic's format."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def failure(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    *,
    scope: Mapping[str, Any] | None = None,
) -> Response:
    """The reply to a request that failed. `scope`: the request's, which tells the format; None: OpenAI's."""
    later = {"Retry-After": str(RETRY_AFTER_S)}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: later, NO_SPACE: later}.get(status)
    if scope is not None and is_anthropic(scope["path"]):
        body = anthropic_error_body(status, message, code, scope["state"].get("request_id"))
    else:
        body = error_body(status, message, param, code)
    return Response(body, status, headers, media_type="application/json")


def status_of(error: HybridKVError) -> int:
    """401: no valid key. 403: not allowed. 404: unknown model or request. 429: too busy, retry later. 503: stopped or
    stopping. 507: no space for hidden states now. 400: bad input. 500: all else."""
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return status
    if isinstance(error, TooBusyError):
        return 429
    if isinstance(error, NoSpaceError):
        return NO_SPACE
    if isinstance(error, (EngineError, StoppingError)):
        return 503
    return 400 if isinstance(error, InputError) else 500


def code_of(error: HybridKVError) -> str | None:
    """OpenAI's code of the error; None: that of the status."""
    return TOO_LONG if isinstance(error, TooLongError) else None


def answer_failures(app: FastAPI) -> None:
    """Register handlers that convert every error of `app` to a reply."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HybridKVError)
        if isinstance(error, StoppingError):
            request.state.outcome = "stopped"
        param = error.param if isinstance(error, RequestError) else None
        return failure(status_of(error), str(error), param, code_of(error), scope=request.scope)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _what_is_wrong(error)
        return failure(400, message, param, scope=request.scope)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ClientDisconnect):  # while its body was read
            return await gone(request, error)
        answer = failure(error.status_code, _http_message(request, error), scope=request.scope)
        answer.headers.update(error.headers or {})
        return answer

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)  # the client is disconnected

    async def bug(request: Request, error: Exception) -> Response:
        message = f"an error in the server, which its log tells more about: {type(error).__name__}"
        return failure(500, message, scope=request.scope)

    app.add_exception_handler(HybridKVError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, bug)


def _http_message(request: Request, error: HTTPException) -> str:
    """Message for an error that the framework raises itself, such as an unknown path."""
    path = request.url.path
    if error.status_code == 404:
        ways = f"text is generated at {', '.join(TEXT_PATHS)}; " if path.startswith("/v1/") else ""
        return f"there is no path {path!r} here: {ways}/openapi.json lists all there are"
    if error.status_code == 405:
        return f"{request.method} {path!r}: this path takes {(error.headers or {}).get('Allow', 'another method')}"
    cause = error.__cause__
    if cause is None:
        return str(error.detail)
    if isinstance(cause, RecursionError):
        return "the body has lists or objects nested too deeply: send it flatter"
    if isinstance(cause, UnicodeDecodeError):
        return "the body is no text in UTF-8: encode it so"
    return "the body cannot be parsed: send JSON, with numbers of fewer than 4,300 digits"


def _what_is_wrong(error: RequestValidationError) -> tuple[str, str | None]:
    """A message about the first field that is wrong, and its name."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if isinstance(error.body, bytes):
        return "the body is not said to be JSON: send it with the header 'Content-Type: application/json'", None
    return _reason(first), ".".join(_place(first)) or None


def _reason(error: Mapping[str, Any]) -> str:
    place, kind, value = _place(error), error["type"], error["input"]
    name = ".".join(place) or "the body"
    if kind == "missing":
        return f"{name} is missing: " + ("it is required" if place else "send a JSON object")
    if kind == "value_error":
        return f"{name}: {error['msg'].removeprefix('Value error, ')}"
    if error["loc"][-1] == "str" and place[-1] in EITHER:  # pydantic tried several types; this is the first
        wanted = EITHER[place[-1]]
    elif kind in ("dict_type", "model_attributes_type", "model_type"):
        wanted = "it should be a JSON object"
    elif isinstance(value, float) and isnan(value):
        wanted = "it should be a number"
    else:
        wanted = _SUBJECT.sub("it", error["msg"]).partition(" after validation")[0]
    return f"{name} is {_SHORT.repr(value)}: {wanted}"


def _place(error: Mapping[str, Any]) -> list[str]:
    """Path of the error in the body: field names and item numbers, without the types that pydantic tried."""
    return [
        str(part)
        for part in error["loc"][1:]
        if isinstance(part, int) or (part.replace("_", "").isalnum() and part == part.lower() and part != "str")
    ]


def _short() -> Repr:
    """A `Repr` that shows the beginning of a long value without reading the rest."""
    short = Repr()
    short.maxstring = short.maxlong = short.maxother = 60
    return short


_SHORT = _short()
