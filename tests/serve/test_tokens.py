"""`/tokenize` and `/detokenize` as vLLM's server has them, and special tokens wherever texts become tokens."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from hybridkv import Engine
from tests.engine.checkpoints import tokenizer
from tests.serve.serving import Served, check_idle, error_of, serving

TEXT = "The user asks 🙂"
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Who keeps the pages?"},
    {"role": "assistant", "content": "The system keeps"},
]
HELLO = MESSAGES[:1]
START = 1
"""The id of <s>."""


@pytest.fixture(scope="module")
def started(checkpoint: Path) -> Iterator[Served]:
    """A server whose tokenizer puts <s> before every text."""
    with_start = copy.deepcopy(tokenizer())
    processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", START)])
    with_start.backend_tokenizer.post_processor = processor
    with Engine(checkpoint, memory="16MiB", device="cpu", tokenizer=with_start) as engine, serving(engine) as served:
        yield served
        check_idle(served)


def test_tokens_and_back(served: Served) -> None:
    reply = served.post("/tokenize", prompt=TEXT, model="tiny").json()
    tokens = served.engine.prepare(TEXT).token_ids
    assert reply == {"tokens": tokens, "count": len(tokens), "max_model_len": 512, "token_strs": None}
    assert served.post("/detokenize", tokens=tokens, model="tiny").json() == {"prompt": TEXT}
    chat = served.post("/tokenize", messages=HELLO).json()["tokens"]
    assert chat == served.engine.render_chat(HELLO).token_ids
    assert served.post("/tokenize", prompt="").json()["count"] == 0
    assert served.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokens_as_the_vocabulary_writes_them(served: Served) -> None:
    for body in ({"prompt": TEXT}, {"messages": HELLO}):
        reply = served.post("/tokenize", **body, return_token_strs=True).json()
        assert tokenizer().convert_tokens_to_ids(reply["token_strs"]) == reply["tokens"]
        assert all(isinstance(one, str) for one in reply["token_strs"])
        assert served.post("/tokenize", **body, return_token_strs=False).json()["token_strs"] is None


def test_special_tokens_of_a_text_can_be_left_out(started: Served) -> None:
    def tokens(**named: Any) -> Any:
        return started.post("/tokenize", prompt=TEXT, **named).json()["tokens"]

    bare = tokens(add_special_tokens=False)
    assert tokens() == tokens(add_special_tokens=True) == tokens(add_special_tokens=None) == [START, *bare]
    assert started.post("/detokenize", tokens=[START, *bare]).json()["prompt"] == f"<s>{TEXT}"
    assert started.post("/detokenize", tokens=[START, *bare], skip_special_tokens=True).json()["prompt"] == TEXT


def test_special_tokens_of_messages_can_be_added(started: Served) -> None:
    def tokens(**named: Any) -> Any:
        return started.post("/tokenize", messages=HELLO, **named).json()["tokens"]

    bare = tokens()
    assert bare == tokens(add_special_tokens=False)
    assert tokens(add_special_tokens=True) == [START, *bare]


@pytest.mark.parametrize(("path", "adds"), [("/v1/completions", True), ("/v1/chat/completions", False)])
def test_replies_are_to_the_tokens_that_tokenizing_shows(path: str, adds: bool, started: Served) -> None:
    body: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": TEXT}
    for named in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        tokens = started.post("/tokenize", **body, **named).json()["tokens"]
        assert (tokens[0] == START) == named.get("add_special_tokens", adds)
        sent = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        reply = started.post(path, **body, **named, **sent).json()
        same = started.post("/v1/completions", prompt=tokens, **sent).json()
        assert reply["usage"]["prompt_tokens"] == len(tokens)
        assert reply["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]


def test_breakpoints_behind_special_tokens(started: Served) -> None:
    engine = started.engine
    bare, more = (engine.render_chat(MESSAGES, add_special_tokens=adds) for adds in (False, True))
    assert [*more.breakpoints] == [position + 1 for position in bare.breakpoints] != []


def test_the_last_message_can_be_continued(served: Served) -> None:
    tokens = served.post("/tokenize", messages=MESSAGES, continue_final_message=True).json()["tokens"]
    text = served.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.endswith("assistant\nThe system keeps")
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    assert served.post("/tokenize", messages=MESSAGES, **explicit).json()["tokens"] == tokens
    sent = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = served.post("/v1/chat/completions", messages=MESSAGES, continue_final_message=True, **sent).json()
    same = served.post("/v1/completions", prompt=tokens, **sent).json()
    assert reply["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    assert served.post("/tokenize", messages=MESSAGES, continue_final_message=False).json()["tokens"] != tokens


BIG = 2**31
WRONG: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("/tokenize", {}, 400, "prompt", "prompt is missing: it is required"),
    ("/tokenize", {"prompt": None}, 400, "prompt", "prompt is None: it should be a valid string"),
    ("/tokenize", {"prompt": [1, 2]}, 400, "prompt", "prompt is [1, 2]: it should be a valid string"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model", "no model 'other' here"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt", "prompt with messages: leave one of both out"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, 400, "add_special_tokens", "should be a valid boolean"),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs", "should be a valid boolean"),
    ("/tokenize", {"prompt": "x", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", "is not supported"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, 400, "continue_final_message", "for messages"),
    ("/tokenize", {"messages": []}, 400, "messages", "messages is []: it should have at least 1 item"),
    ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages.0", "a message of role 'user' has no content"),
    ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", "tools is not supported"),
    ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, 400, "chat_template", "the model's own is used"),
    (
        "/tokenize",
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        "continue_final_message with add_generation_prompt",
    ),
    ("/detokenize", {}, 400, "tokens", "tokens is missing: it is required"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens", "tokens is 'x': it should be a valid list"),
    ("/detokenize", {"tokens": [5, 99999]}, 400, "tokens", "token id 99999: the model's ids go from 0 to 319"),
    ("/detokenize", {"tokens": [5, -1]}, 400, "tokens.1", "tokens.1 is -1: it should be greater than or equal to 0"),
    ("/detokenize", {"tokens": [BIG]}, 400, "tokens.0", f"tokens.0 is {BIG}: it should be less than or equal to"),
    ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model", "no model 'other' here"),
    ("/detokenize", {"tokens": [5], "prompt": "x"}, 400, "prompt", "prompt is not supported"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), WRONG)
def test_what_is_wrong_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, param: str, words: str, served: Served
) -> None:
    error = error_of(served.post(path, **body), status)
    assert words in error["message"]
    assert error["param"] == param


def test_tokens_are_made_where_texts_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the thread that answers everyone else, nor short texts behind long ones."""
    threads: list[str] = []
    for verb in ("prepare", "render_chat", "detokenize"):
        real = getattr(served.engine, verb)

        def noted(*given: Any, real: Any = real, **named: Any) -> Any:
            threads.append(threading.current_thread().name)
            return real(*given, **named)

        monkeypatch.setattr(served.engine, verb, noted)
    for words in (1, 60_000):
        text = "pages " * words
        tokens = served.post("/tokenize", prompt=text).json()["tokens"]
        assert served.post("/tokenize", messages=[{"role": "user", "content": text}]).status_code == 200
        assert served.post("/detokenize", tokens=tokens).json()["prompt"] == text
    assert threads == ["hybridkv-tokenizer-0"] * 3 + ["hybridkv-long-texts-0"] * 3


def test_keys_and_limits_hold_for_tokens_too(checkpoint: Path) -> None:
    with (
        Engine(checkpoint, memory="16MiB", device="cpu") as engine,
        serving(engine, api_keys=("secret",), max_body_bytes=2048) as served,
    ):
        for path, body in (("/tokenize", {"prompt": "x" * 3000}), ("/detokenize", {"tokens": [5] * 3000})):
            error_of(served.post(path, **body), 401)
            error_of(served.http.post(path, json=body, headers={"Authorization": "Bearer secret"}), 413)
