"""Chat messages as clients send them: what is checked, and what the chat template gets."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv.chats.marks import Mark
from hybridkv.errors import RequestError

NEED_CONTENT = frozenset(("developer", "system", "user"))
"""Roles whose messages must have a content."""
_NO_TEMPLATE_OPTIONS = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self",
        "tokenize", "tokenizer_kwargs", "truncation",
    )
)  # fmt: skip
"""Template options that clients must not set: rendering sets them. One is a template, a program that may never end."""


def check_template_options(options: Mapping[str, object]) -> None:
    """Refuse options that would not reach the chat template, or not unchanged."""
    for name in options:
        if name in _NO_TEMPLATE_OPTIONS:
            message = f"chat_template_kwargs has {name}, which is not the template's to know: leave it out"
            raise RequestError(message, "chat_template_kwargs")


class Part(NamedTuple):
    """A part of a content, as clients of any API send it."""

    kind: str
    text: str | None
    is_marked: bool = False
    """Whether the client names a breakpoint at its end."""
    lifetime_s: float | None = None
    """Of the breakpoint, as in `Mark`."""


class Joined(NamedTuple):
    """A content in parts as one text."""

    text: str
    marks: Sequence[tuple[int | None, float | None]] = ()
    """Of each breakpoint: the characters before it, or None at the end of the content; its lifetime."""

    def marks_of(self, message: int) -> list[Mark]:
        """The breakpoints, in the message of this index."""
        return [Mark(message, place, lifetime_s) for place, lifetime_s in self.marks]


def join_parts(parts: Iterable[Part], place: str, kinds: Container[str] = ("text",)) -> Joined:
    """The text of a content that is given in parts. `place`: the content's name in errors. `kinds`: types of texts."""
    text, marks, known = "", [], list(parts)
    for number, part in enumerate(known):
        name = f"{place}.{number}"
        if part.kind not in kinds:
            raise RequestError(f"{name} is a part of type {part.kind[:80]!r}: only text is served", name)
        if part.text is None:
            raise RequestError(f"{name} is a part without a text: give it one", f"{name}.text")
        text += part.text
        if part.is_marked:
            marks.append((None if number + 1 == len(known) else len(text), part.lifetime_s))
    return Joined(text, marks)


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIFETIME = re.compile(r"([1-9]\d{0,5})([smhd])", re.ASCII)


def parse_lifetime(text: str, place: str) -> float:
    """Seconds of a lifetime such as 5m or 1h. `place`: its name in errors."""
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise RequestError(f"{place} is {text[:40]!r}: pass a time such as 30s, 5m, 1h or 1d", place)
    return float(int(found[1]) * _UNITS_S[found[2]])


def missing_content(role: str) -> str:
    """What is wrong with a message of this role that has no content."""
    return f"a message of role {role!r} has no content: give it a text"


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Messages from JSON as the chat template gets them, by the rules of the server."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is not a list of messages: give each a role and a content", "messages")
    return [_read_message(message, f"messages.{number}") for number, message in enumerate(messages)]


def _read_message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} is a {type(message).__name__}: give an object with a role and a content", place)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{place}.role is {role!r:.40}: name one, such as 'user'", f"{place}.role")
    if content is None and role in NEED_CONTENT:
        raise RequestError(f"{place}: {missing_content(role)}", f"{place}.content")
    return {**message, "content": _read_content(content, f"{place}.content")}


def _read_content(content: object, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{place} is a {type(content).__name__}: give a text, or a list of parts", place)
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(kind, str) or not isinstance(text, str | None):
            wanted = 'give an object such as {"type": "text", "text": "..."}'
            raise RequestError(f"{place}.{number} is no part of a content: {wanted}", f"{place}.{number}")
        parts.append(Part(kind, text))
    return join_parts(parts, place).text
