"""Renders chat messages to tokens, with breakpoints where a conversation may continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv.chats.marks import Mark, Message, find_marks
from hybridkv.errors import RequestError
from hybridkv.texts import has_bytes

_LAST_ENDS = 7
"""Number of last messages whose ends are breakpoints, besides the first one. Earlier requests covered older ones."""


class ChatText(NamedTuple):
    """Messages as the chat template writes them."""

    text: str
    ends: list[int]
    """Text positions at which messages end, in order."""


class ChatTokens(NamedTuple):
    """The tokens of a chat."""

    token_ids: list[int]
    breakpoints: list[int]
    """Token positions at which messages end, in order."""


def check_text(text: str) -> str:
    """Return the text, or raise for half a surrogate pair: it has no UTF-8 bytes, and tokenizers' errors are vague."""
    if not has_bytes(text):
        raise RequestError("the prompt has bytes that are no text: it must be UTF-8")
    return text


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    options: Mapping[str, Any] | None = None,
) -> ChatTokens:
    """Render messages with the tokenizer's chat template. The ends of the first and the last ones are breakpoints.

    Some templates write a message differently when others follow it. Only ends that match the whole text become
    breakpoints. `continue_final_message`: the text ends with the last message's content, without what the template
    writes after it. `add_special_tokens`: add the tokenizer's special tokens to those of the template. `options`:
    passed to the template.
    """
    chat = write_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        options=options,
    )
    return tokenize_chat(tokenizer, chat, add_special_tokens=add_special_tokens)


def render_marked(
    tokenizer: Any,
    messages: Sequence[Message],
    marks: Sequence[Mark],
    *,
    has_ends: bool = True,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    options: Mapping[str, Any] | None = None,
) -> tuple[ChatTokens, dict[int, float]]:
    """Render messages as `render_chat` does, with the breakpoints that a client names.

    `has_ends`: whether the ends of messages are breakpoints, too. Returns the tokens, and by breakpoint the longest
    lifetime that the client gives it, if any.
    """
    fixed = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    chat = write_chat(tokenizer, messages, options=options, has_ends=has_ends, **fixed)
    asked = {**(options or {}), **fixed}
    found = find_marks(lambda some, named: apply_template(tokenizer, some, named), messages, asked, chat.text, marks)
    places = sorted({*chat.ends, *found})
    tokens = tokenize_chat(tokenizer, chat._replace(ends=places), add_special_tokens=add_special_tokens)
    by_place = dict(zip(places, tokens.breakpoints, strict=False))  # a tokenizer that is not fast finds none
    lifetimes: dict[int, float] = {}
    for place, mark in zip(found, marks, strict=True):
        if mark.lifetime_s is not None and place in by_place:
            position = by_place[place]
            lifetimes[position] = max(mark.lifetime_s, lifetimes.get(position, 0.0))
    return tokens, lifetimes


def write_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    options: Mapping[str, Any] | None = None,
    has_ends: bool = True,
) -> ChatText:
    """The text of a chat and the ends of its messages, as `render_chat` tokenizes them.

    `has_ends`: False finds no ends.
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
    text = check_text(apply_template(tokenizer, messages, {**(options or {}), **fixed}))
    ends = []
    for count in counts_with_ends(len(messages)) if has_ends else ():
        try:
            start = apply_template(tokenizer, messages[:count], {**(options or {}), "add_generation_prompt": False})
        except RequestError:
            continue  # a template that requires alternating roles may refuse a part
        if text.startswith(start):
            ends.append(len(start))
    return ChatText(text, ends)


def counts_with_ends(num_messages: int) -> list[int]:
    """Numbers of messages of a chat after which breakpoints are set. The whole chat has none at its end."""
    return sorted({1, *range(max(1, num_messages - _LAST_ENDS), num_messages)} - {num_messages})


def tokenize_chat(tokenizer: Any, chat: ChatText, *, add_special_tokens: bool = False) -> ChatTokens:
    """Tokenize a text, and find the tokens at which its messages end. Only fast tokenizers know where tokens lie."""
    encoded = tokenizer(
        chat.text, add_special_tokens=add_special_tokens, return_offsets_mapping=bool(tokenizer.is_fast)
    )
    token_ids: list[int] = encoded["input_ids"]
    return ChatTokens(token_ids, _token_positions(encoded.get("offset_mapping", []), chat.ends))


def apply_template(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The text of messages. Raises RequestError if the template refuses them."""
    plain = [dict(message) for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(plain, **{**options, "tokenize": False})
    except Exception as error:  # templates are third-party code
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return text


def _token_positions(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """Number of tokens that end at or before each of the given text positions. Without offsets there are none."""
    positions, token = [], 0
    for end in ends if offsets else ():
        while token < len(offsets) and offsets[token][1] <= end:
            token += 1
        positions.append(token)
    return positions
