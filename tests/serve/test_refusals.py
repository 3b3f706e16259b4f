"""Requests that are wrong are refused by name, in OpenAI's form, before anything of them starts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from hybridkv.serve import failures
from tests.serve.serving import MODEL, Served, error_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is missing: it is required"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    (
        {"prompt": []},
        "prompt",
        "prompt is []: pass a text, token ids (0 to 2147483647), or a list of 1 to 128 of either, not mixed",
    ),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": [1, "a"]}, "prompt", "prompt is [1, 'a']: pass a text, token ids"),
    ({"prompt": [99999]}, "prompt", "token id 99999: the model's ids go from 0 to 319"),
    ({"prompt": [-1]}, "prompt", "prompt is [-1]: pass a text, token ids (0 to"),
    ({"prompt": [2**40]}, "prompt", f"prompt is [{2**40}]: pass"),
    ({"prompt": [True]}, "prompt", "prompt is [True]: pass"),
    ({"prompt": [5] * 512}, "prompt", "a prompt of 512 tokens: with its reply it must stay within 512"),
    ({"prompt": ["x"] * 129}, "prompt", "'x', ...]: pass a text, token ids (0 to 2147483647), or a list of 1 to 128"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0: it should be greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": "12"}, "max_tokens", "max_tokens is '12': it should be a valid integer"),
    ({"prompt": "x", "max_tokens": 10**400}, "max_tokens", "less than or equal to"),
    ({"prompt": "x", "n": 129}, "n", "n is 129: it should be less than or equal to 128"),
    ({"prompt": "x", "temperature": -1}, "temperature", "temperature is -1: it should be greater than or equal to 0"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "logprobs": 65}, "logprobs", "less than or equal to 64"),
    ({"prompt": "x", "logprobs": 1, "echo": True}, "echo", "echo with logprobs"),
    ({"prompt": "x", "stop": ["x"] * 17}, "stop", "'x', ...]: pass a text, or a list of at most 16"),
    ({"prompt": "x", "stop": ""}, "stop", "stop is ''"),
    ({"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids", "a token of stop_token_ids is 320"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias of 'x'"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "logit_bias of token 5 is 101"),
    ({"prompt": "x", "min_tokens": 20}, "min_tokens", "min_tokens is 20: pass at most max_tokens, which is 16"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream_options without stream"),
    ({"prompt": "x", "cache_salt": "s" * 1025}, "cache_salt", "at most 1024"),
    ({"prompt": "x", "breakpoints": [-1]}, "breakpoints.0", "greater than or equal to 0"),
    ({"prompt": "x", "best_of": 3}, "best_of", "best_of is not supported"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported"),
    ({"prompt": "x", "skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens is not supported"),
    ({"prompt": "x", "guided_json": {"a": 1}}, "guided_json", "guided_json is not supported"),
    ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs", "prompt_logprobs is not supported"),
    ({"prompt": "x", "max_completion_tokens": 5}, "max_completion_tokens", "is not supported: use max_tokens"),
    ({"prompt": "x", "top_logprobs": 5}, "top_logprobs", "it is for /v1/chat/completions"),
    ({"prompt": "x", "grammar": "root ::= x"}, "grammar", "grammar is not supported"),
    ({"prompt": "x", "logit_bias": {"7": 1, "07": 2}}, "logit_bias", "logit_bias of '07'"),
    ({"messages": []}, "messages", "messages is []: it should have at least 1 item"),
    ({"messages": "Hello"}, "messages", "valid list"),
    ({"messages": [{"content": "no role"}]}, "messages.0.role", "messages.0.role is missing"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content",
        "messages.0.content is 5: pass a text, or a list of parts of type text",
    ),
    (
        {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        "messages.1.content.1",
        "messages.1.content.1 is a part of type 'image_url': only text is served",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "messages.0.content.0 is a part without a text: give it one",
    ),
    ({"messages": ["Hello"]}, "messages.0", "messages.0 is 'Hello': it should be a JSON object"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages.1", "a message of role 'user' has no content: give it a text"),
    ({"messages": [{"role": "system", "content": None}]}, "messages.0", "a message of role 'system' has no content"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "tools is not supported"),
    (
        {"messages": HELLO, "response_format": {"type": "json_object"}},
        "response_format",
        "response_format is not supported",
    ),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "top_logprobs without logprobs"),
    ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "chat_template is not supported"),
    (
        {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs",
        "chat_template_kwargs has chat_template",
    ),
    (
        {"messages": HELLO, "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs",
        "chat_template_kwargs has add_generation_prompt, which is not the template's to know",
    ),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "must stay within 512"),
    (
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "continue_final_message with add_generation_prompt: a new message cannot follow one that is continued",
    ),
    ({"prompt": "x", "continue_final_message": True}, "continue_final_message", "it is for messages"),
    (
        {"prompt": "x", "add_special_tokens": 1},
        "add_special_tokens",
        "add_special_tokens is 1: it should be a valid bool",
    ),
    ({"messages": HELLO, "echo": True}, "echo", "echo is not supported: it is for /v1/completions"),
    ({"messages": HELLO, "prompt": "x"}, "prompt", "prompt is not supported: it is for /v1/completions"),
    ({"messages": HELLO, "enable_thinking": True}, "enable_thinking", "enable_thinking is not supported"),
    ({"messages": HELLO, "verbosity": "low"}, "verbosity", "verbosity is not supported"),
    ({"messages": HELLO, "max_new_tokens": 5}, "max_new_tokens", "max_new_tokens is not supported: use max_tokens"),
    (
        {"messages": HELLO, "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "stream_options.continuous_usage_stats is not supported: use include_usage",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_bad_requests_are_refused_by_name(body: dict[str, Any], param: str, words: str, served: Served) -> None:
    before = served.engine.stats().cache.requests
    error = error_of(served.post(CHAT if "messages" in body else COMPLETIONS, **body), 400)
    assert words in error["message"]
    assert (error["param"] or "", error["type"]) == (param, "invalid_request_error")
    assert served.engine.stats().cache.requests == before


@pytest.mark.parametrize(
    "fields",
    [
        {"function_call": "none", "functions": []},
        {"tool_choice": "none", "tools": [], "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"},
        {"suffix": "", "best_of": 1, "top_logprobs": 0, "echo": False, "enable_thinking": None},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "x"},
        {"stream": True, "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}},
    ],
)
def test_values_that_ask_for_nothing_are_fine(fields: dict[str, Any], served: Served) -> None:
    """Some clients send every field they know."""
    assert served.post(CHAT, messages=HELLO, max_tokens=1, **fields).status_code == 200


def test_too_long_has_the_code_that_clients_look_for(served: Served) -> None:
    assert error_of(served.post(COMPLETIONS, prompt=[5] * 512), 400)["code"] == "context_length_exceeded"
    assert error_of(served.post(COMPLETIONS, prompt=[]), 400)["code"] == "bad_request"


RAW: list[tuple[bytes, str]] = [
    (b"", "the body is missing: send a JSON object"),
    (b"{", "the body is no JSON"),
    (b"[]", "the body is []: it should be a JSON object"),
    (b'"text"', "the body is 'text': it should be a JSON object"),
    (b'{"prompt": "\xff"}', "the body is no text in UTF-8: encode it so"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature is nan: it should be a number"),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature is inf: it should be less than"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias of token 5 is nan"),
    (
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        "the body cannot be parsed: send JSON, with numbers of fewer than",
    ),
    (b'{"prompt": "a\\ud800"}', "prompt"),
    (b'{"prompt": "x", "cache_salt": "\\udfff"}', "cache_salt"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the body has lists or objects nested too deeply"),
    (b'{"prompt": "x", "other": ' + b"[" * 900 + b"]" * 900 + b', "stop": 5}', "stop"),
]


@pytest.mark.parametrize(("body", "words"), RAW, ids=[body[:40].decode("latin-1") for body, _ in RAW])
def test_bodies_that_are_hardly_json(body: bytes, words: str, served: Served) -> None:
    response = served.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert words in error_of(response, 400)["message"]


def test_messages_that_are_no_text(served: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}], "max_tokens": 1}'
    response = served.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400)


def test_many_mistakes_are_as_soon_told_as_one(served: Served) -> None:
    """Each costs a message if it is looked at, and everyone waits."""
    many: list[dict[str, Any]] = [
        {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(60_000)), "x")},
        {"prompt": "x", "stop_token_ids": ["x"] * 200_000},
        {"prompt": "x", "stop": [1] * 200_000},
        {"prompt": ["x", *[1] * 200_000]},
        {"prompt": [[1, "x"]] * 100_000},
        {"messages": [{"role": 5}] * 60_000},
        {"messages": [{"role": "user", "content": [{"type": 5}] * 60_000}]},
    ]
    for body in many:
        with pytest.MonkeyPatch.context() as patch:
            counted: list[int] = []
            judge = failures._what_is_wrong

            def counts(error: Any, judge: Any = judge, counted: list[int] = counted) -> Any:
                counted.append(len(error.errors()))
                return judge(error)

            patch.setattr(failures, "_what_is_wrong", counts)
            error_of(served.post(CHAT if "messages" in body else COMPLETIONS, **body), 400)
        assert sum(counted) < 20


def test_a_long_text_holds_up_no_short_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, has_begun, may_end = served.engine.prepare, threading.Event(), threading.Event()

    def slow(text: Any, **named: Any) -> Any:
        if isinstance(text, str) and len(text) > 100_000:
            has_begun.set()
            assert may_end.wait(10)
        return prepare(text, **named)

    monkeypatch.setattr(served.engine, "prepare", slow)
    with ThreadPoolExecutor(1) as other:
        long = other.submit(served.post, COMPLETIONS, prompt="x" * 300_000)
        assert has_begun.wait(10)
        assert served.post(COMPLETIONS, prompt="x").status_code == 200
        assert not long.done()
        may_end.set()
        assert "must stay within 512" in error_of(long.result(), 400)["message"]


def test_what_is_wrong_is_not_quoted_at_length(served: Served) -> None:
    response = served.post(COMPLETIONS, prompt="x", logit_bias={"9" * 100_000: "x"})
    assert len(error_of(response, 400)["message"]) < 2000


def test_json_must_be_called_json(served: Served) -> None:
    response = served.http.post(COMPLETIONS, content=b'{"prompt": "x"}')
    assert "Content-Type: application/json" in error_of(response, 400)["message"]


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=f"no model 'gpt-4o' here: this server has '{MODEL}'") as caught:
        served.client.completions.create(model="gpt-4o", prompt="x")
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o' here"):
        served.client.models.retrieve("gpt-4o")


def test_paths_and_methods_that_are_not_there(served: Served) -> None:
    error = error_of(served.http.get("/v2/nothing"), 404)
    assert error["type"] == "not_found_error"
    assert error["message"] == "there is no path '/v2/nothing' here: /openapi.json lists all there are"
    assert "there is no path '/v1/completions/'" in error_of(served.post(f"{COMPLETIONS}/", prompt="x"), 404)["message"]
    response = served.http.get(COMPLETIONS)
    assert error_of(response, 405)["message"] == "GET '/v1/completions': this path takes POST"
    assert response.headers["allow"] == "POST"


def test_bodies_that_are_too_large(served: Served) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    headers = {"Content-Type": "application/json"}
    for content in (b"x" * (2**20 + 1), chunks()):
        response = httpx.post(served.url + COMPLETIONS, content=content, headers=headers)
        assert (
            "more than 1 MiB: send less, or start the server with a larger --max-body"
            in error_of(response, 413)["message"]
        )
    announced = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {10**15}\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(served.url.split(":")[-1])), timeout=10) as connection:
        connection.sendall(announced.encode() + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")  # before a byte of it has come
