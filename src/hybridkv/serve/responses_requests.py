"""Request bodies of `/v1/responses`, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from hybridkv.chats import Mark
from hybridkv.engine import Engine, SamplingParams
from hybridkv.engine.sampling.params import MAX_TEMPERATURE, MAX_TOKEN_ID
from hybridkv.errors import RequestError
from hybridkv.serve.cache_fields import CacheFields, ContentPart, joined
from hybridkv.serve.conversations import Messages
from hybridkv.serve.messages import MAX_BREAKPOINTS, MAX_MESSAGES
from hybridkv.serve.requests import Asked
from hybridkv.serve.unsupported import check_extras

_TEXTS = ("input_text", "output_text", "text")
"""Types of parts with text."""


class InputMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text"] = "text"


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    format: TextFormat | None = None


class ResponsesRequest(CacheFields):
    """Body of `/v1/responses`."""

    model_config = ConfigDict(extra="allow", strict=True)

    source: ClassVar[str] = "input"
    num_prompts: ClassVar[int] = 1
    wants_usage: ClassVar[bool] = True
    return_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    model: str | None = Field(None, description="The served model's name, or an adapter's; may be left out.")
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="A text, or messages with contents of type input_text and output_text."
    )
    instructions: str | None = Field(None, description="The system message. Not part of what the next response gets.")
    previous_response_id: str | None = Field(None, max_length=256, description="Go on with this response.")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID, description="Default: the model's limit.")
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextOptions | None = None
    store: bool | None = Field(None, description="Keep it for previous_response_id. Default: true.")
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    cache_salt: str | None = Field(
        None, max_length=1024, description="Requests with different salts never share anything in the cache."
    )
    _previous: Messages = PrivateAttr(default=())

    def go_on_with(self, previous: Messages) -> None:
        """Set the conversation that `previous_response_id` names."""
        self._previous = previous

    def params(self) -> SamplingParams:
        check_extras(self.model_extra or {}, known=type(self).model_fields)
        named = {"temperature": self.temperature, "top_p": self.top_p}
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        return SamplingParams(max_tokens=self.max_output_tokens, **given)

    def prepare(self, engine: Engine) -> Asked:
        """The prompt. What came before it ends at a breakpoint."""
        head: list[Mapping[str, Any]] = []
        if self.instructions is not None:
            head.append({"role": "system", "content": self.instructions})
        head += self._previous
        marks = [Mark(len(head) - 1)] if self._previous else []
        messages = list(head)
        for number, one in enumerate(self._input()):
            content = joined(one.content, f"input.{number}.content", _TEXTS)
            marks += content.marks_of(len(messages))
            messages.append({"role": _role(one, number), "content": content.text})
        prompt = engine.render_chat(messages, marks=marks[-MAX_BREAKPOINTS:], has_ends=self.has_ends)
        kept = None if self.store is False else messages[len(head) - len(self._previous) :]
        return Asked([self.with_lifetimes(prompt)], conversation=kept)

    def _input(self) -> list[InputMessage]:
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def repeated(self) -> dict[str, Any]:
        """Fields that the reply repeats."""
        names = (
            "instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "metadata",
            "prompt_cache_key", "prompt_cache_retention",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def _role(message: InputMessage, number: int) -> str:
    place = f"input.{number}"
    if message.type not in (None, "message"):
        raise RequestError(f"{place} is of type {message.type[:80]!r}: only messages are served", f"{place}.type")
    if message.role is None:
        raise RequestError(f"{place}.role is missing: it is required", f"{place}.role")
    return "system" if message.role == "developer" else message.role
