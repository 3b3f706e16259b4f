"""OpenAI's format of responses: replies, and the events of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from hybridkv.cache import Outcome
from hybridkv.engine import Completion, Result, Update
from hybridkv.errors import HybridKVError
from hybridkv.serve.failures import status_of
from hybridkv.serve.reply_format import ReplyFormat
from hybridkv.serve.streams import data_event


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int
    """Tokens that were computed, up to the last breakpoint that has a checkpoint."""


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesReply(BaseModel):
    """Reply of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: str
    """in_progress, completed, or incomplete at the limit of tokens."""
    error: None = None
    incomplete_details: dict[str, str] | None = None
    output: list[OutputMessage]
    usage: ResponsesUsage | None = None
    parallel_tool_calls: bool = False
    tool_choice: str = "none"
    tools: list[str] = []
    truncation: str = "disabled"
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class _Event(BaseModel):
    """An event of a stream."""

    model_config = {"extra": "allow"}

    type: str
    sequence_number: int


class ResponsesDialect(ReplyFormat):
    """`/v1/responses`. There is one prompt, with one reply."""

    prefix = "resp"
    last_event = b""
    _num_events = 0

    @property
    def _message_id(self) -> str:
        return self.id.replace(self.prefix, "msg", 1)

    def whole(self, results: Sequence[Result], hidden_states: Path | None = None) -> ResponsesReply:
        [(_, one)] = self.choices(results)
        status = "completed" if one.finish_reason == "stop" else "incomplete"
        return self._reply(status, [self._message(status, one.text)], _usage(results[0], one))

    def pieces(self, prompt: int, update: Update) -> list[BaseModel]:
        pieces: list[BaseModel] = []
        if not self._begun:
            self._begun.add(prompt)
            begun = self._reply("in_progress", [], None)
            pieces += [
                self._event("created", response=begun),
                self._event("in_progress", response=begun),
                self._event("output_item.added", output_index=0, item=self._message("in_progress", None)),
                self._part("content_part.added", part=OutputText(text="")),
            ]
        if update.text:
            pieces.append(self._part("output_text.delta", delta=update.text, logprobs=[]))
        return pieces

    def last_pieces(self, results: Sequence[Result], *, wants_usage: bool) -> list[BaseModel]:
        reply = self.whole(results)
        [message] = reply.output
        [text] = message.content
        return [
            self._part("output_text.done", text=text.text, logprobs=[]),
            self._part("content_part.done", part=text),
            self._event("output_item.done", output_index=0, item=message),
            self._event(reply.status, response=reply),
        ]

    def event(self, piece: BaseModel) -> bytes:
        assert isinstance(piece, _Event)
        return data_event(piece.model_dump_json(), piece.type)

    def failure(self, error: HybridKVError) -> bytes:
        code = "server_error" if status_of(error) >= 500 else "invalid_request_error"
        told = {"code": code, "message": str(error), "param": None}
        return self.event(_Event.model_validate({"type": "error", "sequence_number": self._count(), **told}))

    def _event(self, kind: str, **fields: Any) -> _Event:
        return _Event(type=f"response.{kind}", sequence_number=self._count(), **fields)

    def _part(self, kind: str, **fields: Any) -> _Event:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _count(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _message(self, status: str, text: str | None) -> OutputMessage:
        content = [] if text is None else [OutputText(text=text)]
        return OutputMessage(id=self._message_id, status=status, content=content)

    def _reply(self, status: str, output: list[OutputMessage], usage: ResponsesUsage | None) -> ResponsesReply:
        repeated: Mapping[str, Any] = self.repeated
        return ResponsesReply(
            id=self.id,
            created_at=self.created,
            model=self.model,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=output,
            usage=usage,
            **repeated,
        )


def _usage(result: Result, one: Completion) -> ResponsesUsage:
    assert result.record is not None
    kept = [account.kept_at for account in result.record.kept if account.outcome is Outcome.KEPT]
    size, reply = len(result.prompt_token_ids), len(one.token_ids)
    written = max(0, max(kept, default=0) - result.cached_tokens)
    return ResponsesUsage(
        input_tokens=size,
        input_tokens_details=InputTokensDetails(cached_tokens=result.cached_tokens, cache_write_tokens=written),
        output_tokens=reply,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=size + reply,
    )
