"""Chat messages as clients send them, and the prompt that the chat template makes of them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridkv.chats import NEED_CONTENT, Joined, check_template_options, missing_content
from hybridkv.engine import Engine, Prompt
from hybridkv.serve.cache_fields import ContentPart, joined

MAX_MESSAGES = 4096
MAX_BREAKPOINTS = 64
"""Of the breakpoints that a request names in its messages, the last ones are taken."""


class ChatMessage(BaseModel):
    """A chat message. Further fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role in NEED_CONTENT:
            raise ValueError(missing_content(self.role))
        return self

    def for_template(self, number: int) -> dict[str, Any]:
        """The message as the chat template gets it. `number`: index of the message, from 0."""
        return {**(self.model_extra or {}), "role": self.role, "content": self.joined(number).text}

    def joined(self, number: int) -> Joined:
        return joined(self.content, f"messages.{number}.content")


class ChatPrompt(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    source: ClassVar[str] = "messages"
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool | None = Field(
        None, description="End with the beginning of a reply. Default: true, unless the last message is continued."
    )
    continue_final_message: bool | None = Field(None, description="Leave the last message open: the reply goes on.")
    add_special_tokens: bool | None = Field(
        None, description="Add those that the tokenizer puts around texts to those of the template. Default: false."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="What else the chat template knows.")

    def render(self, engine: Engine, *, has_ends: bool = True) -> Prompt:
        """The prompt, with the breakpoints that the messages name. `has_ends`: and those after messages."""
        check_template_options(self.chat_template_kwargs or {})
        marks = [mark for number, one in enumerate(self.messages) for mark in one.joined(number).marks_of(number)]
        continues, adds = bool(self.continue_final_message), self.add_generation_prompt
        return engine.render_chat(
            [message.for_template(number) for number, message in enumerate(self.messages)],
            add_generation_prompt=not continues if adds is None else adds,
            continue_final_message=continues,
            add_special_tokens=bool(self.add_special_tokens),
            chat_template_kwargs=self.chat_template_kwargs,
            marks=marks[-MAX_BREAKPOINTS:],
            has_ends=has_ends,
        )
