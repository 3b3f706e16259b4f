"""Messages in rendered texts: their ends are those that rendering the messages gives, in every style of template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from hybridkv.chats import ChatStyle, tokenize_chat, write_chat
from hybridkv.errors import RequestError
from tests.chats.templates import (
    CHATML,
    CHATML_THINKING,
    CHATML_TOOLS,
    GEMMA,
    LLAMA_3_1,
    MISTRAL_LAST_SYSTEM,
    PLAIN,
    STYLES,
    tokenizer,
)

WORDS = [
    "what",
    "is",
    "the weather",
    "?",
    "\n",
    "\n\n",
    "[1]",
    "é",
    "<b>",
    "user",
    "assistant",
    "def f():",
    "🙂",
    "end.",
]


def chat(rng: random.Random, roles: Sequence[str]) -> list[dict[str, Any]]:
    def content() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 12))).strip() or "yes"

    return [{"role": role, "content": content()} for role in roles]


def turns(num_messages: int, *, system: bool = False) -> list[str]:
    """Users and assistants in turn, after a system message."""
    first = ["system"] if system else []
    return first + [("user", "assistant")[number % 2] for number in range(num_messages)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("num_messages", [1, 2, 3, 4, 7, 8, 9, 10, 23])
def test_ends_are_those_of_the_messages(style: str, system: bool, num_messages: int) -> None:
    own = tokenizer(STYLES[style])
    found, rng = ChatStyle(own), random.Random(num_messages)
    messages = chat(rng, turns(num_messages, system=system))
    modes: list[dict[str, Any]] = [{"add_generation_prompt": True}, {"add_generation_prompt": False}]
    modes += [{"add_generation_prompt": False, "continue_final_message": True}] if num_messages % 2 == 0 else []
    for mode in modes:
        try:
            written = write_chat(own, messages, **mode)
        except RequestError:
            assert system  # this template knows none
            return
        if system and STYLES[style] in (GEMMA, MISTRAL_LAST_SYSTEM):
            continue  # the system message is a part of another one: see below
        assert found.find(written.text) == written
        assert tokenize_chat(own, found.find(written.text)) == tokenize_chat(own, written)


def test_a_system_message_that_the_template_joins_with_another_is_not_seen() -> None:
    own = tokenizer(GEMMA)
    system, *others = chat(random.Random(0), turns(5, system=True))
    written = write_chat(own, [system, *others])
    assert written.ends[0] == len("<s>")
    assert ChatStyle(own).find(written.text).ends == written.ends[1:]
    own = tokenizer(MISTRAL_LAST_SYSTEM)
    written = write_chat(own, [system, *others])
    assert set(written.ends[1:]) < set(ChatStyle(own).find(written.text).ends)


def test_ends_of_the_first_and_the_last_messages() -> None:
    own = tokenizer(CHATML)
    written = write_chat(own, chat(random.Random(0), turns(23)))
    assert len(ChatStyle(own).find(written.text).ends) == 8
    assert written.text[: written.ends[0]].count("<|im_end|>") == 1
    assert [written.text[:end].count("<|im_end|>") for end in written.ends[1:]] == list(range(16, 23))


@pytest.mark.parametrize("template", [CHATML_TOOLS, CHATML_THINKING, LLAMA_3_1])
@pytest.mark.parametrize("system", [False, True])
def test_results_of_tools(template: str, system: bool) -> None:
    own, rng = tokenizer(template), random.Random(1)
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    messages = chat(rng, ["system", *roles] if system else roles)
    for count in range(1, len(messages) + 1):
        written = write_chat(own, messages[:count])
        assert ChatStyle(own).find(written.text) == written


def test_calls_of_tools_and_their_declarations() -> None:
    """Results that follow each other are one message of the text: there is no end between them."""
    own = tokenizer(CHATML_TOOLS)
    messages = chat(random.Random(2), ["system", "user", "assistant", "tool", "tool", "assistant", "user"])
    messages[2]["tool_calls"] = [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]
    written = write_chat(own, messages, options={"tools": [{"name": "clock", "parameters": {}}]})
    assert "# Tools" in written.text
    assert ChatStyle(own).find(written.text) == written


def test_thoughts_of_the_last_reply() -> None:
    """Only user messages end where the server sees an end, and replies in a loop of tools that have thoughts."""
    own = tokenizer(CHATML_THINKING)
    messages = chat(random.Random(3), ["user", "assistant", "user", "assistant", "user", "assistant", "user"])
    messages[4]["content"] = "<tool_response>\n12:00\n</tool_response>"
    messages[3]["content"] = "<think>\nthe clock\n</think>\n\nlet me see"
    messages = messages[:5]
    for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        written = write_chat(own, messages, options=options)
        assert written.text.count("<think>") == 1 + (options.get("enable_thinking") is False)
        assert len(written.ends) == 3  # not the first reply
        assert ChatStyle(own).find(written.text) == written


def test_another_date_or_version_leaves_the_ends_at_the_marks() -> None:
    own = tokenizer(LLAMA_3_1)
    written = write_chat(own, chat(random.Random(4), turns(5, system=True)), options={"date_string": "1 Jan 2031"})
    assert ChatStyle(own).find(written.text) == written
    later = written.text.replace("Cutting Knowledge Date", "Knowledge Date")
    moved = len(later) - len(written.text)
    assert ChatStyle(own).find(later).ends == [end + moved for end in written.ends]
    without_bos = written.text.removeprefix("<s>")
    assert ChatStyle(own).find(without_bos).ends == [end - len("<s>") for end in written.ends]


def test_a_text_without_marks_has_no_ends() -> None:
    texts = ["", "Once upon a time", "user\nHow are you?\nassistant\nFine.", "<|im_start|>user\nHow are you?", "\n" * 9]
    for style in STYLES.values():
        for text in texts:
            assert ChatStyle(tokenizer(style)).find(text) == (text, [])


def test_templates_that_tell_nothing() -> None:
    for template in (
        None,
        PLAIN,
        "{{ raise_exception('no') }}",
        "always the same",
        "{{ messages[0].content | upper }}",
    ):
        own = ChatStyle(tokenizer(template))
        for text in ("a\nb\nc\n", "always the same", "", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"):
            assert own.find(text) == (text, [])


def test_marks_in_a_content_are_ends_too() -> None:
    """Tokens of a text do not tell who wrote them; a template's are trusted."""
    own = tokenizer(CHATML)
    messages = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nb"}, *chat(random.Random(5), turns(2))]
    written = write_chat(own, messages)
    assert len(ChatStyle(own).find(written.text).ends) == len(written.ends) + 1
