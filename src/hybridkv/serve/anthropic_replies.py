"""Reply records in Anthropic's format. They know neither the engine nor HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class TokenCount(BaseModel):
    """Reply of `/v1/messages/count_tokens`."""

    input_tokens: int


class CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class AnthropicUsage(BaseModel):
    input_tokens: int
    """Tokens of the prompt that were neither read from the cache nor kept up to a breakpoint."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class AnthropicText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class AnthropicReply(BaseModel):
    """Reply of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnthropicText]
    stop_reason: str | None
    """end_turn, max_tokens or stop_sequence; None at the beginning of a stream."""
    stop_sequence: str | None
    usage: AnthropicUsage


class StreamEvent(BaseModel):
    """An event of a stream, which is sent under the name of its type."""

    type: str


class MessageStart(StreamEvent):
    type: Literal["message_start"] = "message_start"
    message: AnthropicReply


class BlockStart(StreamEvent):
    type: Literal["content_block_start"] = "content_block_start"
    index: int = 0
    content_block: AnthropicText


class TextDelta(BaseModel):
    type: Literal["text_delta"] = "text_delta"
    text: str


class BlockDelta(StreamEvent):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int = 0
    delta: TextDelta


class BlockStop(StreamEvent):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int = 0


class StopDelta(BaseModel):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(StreamEvent):
    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(StreamEvent):
    type: Literal["message_stop"] = "message_stop"


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """Body of every reply with a status of 400 or above."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None = None
