"""Finds messages in a text that a chat template has written.

What the template writes around messages is learned from short conversations:

    opening     content         joint              content      joint ...
    <bos><user> How are you? <end><assistant>      Fine.   <end><user> ...
                                ^ the end of the message

A text is cut at the joints, and the messages are rendered again. If that gives the same text, its ends are those that
`write_chat` sets. Otherwise (another version of the template, another date in it) they are the ends at the joints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv.chats.rendering import ChatText, apply_template, counts_with_ends, write_chat
from hybridkv.errors import RequestError

_CONVERSATIONS = (
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "tool", "tool", "assistant", "user"),
    ("user", "assistant", "system", "user"),
)
_OPTIONS: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Options of templates that change how a reply begins."""


class _Joint(NamedTuple):
    """What is written between the contents of two messages."""

    end: int | None
    """Where in it the first message ends; None: the template joins these messages to one."""
    next_role: str


class _Message(NamedTuple):
    role: str | None
    """None: the text begins with something unknown."""
    content: str
    end: int | None
    """In the whole text. None: not known, or there is no more text."""


class ChatStyle:
    """What a tokenizer's chat template writes around messages."""

    def __init__(self, tokenizer: Any) -> None:
        """Without a chat template, nothing is recognised."""
        self._tokenizer = tokenizer
        self._openings: dict[str, str] = {}
        """The role of the first message, by what is written before it."""
        self._after: dict[str, str] = {}
        """By role: what is written after a message that is the last one."""
        self._joints: dict[str | None, dict[str, _Joint]] = {None: {}}
        """By the role before it, or None for any role."""
        self._replies: dict[str, Mapping[str, Any]] = {}
        """How a reply may begin, and the options that make it begin so."""
        if getattr(tokenizer, "chat_template", None):
            before: dict[str, str] = {}
            for roles in _CONVERSATIONS:
                self._learn(roles, before)
            self._combine(before)
            self._learn_replies()
        longest_first = {role: sorted(joints, key=len, reverse=True) for role, joints in self._joints.items()}
        self._patterns = {
            role: re.compile("|".join(map(re.escape, texts))) for role, texts in longest_first.items() if texts
        }

    def find(self, text: str) -> ChatText:
        """The text, with the ends that `write_chat` would set for its messages."""
        messages = self._cut(text)
        if len(messages) < 2:
            return ChatText(text, [])
        last, mode = self._last(text, messages)
        messages[-1:] = [] if last is None else [last]
        if all(message.role is not None for message in messages):
            plain = [{"role": message.role, "content": message.content} for message in messages]
            try:
                chat = write_chat(self._tokenizer, plain, **mode)
            except RequestError:
                pass
            else:
                if chat.text == text:
                    return chat
        ends = [messages[count - 1].end for count in counts_with_ends(len(messages))]
        return ChatText(text, [end for end in ends if end is not None])

    # --- cutting a text -----------------------------------------------------------------------------------------------

    def _cut(self, text: str) -> list[_Message]:
        """All messages; the last one with what follows it."""
        opening = max((opening for opening in self._openings if text.startswith(opening)), key=len, default=None)
        role, start = (None, 0) if opening is None else (self._openings[opening], len(opening))
        messages = []
        while (pattern := self._patterns.get(role)) is not None and (found := pattern.search(text, start)):
            joint = self._joints[role][found.group()]
            end = None if joint.end is None else found.start() + joint.end
            messages.append(_Message(role, text[start : found.start()], end))
            role, start = joint.next_role, found.end()
        return [*messages, _Message(role, text[start:], None)]

    def _last(self, text: str, messages: Sequence[_Message]) -> tuple[_Message | None, dict[str, Any]]:
        """The last message without what follows it, and how to render it. None: it is empty."""
        role, content, _ = messages[-1]
        after = self._after.get(role or "", "")
        before = messages[-2].end
        if before == len(text):
            return None, {"add_generation_prompt": False}
        for reply, options in self._replies.items():
            mode = {"add_generation_prompt": True, "options": options}
            if before is not None and text[before:] == reply:
                return None, mode
            if content.endswith(after + reply):
                return _Message(role, content.removesuffix(after + reply), None), mode
        if after and content.endswith(after):
            return _Message(role, content.removesuffix(after), None), {"add_generation_prompt": False}
        return messages[-1], {"add_generation_prompt": False, "continue_final_message": True}

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, roles: Sequence[str], before: dict[str, str]) -> None:
        """Learn from one conversation. `before`: by role, what is written before a message that follows another."""
        messages = _conversation(roles)
        try:
            text = self._write(messages)
        except RequestError:
            return  # the template does not know these roles, or not in this order
        contents = [message["content"] for message in messages]
        starts = [text.find(content) for content in contents]
        if -1 in starts or starts != sorted(starts):
            return
        self._openings.setdefault(text[: starts[0]], roles[0])
        for number, (role, content) in enumerate(zip(roles, contents, strict=True)):
            after = self._written_after(messages[: number + 1])
            if after is not None:
                self._after.setdefault(role, after)
            if number + 1 < len(roles):
                joint = text[starts[number] + len(content) : starts[number + 1]]
                end = len(after) if after is not None and joint.startswith(after) else None
                self._add(role, joint, _Joint(end, roles[number + 1]))
                if end is not None:
                    before.setdefault(roles[number + 1], joint[end:])

    def _combine(self, before: Mapping[str, str]) -> None:
        """Add joints of roles that no conversation above has side by side."""
        for role, after in self._after.items():
            for next_role, start in before.items():
                self._add(role, after + start, _Joint(len(after), next_role))

    def _add(self, role: str, text: str, joint: _Joint) -> None:
        """A joint of nothing but space could be anywhere in a content: it is left out."""
        if text.strip():
            self._joints.setdefault(role, {}).setdefault(text, joint)
            self._joints[None].setdefault(text, joint)

    def _learn_replies(self) -> None:
        messages = _conversation(_CONVERSATIONS[0])
        for options in _OPTIONS:
            try:
                closed = self._write(messages, **options)
                opened = self._write(messages, **options, add_generation_prompt=True)
            except RequestError:
                continue
            if opened.startswith(closed) and opened != closed:
                self._replies.setdefault(opened.removeprefix(closed), options)

    def _written_after(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """What follows the content of the last message. None: such a conversation cannot end here."""
        try:
            _, content, after = self._write(messages).rpartition(messages[-1]["content"])
        except RequestError:
            return None
        return after if content else None

    def _write(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        return apply_template(self._tokenizer, messages, {"add_generation_prompt": False, **options})


def _conversation(roles: Sequence[str]) -> list[dict[str, str]]:
    """Messages with contents that occur nowhere else."""
    return [{"role": role, "content": f"content{number}of{role}"} for number, role in enumerate(roles)]
