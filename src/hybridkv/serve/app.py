"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from hybridkv import __version__
from hybridkv.engine import Engine, EngineError
from hybridkv.errors import InputError
from hybridkv.renamed import refuses_old_names
from hybridkv.serve.access import Access, need_operator
from hybridkv.serve.anthropic_replies import AnthropicError, AnthropicReply, TokenCount
from hybridkv.serve.anthropic_requests import CountRequest, MessagesRequest
from hybridkv.serve.clients import Clients
from hybridkv.serve.connection_limits import ConnectionLimits
from hybridkv.serve.connections import Connections
from hybridkv.serve.failures import MESSAGES, answer_failures, failure
from hybridkv.serve.hidden_folder import HiddenFolder
from hybridkv.serve.hidden_states import HiddenStates
from hybridkv.serve.history import DEFAULT_REQUESTS, History
from hybridkv.serve.inspection import Inspection, add_inspection
from hybridkv.serve.middleware import Front
from hybridkv.serve.pages import Pages, add_pages
from hybridkv.serve.replies import (
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ErrorReply,
    Health,
    LinkCard,
    ModelCard,
    ModelList,
    ResetReply,
    TokenizeReply,
)
from hybridkv.serve.requests import ChatRequest, CompletionRequest
from hybridkv.serve.responses_format import ResponsesReply
from hybridkv.serve.responses_requests import ResponsesRequest
from hybridkv.serve.service import CHAT, COMPLETIONS, Service
from hybridkv.serve.token_requests import DetokenizeRequest, TokenizeRequest

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "Something in the request is wrong"},
    401: {"model": ErrorReply, "description": "An API key is needed"},
    403: {"model": ErrorReply, "description": "Not for this caller"},
    404: {"model": ErrorReply, "description": "There is no such model"},
    413: {"model": ErrorReply, "description": "The body is too large"},
    429: {"model": ErrorReply, "description": "Too many samples wait; Retry-After says when to try again"},
    503: {"model": ErrorReply, "description": "The engine has stopped"},
    507: {"model": ErrorReply, "description": "No space for hidden states; Retry-After says when to try again"},
    "default": {"model": ErrorReply, "description": "Whatever else goes wrong"},
}


_EVENT = {
    "type": "object",
    "description": "One event of a stream: data is a piece of the reply as JSON, an error, or at the end [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}
_PLAIN = {"text/plain": {"schema": {"type": "string"}}}


@refuses_old_names
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server."""

    served_model_name: str
    """The model's name in requests and replies."""
    root: str | None = None
    """The model's directory. `/v1/models` reports it, so that clients find the tokenizer; it is also a valid name."""
    api_keys: tuple[str, ...] = ()
    """API keys; a request must have one of them. Empty: no key is needed."""
    max_body_bytes: int = 16 * 2**20
    max_waiting: int = 16384
    """Most samples, n for each prompt, that may wait for their first token. The default is 128 prompts with n 128, the
    largest request: with less, some requests are always refused; with more, later ones wait longer before a 429."""
    clients: Clients = field(default_factory=Clients)
    """Tells clients apart, whose requests take turns."""
    hidden_folder: HiddenFolder | None = None
    """Where hidden states are written for requests that ask for them. None: they are refused."""
    hidden_layers: tuple[int | str, ...] = ()
    """Layers for requests with `return_token_ids` that do not have the field `hidden_states`."""
    operator_key: str | None = None
    """The key of the operator, who sees all requests and what is cached. It is also a valid API key."""
    is_local: bool = False
    """Whether only this machine reaches the server. Without any key, its callers are then the operator."""
    history: int = DEFAULT_REQUESTS
    """Ended requests whose records are kept. 0: none."""
    ui: bool = True
    """Whether there is a page at /."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients call a server without keys, besides IP addresses and localhost. `*`: any."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the paths under /v1. `*`: any, which needs API keys."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


def make_app(engine: Engine, options: ServeOptions) -> Front:
    """An ASGI application that serves an engine. The caller still owns the engine and closes it."""
    name = options.served_model_name
    _check_names(engine, name, options.root)
    hidden_states = HiddenStates(engine, options.hidden_folder, options.hidden_layers)
    history = History(options.history)
    service = Service(engine, name, options.root or name, options.max_waiting, options.clients, hidden_states, history)
    access = Access(
        options.api_keys,
        options.operator_key,
        is_local=options.is_local,
        has_page=True,
        allowed_hosts=options.allowed_hosts,
        cors_origins=options.cors_origins,
    )
    inspection = Inspection(service, access)
    connections = Connections(options.connections, prefix="hybridkv")
    service.metrics.add_inspection(history, inspection.live)
    service.metrics.add(connections)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(hidden_states.sweep_forever())
        engine.inspection.on_record(history.receive)
        yield
        engine.inspection.on_record(None)
        sweeping.cancel()
        service.close()

    app = FastAPI(title="hybridkv", version=__version__, lifespan=lifespan, responses=_REFUSALS, redirect_slashes=False)
    answer_failures(app)
    _add_text(app, service)
    _add_link(app, service)
    _add_tokens(app, service)
    _add_care(app, service, access)
    add_inspection(app, inspection)
    if options.ui:
        add_pages(app, Pages())
    return Front(
        app,
        access=access,
        connections=connections,
        max_body_bytes=options.max_body_bytes,
        on_end=service.end,
        on_stop=inspection.live.stop,
    )


def _check_names(engine: Engine, model_name: str, root: str | None) -> None:
    """Each name that a request may give as its model must mean one thing."""
    taken = next((name for name in engine.adapters if name in (model_name, root)), None)
    if taken is not None:
        raise InputError(f"adapter {taken!r} has the name of the model: give one of them another name")


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS, responses=_text(CompletionReply), response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue prompts."""
        return await service.answer(request, body)

    @app.post(CHAT, responses=_text(ChatReply), response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer messages. The ends of messages are breakpoints."""
        return await service.answer(request, body)

    @app.post("/v1/responses", responses=_text(ResponsesReply), response_model=None)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer messages, and go on with earlier responses."""
        return await service.answer(request, body)

    @app.post(MESSAGES, responses=_anthropic(AnthropicReply, streams=True), response_model=None)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer messages in Anthropic's format. Blocks with cache_control end at breakpoints."""
        return await service.answer(request, body)

    @app.post(f"{MESSAGES}/count_tokens", responses=_anthropic(TokenCount), response_model=None)
    async def count_tokens(request: Request, body: CountRequest) -> Response:
        """Count the tokens of a prompt in Anthropic's format."""
        return await service.answer_tokens(request, body)

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the served model and its adapters."""
        return ModelList(data=service.cards())

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        return service.card(service.adapter_of(name))


def _add_link(app: FastAPI, service: Service) -> None:
    @app.get("/v1/link", responses={404: {"model": ErrorReply}}, response_model=LinkCard)
    async def link() -> LinkCard | Response:
        """Where other engines reach this one's link. A proxy needs it to send both requests at once."""
        found = service.engine.link
        if found is None:
            return failure(404, "this server has no role: start it with --role prefill or --role decode")
        return LinkCard(
            role=found.options.role, engine_id=found.engine_id, host=found.options.host, port=found.port or None
        )


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses={200: {"model": TokenizeReply}}, response_model=None)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """Tokenize a text or messages."""
        return await service.answer_tokens(request, body)

    @app.post("/detokenize", responses={200: {"model": DetokenizeReply}}, response_model=None)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """Convert token ids to text."""
        return await service.answer_tokens(request, body)


def _add_care(app: FastAPI, service: Service, access: Access) -> None:
    @app.get("/health", responses={503: {"model": ErrorReply}}, response_model=Health)
    async def health() -> Health | Response:
        """Whether requests can be served."""
        try:
            service.engine.check_alive()
        except EngineError as error:
            return failure(503, str(error))
        return Health(status="ok")

    @app.get("/metrics", response_class=Response, responses={200: {"content": _PLAIN}})
    def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/admin/cache/reset")
    async def reset_cache(request: Request) -> ResetReply:
        """Drop everything cached in memory. Running requests continue; data in a store can still be loaded."""
        if access.has_operator_key:
            need_operator(request)
        await run_in_threadpool(service.engine.reset_cache)
        return ResetReply(reset=True)


def _anthropic(reply: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of an endpoint in Anthropic's format."""
    errors = {status: {**refusal, "model": AnthropicError} for status, refusal in _REFUSALS.items()}
    return {**errors, 200: {"model": reply, **({"content": _EVENTS} if streams else {})}}


def _text(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of an endpoint that generates text."""
    return {200: {"model": reply, "content": _EVENTS}}
