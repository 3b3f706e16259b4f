"""Breakpoints that clients name in a chat: from places in messages and tools to positions in the rendered text.

Templates are programs: what they write for a message is found by rendering the chat again.

    inside a content   every place gets a word that occurs nowhere else; without these words the text must be the same
    after a message    where the text leaves that of the chat up to this message
    after a tool       where the text leaves that of the chat with the tools up to this one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv.errors import RequestError

Message = Mapping[str, Any]
Write = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Render messages with template options."""

TOOLS = -1
"""Stands for the index of a message in marks of tools."""
_CLOSED = {"add_generation_prompt": False, "continue_final_message": False}
_LAST_TOOL = {"type": "function", "function": {"name": "q", "description": "q", "parameters": {"type": "object"}}}
"""Follows the last tool, to find its end."""


class Mark(NamedTuple):
    """A breakpoint that a client names."""

    message: int
    """Index of the message, or TOOLS."""
    place: int | None = None
    """Number of characters of the message's content before it; None: the end of the message. Number of tools before it,
    for TOOLS."""
    lifetime_s: float | None = None
    """How long the client would like to have it kept; None: it does not say."""


def find_marks(
    write: Write, messages: Sequence[Message], options: Mapping[str, Any], text: str, marks: Sequence[Mark]
) -> list[int]:
    """The position of each mark in `text`, which is what `write` makes of the messages with these options."""
    inside = _inside_contents(write, messages, options, text, marks)
    found = []
    for mark in marks:
        position = inside.get(mark)
        if position is None:
            position = _common(text, _text_up_to(write, messages, options, mark, text))
        found.append(position)
    return found


def _inside_contents(
    write: Write, messages: Sequence[Message], options: Mapping[str, Any], text: str, marks: Sequence[Mark]
) -> dict[Mark, int]:
    """Positions of marks inside contents. Empty if words in these contents change what the template writes."""
    inner = [mark for mark in dict.fromkeys(marks) if mark.message != TOOLS and mark.place is not None]
    inner.sort(key=lambda mark: mark[:2], reverse=True)
    if not inner:
        return {}
    word = "qzmark"
    while word in text:
        word += "q"
    marked = [dict(message) for message in messages]
    words = {mark: f"{word}{number}z" for number, mark in enumerate(inner)}
    for mark, one in words.items():  # the last place first: places before it stay
        content = marked[mark.message]["content"]
        marked[mark.message]["content"] = content[: mark.place] + one + content[mark.place :]
    try:
        written = write(marked, options)
    except RequestError:
        return {}
    starts = {mark: written.find(one) for mark, one in words.items()}
    found, removed = {}, 0
    for mark in sorted(inner, key=lambda mark: starts[mark]):
        found[mark] = starts[mark] - removed
        removed += len(words[mark])
    for one in words.values():
        written = written.replace(one, "", 1)
    return found if min(starts.values()) >= 0 and written == text else {}


def _text_up_to(write: Write, messages: Sequence[Message], options: Mapping[str, Any], mark: Mark, text: str) -> str:
    """A text that leaves `text` at the mark."""
    if mark.message == TOOLS:
        return _text_up_to_tool(write, messages, options, mark.place or 0, text)
    head = [*messages[: mark.message], messages[mark.message]]
    if mark.place is not None:
        head[-1] = {**head[-1], "content": head[-1]["content"][: mark.place]}
    try:
        return write(head, {**options, **_CLOSED})
    except RequestError:
        return _with_other_question(write, head, messages[mark.message + 1 :], options)


def _with_other_question(
    write: Write, head: Sequence[Message], rest: Sequence[Message], options: Mapping[str, Any]
) -> str:
    """The chat up to a message that cannot be the last one, and then a question that begins with another letter."""
    begin = str(rest[0].get("content", ""))[:1] if rest else ""
    question = {"role": "user", "content": "1" if begin == "0" else "0"}
    try:
        return write([*head, question], {**options, **_CLOSED})
    except RequestError:
        return ""


def _text_up_to_tool(
    write: Write, messages: Sequence[Message], options: Mapping[str, Any], count: int, text: str
) -> str:
    tools = list(options.get("tools") or ())
    user = next((number for number, message in enumerate(messages) if message.get("role") == "user"), 0)
    head, fixed = messages[: user + 1], {**options, **_CLOSED}
    try:
        return write(head, {**fixed, "tools": tools[:count] if count < len(tools) else [*tools, _LAST_TOOL]})
    except RequestError:
        return ""


def _common(one: str, other: str) -> int:
    """Number of characters that two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
