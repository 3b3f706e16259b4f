"""Messages from JSON: read by the same rules as those of requests to the server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("torch")

from hybridkv.chats import read_messages, render_chat
from hybridkv.errors import RequestError
from hybridkv.serve.messages import ChatPrompt
from tests.chats.templates import CHATML, tokenizer


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]},
        {"role": "user", "content": []},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant"},
        {"role": "tool", "content": "12", "tool_call_id": "x"},
        {"role": "user", "content": None},
        {"role": "system"},
        {"role": "", "content": "hi"},
        {"role": 5, "content": "hi"},
        {"content": "hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"type": "text"}},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "image", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": [{}]},
        "hi",
        None,
    ],
)
def test_messages_are_those_of_the_server(message: Any) -> None:
    def serve() -> list[dict[str, Any]]:
        prompt = ChatPrompt.model_validate({"messages": [{"role": "user", "content": "first"}, message]})
        return [one.for_template(number) for number, one in enumerate(prompt.messages)]

    try:
        served = serve()
    except (ValidationError, RequestError):
        with pytest.raises(RequestError, match=r"^messages\.1"):
            read_messages([{"role": "user", "content": "first"}, message])
    else:
        assert read_messages([{"role": "user", "content": "first"}, message]) == served


@pytest.mark.parametrize("messages", [None, [], {}, "hi", 5])
def test_a_chat_is_a_list_of_messages(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages is not a list of messages"):
        read_messages(messages)


class Slow:
    """A tokenizer that does not know where its tokens lie."""

    is_fast = False
    chat_template = CHATML

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(CHATML), name)

    def __call__(self, text: str, *, return_offsets_mapping: bool, **options: Any) -> Any:
        assert not return_offsets_mapping
        return tokenizer(CHATML)(text, **options)


def test_a_slow_tokenizer_gives_no_breakpoints() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fast, slow = render_chat(tokenizer(CHATML), messages), render_chat(Slow(), messages)
    assert fast.token_ids == slow.token_ids
    assert (len(fast.breakpoints), slow.breakpoints) == (1, [])
