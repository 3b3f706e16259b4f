"""Renders chat messages to tokens, with breakpoints where a conversation may continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridkv.engine.prompts import Prompt
from hybridkv.errors import RequestError

Message = Mapping[str, Any]


def check_text(text: str) -> str:
    """Return the text, or raise for half a surrogate pair: it has no UTF-8 bytes, and tokenizers' errors are vague."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the prompt has bytes that are no text: it must be UTF-8") from None
    return text


_LAST_ENDS = 7
"""Number of last messages whose ends are breakpoints, besides the first one. Earlier requests covered older ones."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render messages with the tokenizer's chat template. The ends of the first and the last ones are breakpoints.

    Some templates write a message differently when others follow it. Only ends that match the whole text become
    breakpoints. `continue_final_message`: the text ends with the last message's content, without what the template
    writes after it. `add_special_tokens`: add the tokenizer's special tokens to those of the template. `options`:
    passed to the template.
    """
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages or ()):
        raise RequestError("a chat is a list of messages, each with 'role' and 'content': pass one")
    if not messages:
        raise RequestError("a chat needs at least one message")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template: pass a plain prompt")
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message with add_generation_prompt: a new message cannot follow one that is continued"
        raise RequestError(f"{message}; leave one of both out", "continue_final_message")
    fixed = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    text = check_text(_render(tokenizer, messages, {**(options or {}), **fixed}))
    ends = []
    for count in sorted({1, *range(max(1, len(messages) - _LAST_ENDS), len(messages))} - {len(messages)}):
        try:
            start = _render(tokenizer, messages[:count], {**(options or {}), "add_generation_prompt": False})
        except RequestError:
            continue  # a template that requires alternating roles may refuse a part
        if text.startswith(start):
            ends.append(len(start))
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=bool(tokenizer.is_fast))
    token_ids: list[int] = encoded["input_ids"]
    offsets = encoded.get("offset_mapping", [])
    return Prompt(token_ids, _token_positions(offsets, ends))


def _render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    plain = [dict(message) for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(plain, **{**options, "tokenize": False})
    except Exception as error:  # templates are third-party code
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return text


def _token_positions(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """Number of tokens that end at or before each of the given text positions."""
    positions, token = [], 0
    for end in ends:
        while token < len(offsets) and offsets[token][1] <= end:
            token += 1
        positions.append(token)
    return positions
