"""Reply records in OpenAI's format. They know neither the engine nor HTTP."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """Reply of `/v1/completions`, or one piece of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """vLLM's name for where a client finds what was kept for it: hidden states, or a prompt for a decode worker."""


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """None for a token that is only a part of a character."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatReply(BaseModel):
    """Reply of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """vLLM's name for where a client finds what was kept for it: hidden states, or a prompt for a decode worker."""


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One piece of a stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hybridkv"
    root: str
    parent: str | None = None
    """Of an adapter: the model that it adapts."""
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    prompt: str


class Health(BaseModel):
    status: str


class ResetReply(BaseModel):
    reset: bool


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Body of every reply with a status of 400 or above."""

    error: ErrorDetail


class LinkCard(BaseModel):
    """The link of a server with a role."""

    role: str
    engine_id: str
    host: str
    port: int | None
    """Other engines call it here; None for role decode, which only calls."""
