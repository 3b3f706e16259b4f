"""OpenAI's fields about the prompt cache, and the breakpoints that they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hybridkv.chats import Joined, Part, join_parts, parse_lifetime
from hybridkv.engine import Prompt

_IN_MEMORY = ("in_memory", "in-memory")
"""Values of `prompt_cache_retention` that ask for nothing."""


class CacheBreakpoint(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    mode: Literal["explicit"] = "explicit"
    ttl: str | None = Field(None, description="Such as 30m or 12h: a hint for what is evicted first.")


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(None, description="A breakpoint at the end of this part.")


class CacheOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    mode: Literal["implicit", "explicit"] = Field("implicit", description="explicit: none after messages.")
    ttl: str | None = Field(None, description="Such as 30m: a hint for what is evicted first, of all breakpoints.")


class CacheFields(BaseModel):
    """Fields of a request. They are hints: none of them changes the reply."""

    prompt_cache_key: str | None = Field(None, max_length=1024, description="Shown in the record of the request.")
    prompt_cache_retention: str | None = Field(None, description="in_memory, or a time such as 24h; as options.ttl.")
    prompt_cache_options: CacheOptions | None = None

    @property
    def has_ends(self) -> bool:
        """Whether the ends of messages are breakpoints."""
        return self.prompt_cache_options is None or self.prompt_cache_options.mode == "implicit"

    def with_lifetimes(self, prompt: Prompt) -> Prompt:
        """The prompt, with the lifetime of the request for breakpoints that have none of their own."""
        lifetime_s = self._lifetime_s()
        if lifetime_s is None:
            return prompt
        return Prompt(
            prompt.ids, prompt.breakpoints, {**dict.fromkeys(prompt.breakpoints, lifetime_s), **dict(prompt.lifetimes)}
        )

    def _lifetime_s(self) -> float | None:
        if self.prompt_cache_options is not None and self.prompt_cache_options.ttl is not None:
            return parse_lifetime(self.prompt_cache_options.ttl, "prompt_cache_options.ttl")
        if self.prompt_cache_retention is None or self.prompt_cache_retention in _IN_MEMORY:
            return None
        return parse_lifetime(self.prompt_cache_retention, "prompt_cache_retention")


def joined(content: str | Sequence[ContentPart] | None, place: str, kinds: Sequence[str] = ("text",)) -> Joined:
    """The text of a content, with its breakpoints. `place`: its name in errors. `kinds`: types of parts with text."""
    if content is None or isinstance(content, str):
        return Joined(content or "")
    return join_parts((_part(part, f"{place}.{number}") for number, part in enumerate(content)), place, kinds)


def _part(part: ContentPart, place: str) -> Part:
    named = part.prompt_cache_breakpoint
    if named is None:
        return Part(part.type, part.text)
    ttl = None if named.ttl is None else parse_lifetime(named.ttl, f"{place}.prompt_cache_breakpoint.ttl")
    return Part(part.type, part.text, True, ttl)
