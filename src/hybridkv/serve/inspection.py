"""The endpoints that show what became of requests, what the cache holds, and what happens now."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from hybridkv import __version__
from hybridkv.errors import RequestError
from hybridkv.serve.access import Access, Caller, caller_of, need_caller, need_operator
from hybridkv.serve.failures import ForbiddenError, NotFoundError
from hybridkv.serve.history import Entry
from hybridkv.serve.inspection_replies import (
    CallerReply,
    DropReply,
    PinReply,
    PrefixList,
    PrefixText,
    RecordList,
    RecordReply,
    TokenTextsReply,
    UnpinReply,
)
from hybridkv.serve.live import OPERATOR_TOPICS, TOPICS, Live
from hybridkv.serve.prefixes import Prefixes
from hybridkv.serve.replies import ErrorReply
from hybridkv.serve.service import Service

ROOT = "/v1/hybridkv"
MAX_LISTED = 1000
DEFAULT_TOKENS = 4096
MAX_TOKENS = 8192
"""Most tokens whose texts one call returns."""
MAX_PIN_S = 7 * 86400
_PRIVATE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_MISSING: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorReply, "description": "There is no such thing, or it is not the caller's"}
}
_EVENT = {
    "type": "object",
    "description": "One event: its name is a topic, and its data JSON. docs/server.md describes them.",
    "properties": {"event": {"type": "string", "enum": [*TOPICS, "error"]}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_LIVE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}, "description": "Events, until the client disconnects"}
}


class PinRequest(BaseModel):
    """Body of a pin."""

    model_config = ConfigDict(strict=True)

    seconds: float = Field(ge=1, le=MAX_PIN_S, allow_inf_nan=False, description="How long the prefix stays pinned.")


class Inspection:
    """What the endpoints need."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service = service
        self.access = access
        self.prefixes = Prefixes(service.engine, service.texts, service.tokenizing)
        self.live = Live(service.engine, service.history, self.prefixes.serialize)

    def whoami(self, caller: Caller) -> CallerReply:
        return CallerReply(
            is_operator=caller.is_operator,
            key_needed=self.access.has_keys,
            key_ok=caller.refusal is None,
            model=self.service.model_name,
            version=__version__,
        )

    def find(self, name: str, caller: Caller) -> Entry:
        entry = self.service.history.find(name, caller)
        if entry is None:
            raise NotFoundError(f"no request {name[:200]!r} of yours is known: the latest are at {ROOT}/requests", "id")
        return entry

    async def texts(self, entry: Entry, prompt: int, start: int, end: int | None) -> TokenTextsReply:
        """Texts of a prompt's tokens, one by one."""
        if prompt >= len(entry.prompts):
            raise RequestError(f"prompt {prompt}: the request has {len(entry.prompts)}, counted from 0", "prompt")
        record = entry.prompts[prompt].record
        if record is None and entry.prompts[prompt].has_ended:
            raise NotFoundError(f"the tokens of {entry.id} are no longer kept: newer requests took their place", "id")
        if record is None:
            raise NotFoundError(f"prompt {prompt} of {entry.id} has not ended: its tokens are kept then", "id")
        total = record.prompt.num_tokens
        stop = min(total, start + DEFAULT_TOKENS if end is None else end)
        if start > stop:
            raise RequestError(f"start {start}: choose at most {stop}, the end", "start")
        if stop - start > MAX_TOKENS:
            raise RequestError(f"{stop - start} tokens from start to end: ask for at most {MAX_TOKENS} at once", "end")
        ids = record.prompt.as_array()[start:stop].tolist()
        text = self.service.texts.text
        texts = await self.service.tokenizing.run(lambda engine: [text(token) for token in ids], 0)
        return TokenTextsReply(start=start, end=stop, total=total, texts=texts)


def add_inspection(app: FastAPI, inspection: Inspection) -> None:
    _add_requests(app, inspection)
    _add_live(app, inspection)
    _add_prefixes(app, inspection)


def _add_requests(app: FastAPI, inspection: Inspection) -> None:
    history = inspection.service.history

    @app.get(f"{ROOT}/whoami")
    async def whoami(request: Request) -> CallerReply:
        """What the caller may see."""
        return inspection.whoami(caller_of(request))

    @app.get(f"{ROOT}/requests", responses={**_MISSING, 200: {"model": RecordList}}, response_model=None)
    async def requests(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100) -> Response:
        """The caller's latest requests, the newest first; the operator sees those of all."""
        lines = [entry.line() for entry in history.latest(need_caller(request), limit)]
        return _json(f'{{"object": "list", "data": [{", ".join(lines)}]}}')

    @app.get(f"{ROOT}/requests/{{id:path}}/tokens", responses=_MISSING)
    async def tokens(
        request: Request,
        id: str,
        prompt: Annotated[int, Query(ge=0)] = 0,
        start: Annotated[int, Query(ge=0)] = 0,
        end: Annotated[int | None, Query(ge=0)] = None,
    ) -> TokenTextsReply:
        """The text of each token of a prompt, at most 8192 at once. Without `end`: 4096."""
        return await inspection.texts(inspection.find(id, need_caller(request)), prompt, start, end)

    @app.get(f"{ROOT}/requests/{{id:path}}", responses={**_MISSING, 200: {"model": RecordReply}}, response_model=None)
    async def record(request: Request, id: str) -> Response:
        """What became of a request: by the id of its reply, or by its X-Request-Id."""
        entry = inspection.find(id, need_caller(request))
        return _json(entry.to_json())


def _add_live(app: FastAPI, inspection: Inspection) -> None:
    @app.get(f"{ROOT}/live", responses={**_MISSING, **_LIVE}, response_class=Response, response_model=None)
    async def live(request: Request, topics: str | None = None) -> Response:
        """Events while the client is connected. `topics`: names with commas between them; default: all it may have."""
        caller = need_caller(request)
        stream = inspection.live.open(_topics(topics, caller), caller)
        stream.headers.update(_PRIVATE)
        return stream


def _add_prefixes(app: FastAPI, inspection: Inspection) -> None:
    prefixes = inspection.prefixes

    @app.get(f"{ROOT}/prefixes", responses={**_MISSING, 200: {"model": PrefixList}}, response_model=None)
    async def all_prefixes(request: Request) -> Response:
        """What the cache holds in memory, for the operator."""
        need_operator(request)
        return _json(await prefixes.all())

    @app.get(f"{ROOT}/prefixes/{{key}}", responses=_MISSING)
    async def prefix(request: Request, key: str) -> PrefixText:
        """The text of a prefix, for the operator."""
        need_operator(request)
        return await prefixes.text(key)

    @app.post(f"{ROOT}/prefixes/{{key}}/pin", responses=_MISSING)
    async def pin(request: Request, key: str, body: PinRequest) -> PinReply:
        """Keep a prefix from being evicted for some time."""
        need_operator(request)
        return await prefixes.pin(key, body.seconds)

    @app.delete(f"{ROOT}/prefixes/{{key}}/pin", responses=_MISSING)
    async def unpin(request: Request, key: str) -> UnpinReply:
        """End a pin."""
        need_operator(request)
        return await prefixes.unpin(key)

    @app.delete(f"{ROOT}/prefixes/{{key}}", responses=_MISSING)
    async def drop(request: Request, key: str) -> DropReply:
        """Drop a prefix and all that continue it from memory."""
        need_operator(request)
        return await prefixes.drop(key)


def _topics(given: str | None, caller: Caller) -> frozenset[str]:
    if given is None:
        return frozenset(TOPICS) if caller.is_operator else frozenset(TOPICS) - OPERATOR_TOPICS
    names = frozenset(name.strip() for name in given.split(","))
    for name in sorted(names - set(TOPICS)):
        raise RequestError(f"topic {name[:100]!r}: choose some of {', '.join(TOPICS)}", "topics")
    if names & OPERATOR_TOPICS and not caller.is_operator:
        raise ForbiddenError("topic 'prefixes' is for the operator alone: leave it out, or send the operator's key")
    return names


def _json(content: str | dict[str, Any]) -> Response:
    text = content if isinstance(content, str) else json.dumps(content)
    return Response(text, media_type="application/json", headers=_PRIVATE)
