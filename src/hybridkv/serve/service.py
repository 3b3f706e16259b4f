"""Answers generation and tokenization requests: from a parsed body to a reply or a stream, with metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from hybridkv.engine import Engine, Prompt, Result, SamplingParams
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.link.params import RemoteDecode
from hybridkv.serve.access import caller_of
from hybridkv.serve.anthropic_format import MessagesDialect
from hybridkv.serve.anthropic_requests import CountRequest, MessagesRequest
from hybridkv.serve.clients import Clients
from hybridkv.serve.conversations import Conversations
from hybridkv.serve.failures import TEXT_PATHS, TooLongError, UnknownModelError
from hybridkv.serve.hidden_states import HiddenStates
from hybridkv.serve.history import Entry, History, PromptEntry
from hybridkv.serve.jobs import Admission, PromptBatch, while_connected
from hybridkv.serve.metrics import Metrics
from hybridkv.serve.openai_format import ChatDialect, CompletionDialect
from hybridkv.serve.replies import ModelCard
from hybridkv.serve.reply_format import ReplyFormat
from hybridkv.serve.requests import ChatRequest, CompletionRequest
from hybridkv.serve.responses_format import ResponsesDialect
from hybridkv.serve.responses_requests import ResponsesRequest
from hybridkv.serve.streams import EventStream
from hybridkv.serve.token_requests import DetokenizeRequest, TokenizeChat, TokenizeText
from hybridkv.serve.token_texts import TokenTexts
from hybridkv.serve.tokenizing import Tokenizing

T = TypeVar("T")
AnyTokenRequest = TokenizeText | TokenizeChat | DetokenizeRequest | CountRequest
AnyRequest = CompletionRequest | ChatRequest | MessagesRequest | ResponsesRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_DIALECTS: dict[type[AnyRequest], type[ReplyFormat]] = {
    CompletionRequest: CompletionDialect,
    ChatRequest: ChatDialect,
    MessagesRequest: MessagesDialect,
    ResponsesRequest: ResponsesDialect,
}
_LAYERS = "hidden_states.layers"
"""What requests call the engine's `hidden_layers`."""


class Service:
    """One engine under one model name."""

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        root: str,
        max_waiting: int,
        clients: Clients,
        hidden_states: HiddenStates,
        history: History,
    ) -> None:
        self.engine = engine
        self.model_name = model_name
        self.root = root
        self.admission = Admission(max_waiting)
        self.clients = clients
        self.hidden_states = hidden_states
        self.history = history
        self.conversations = Conversations()
        self.metrics = Metrics(engine, self.admission, hidden_states.folder)
        self.texts = TokenTexts(engine.tokenizer)
        self._created = int(time.time())
        self.tokenizing = Tokenizing(engine)

    def close(self) -> None:
        self.tokenizing.close()
        self.hidden_states.close()

    def cards(self) -> list[ModelCard]:
        """The model, and its adapters."""
        return [self.card(None), *(self.card(name) for name in self.engine.adapters)]

    def card(self, adapter: str | None) -> ModelCard:
        root = self.root if adapter is None else str(self.engine.adapters[adapter])
        return ModelCard(
            id=self.model_name if adapter is None else adapter,
            root=root,
            parent=None if adapter is None else self.model_name,
            created=self._created,
            max_model_len=self.engine.max_model_len,
        )

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request names in its field `model`; None if it names the model, or nothing."""
        if model in (None, "", self.model_name, self.root):
            return None
        if model in self.engine.adapters:
            return model
        there = ", ".join(map(repr, (self.model_name, *self.engine.adapters)))
        raise UnknownModelError(f"no model {model[:200]!r} here: this server has {there}", "model")

    def end(self, path: str, outcome: str, state: Mapping[str, Any]) -> None:
        """Count a finished request. Called for every path."""
        if path in TEXT_PATHS:
            self.metrics.ended(outcome)
        if "reply_id" in state:
            self.history.end(state["reply_id"], outcome)

    async def answer_tokens(
        self, request: Request, body: TokenizeText | TokenizeChat | DetokenizeRequest | CountRequest
    ) -> Response:
        """Tokenize, count or detokenize. The tokenizing thread also serializes the reply, since it may be long."""
        self.adapter_of(body.model)
        content = await self._tokenized(request, lambda engine: body.reply(engine).model_dump_json(), body.source)
        return Response(content, media_type="application/json")

    async def _tokenized(self, request: Request, work: Callable[[Engine], T], field: str) -> T:
        """Run `work` on a tokenizing thread while the client is connected. `field`: the field to name in errors."""
        size = len(await request.body())
        try:
            return await while_connected(request.receive, self.tokenizing.run(work, size))
        except RequestError as error:
            if error.param is not None:
                raise
            raise RequestError(str(error), field) from error

    async def answer(self, request: Request, body: AnyRequest) -> Response:
        """A reply, or a stream that has not started yet."""
        adapter = self.adapter_of(body.model)
        params = body.params()
        if isinstance(body, (CompletionRequest, ChatRequest)):
            params = self.hidden_states.params(body, params)
        self._check_transfer(body)
        client = self.clients.client_of(request)
        if isinstance(body, ResponsesRequest) and body.previous_response_id is not None:
            body.go_on_with(self.conversations.find(body.previous_response_id, client))
        ticket = self.admission.enter(client, body.num_prompts, params.n)
        try:
            asked = await self._tokenized(request, body.prepare, body.source)
            for prompt in asked.prompts:
                self._check(prompt, params, body.source)
            reply_format = _DIALECTS[type(body)](
                self.model_name if adapter is None else adapter,
                self.texts,
                n=params.n,
                prompts=asked.prompts,
                block_tokens=self.engine.plan.options.block_tokens,
                with_ids=bool(body.return_token_ids),
                echoes=asked.echoes,
                repeated=body.repeated,
            )
            salt, transfer = body.cache_salt or "", body.kv_transfer_params
            batch = PromptBatch(
                reply_format.id, asked.prompts, params, salt, ticket, transfer, adapter, asked.conversation
            )
            self._begin(request, batch, body.prompt_cache_key)
            if body.stream:
                events = self._events(request, batch, reply_format, body.wants_usage)
                return EventStream(events, on_end=ticket.end, on_stop=reply_format.failure)
            results, written = await while_connected(request.receive, self._results(batch))
        except BaseException:
            ticket.end()
            raise
        self._note(request, batch, results)
        return Response(reply_format.whole(results, written).model_dump_json(), media_type="application/json")

    def _begin(self, request: Request, batch: PromptBatch, cache_key: str | None) -> None:
        """Put a request into the history. The middleware tells its end."""
        request.state.reply_id = batch.id
        entry = Entry(
            batch.id,
            request.state.request_id,
            caller_of(request).owner,
            request.url.path,
            self.model_name if batch.adapter is None else batch.adapter,
            sum(prompt.num_tokens for prompt in batch.prompts),
            [PromptEntry() for _ in batch.prompts],
            cache_key,
        )
        self.history.begin(entry)

    def _check_transfer(self, body: AnyRequest) -> None:
        """Refuse a transfer that cannot be had before anything is tokenized."""
        remote = self.engine.check_transfer(body.kv_transfer_params, body.num_prompts)
        if isinstance(remote, RemoteDecode) and body.stream:
            message = (
                "kv_transfer_params: do_remote_decode with stream: only a whole reply has them; set stream to false"
            )
            raise RequestError(message, "kv_transfer_params")

    async def _results(self, batch: PromptBatch) -> tuple[list[Result], Path | None]:
        """All results, and the file of hidden states, if they were asked for."""
        if not batch.params.hidden_layers:
            return await batch.results(self.engine), None
        async with self.hidden_states.place(batch.prompts[0], batch.params) as write:
            results = await batch.results(self.engine)
            return results, await write(results[0])

    def _check(self, prompt: Prompt, params: SamplingParams, field: str) -> None:
        try:
            self.engine.check_length(prompt.num_tokens)
        except RequestError as error:
            raise TooLongError(str(error), field) from error
        try:
            self.engine.check(prompt, params)
        except RequestError as error:
            if error.param != "hidden_layers":
                raise
            raise RequestError(str(error).replace(error.param, _LAYERS), _LAYERS) from error

    async def _events(
        self, request: Request, batch: PromptBatch, reply_format: ReplyFormat, wants_usage: bool
    ) -> AsyncGenerator[bytes]:
        """The events of a stream. Its status is sent before the first one, so later errors are sent as events."""
        results: dict[int, Result] = {}
        try:
            async with aclosing(batch.updates(self.engine)) as updates:
                async for number, update in updates:
                    if update.result is not None:
                        results[number] = update.result
                    if update.finish_reason not in (None, "stop", "length"):
                        continue  # sent below, once its error is known
                    for piece in reply_format.pieces(number, update):
                        yield reply_format.event(piece)
            ordered = [results[number] for number in sorted(results)]
            self._note(request, batch, ordered)
            reply_format.choices(ordered)
            for piece in reply_format.last_pieces(ordered, wants_usage=wants_usage):
                yield reply_format.event(piece)
        except HybridKVError as error:
            request.state.outcome = "failed"
            yield reply_format.failure(error)
            return
        yield reply_format.last_event

    def _note(self, request: Request, batch: PromptBatch, results: Sequence[Result]) -> None:
        """Record results for metrics, the log, and requests that go on with them."""
        if batch.conversation is not None and results[0].finish_reason in ("stop", "length"):
            reply = {"role": "assistant", "content": results[0].text}
            self.conversations.keep(batch.id, batch.ticket.client, [*batch.conversation, reply])
        self.metrics.finished(results)
        request.state.facts = {
            "prompt_tokens": sum(len(result.prompt_token_ids) for result in results),
            "cached_tokens": sum(result.cached_tokens for result in results),
            "reply_tokens": sum(len(one.token_ids) for result in results for one in result.completions),
            "ttft_s": round(max(result.metrics.ttft_s for result in results), 4),
            "finish": sorted({one.finish_reason for result in results for one in result.completions}),
            **_received(results),
        }


def _received(results: Sequence[Result]) -> dict[str, object]:
    """What came from a prefill worker, for the log."""
    received = results[0].received
    if received is None:
        return {}
    return {
        "received_tokens": received.num_tokens,
        "received_bytes": received.num_bytes,
        "received_descriptors": received.num_descriptors,
    }
