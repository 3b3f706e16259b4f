"""Breakpoints that clients name: where they are in the text, with the templates of published models."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.chats import TOOLS, Mark
from hybridkv.chats.marks import find_marks
from hybridkv.chats.rendering import apply_template, render_marked
from tests.chats.templates import CHATML, CHATML_TOOLS, PLAIN, STYLES, tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "It rains in Oslo."},
    {"role": "user", "content": "And in Bergen?"},
]
OPTIONS = {"add_generation_prompt": True}


def find(template: str, marks: list[Mark], messages: list[Any] = CHAT, **options: Any) -> list[str]:
    """What comes before each mark."""
    own, named = tokenizer(template), {**OPTIONS, **options}
    text = apply_template(own, messages, named)
    places = find_marks(lambda some, mode: apply_template(own, some, mode), messages, named, text, marks)
    assert all(0 <= place <= len(text) for place in places)
    return [text[:place] for place in places]


@pytest.mark.parametrize("style", list(STYLES))
def test_a_place_inside_a_content(style: str) -> None:
    marks = [Mark(2, 6), Mark(0, 4), Mark(1, 2), Mark(0, 4)]
    ends = [before[-4:] for before in find(STYLES[style], marks)]
    assert ends == ["And in"[-4:], "What", find(STYLES[style], [Mark(1, 2)])[0][-4:], "What"]
    assert ends[2].endswith("It")


@pytest.mark.parametrize("style", list(STYLES))
def test_the_end_of_a_message_is_what_all_that_go_on_share(style: str) -> None:
    """Every other question after the same messages begins with the same text."""
    template = STYLES[style]
    for number in range(2):
        [before] = find(template, [Mark(number)])
        other = [*CHAT[: number + 1], {"role": CHAT[number + 1]["role"], "content": "Quite another text."}]
        if style != "chatml-thinking":  # it writes the last reply differently
            assert apply_template(tokenizer(template), other, OPTIONS).startswith(before)
            assert CHAT[number]["content"] in before
    [whole] = find(template, [Mark(2)])
    assert "And in Bergen?" in whole


def test_a_message_that_cannot_be_the_last_one() -> None:
    """As some templates want a user's message in every chat."""
    needs_user = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    template = needs_user + "{{ raise_exception('No user query found') }}{% endif %}" + CHATML
    system = [{"role": "system", "content": "0 is a number."}, {"role": "user", "content": "0?"}]
    [before] = find(template, [Mark(0)], system)
    assert before == "<|im_start|>system\n0 is a number.<|im_end|>\n<|im_start|>user\n"


def test_after_a_tool() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("clock", "map", "post")]
    first, second, last = find(CHATML_TOOLS, [Mark(TOOLS, count) for count in (1, 2, 3)], tools=tools)
    assert '"clock"' in first
    assert '"map"' not in first
    assert '"map"' in second
    assert '"post"' not in second
    assert last.endswith('"post", "parameters": {}}}\n')
    assert find(CHATML, [Mark(TOOLS, 1)], tools=tools) == find(CHATML, [Mark(0)]), "it writes no tools"


def test_contents_that_the_template_changes() -> None:
    """Words in them change what is written: the place is where the texts part."""
    shortens = "{% for message in messages %}{{ message.content[:12] }}|{% endfor %}"
    assert find(shortens, [Mark(0, 4), Mark(0, 15)]) == ["What", "What is the |It rains in "[:12] + "|"]
    assert find(PLAIN, [Mark(0, 4)]) == ["What"]
    assert find("always the same", [Mark(0, 4), Mark(1)]) == ["always the same"] * 2
    word = [{"role": "user", "content": "qzmark0z and qzmarkq"}]
    assert find(PLAIN, [Mark(0, 8)], word) == ["qzmark0z"]


def test_tokens_of_marks_and_the_longest_lifetime() -> None:
    own = tokenizer(CHATML)
    marks = [Mark(0, 5, 60.0), Mark(0, 5, 300.0), Mark(1)]
    tokens, lifetimes = render_marked(own, CHAT, marks, has_ends=False)
    inner, end = tokens.breakpoints
    assert (
        own.decode(tokens.token_ids[:inner]) == "<|im_start|>user\nWhat "[: len(own.decode(tokens.token_ids[:inner]))]
    )
    assert own.decode(tokens.token_ids[:end]).endswith("It rains in Oslo.<|im_end|>\n")
    assert lifetimes == {inner: 300.0}
    both, _ = render_marked(own, CHAT, marks)
    assert {inner, end} < set(both.breakpoints)
