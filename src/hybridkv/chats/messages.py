"""Chat messages as clients send them: what is checked, and what the chat template gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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


def join_parts(parts: Iterable[tuple[str, str | None]], place: str) -> str:
    """The text of a content that is given in parts, each a type and a text. `place`: the content's name in errors."""
    texts = []
    for number, (kind, text) in enumerate(parts):
        name = f"{place}.{number}"
        if kind != "text":
            raise RequestError(f"{name} is a part of type {kind[:80]!r}: only text is served", name)
        if text is None:
            raise RequestError(f"{name} is a part without a text: give it one", f"{name}.text")
        texts.append(text)
    return "".join(texts)


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
        parts.append((kind, text))
    return join_parts(parts, place)
