"""Chat messages as clients send them, and the prompt that the chat template makes of them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridkv.chats import NEED_CONTENT, Part, check_template_options, join_parts, missing_content
from hybridkv.engine import Engine, Prompt

MAX_MESSAGES = 4096


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


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
        return {**(self.model_extra or {}), "role": self.role, "content": self._text(f"messages.{number}.content")}

    def _text(self, place: str) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        return join_parts((Part(part.type, part.text) for part in self.content), place).text


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

    def render(self, engine: Engine) -> Prompt:
        check_template_options(self.chat_template_kwargs or {})
        continues, adds = bool(self.continue_final_message), self.add_generation_prompt
        return engine.render_chat(
            [message.for_template(number) for number, message in enumerate(self.messages)],
            add_generation_prompt=not continues if adds is None else adds,
            continue_final_message=continues,
            add_special_tokens=bool(self.add_special_tokens),
            chat_template_kwargs=self.chat_template_kwargs,
        )
