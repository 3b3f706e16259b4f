"""Traces of chats: messages are rendered as the server renders them, and their ends are breakpoints."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hybridkv.chats import write_chat
from hybridkv.engine import render_chat
from hybridkv.errors import HybridKVError
from hybridkv.replay import ChatTokenizer, Trace, TraceError, load_tokenizer, load_trace
from tests.chats.templates import CHATML, CHATML_TOOLS, GEMMA, LLAMA_3, MISTRAL, tokenizer
from tests.replay.traces import blocks, numbers, run, write_trace

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
]
PLAIN_CHAT = [*CHAT[:2], {"role": "user", "content": "And now?"}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return saved(tmp_path / "tokenizer", CHATML_TOOLS)


def saved(path: Path, template: str | None) -> Path:
    tokenizer(template).save_pretrained(path)
    return path


def load(directory: Path, *lines: dict[str, Any]) -> Trace:
    return load_trace(write_trace(directory.parent / "trace.jsonl", lines), load_tokenizer(directory))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
        ({"add_special_tokens": True, "continue_final_message": None}, {"add_special_tokens": True}),
        ({"tools": TOOLS}, {"options": {"tools": TOOLS}}),
        ({"tools": [], "chat_template_kwargs": {"tools": TOOLS}}, {"options": {"tools": TOOLS}}),
    ],
)
def test_messages_are_rendered_as_the_server_does(line: dict[str, Any], named: dict[str, Any], directory: Path) -> None:
    trace = load(directory, {"messages": CHAT, "output_text": "Still fine.", **line})
    prompt = render_chat(tokenizer(CHATML_TOOLS), PLAIN_CHAT, **named)
    assert numbers(trace[0].prompt) == prompt.token_ids
    assert trace[0].breakpoints == trace[0].all_breakpoints == prompt.breakpoints
    assert len(prompt.breakpoints) == 2
    assert numbers(trace[0].reply) == tokenizer(CHATML_TOOLS).encode("Still fine.", add_special_tokens=False)
    assert trace[0].output_tokens == len(numbers(trace[0].reply))


@pytest.mark.parametrize("template", [CHATML, CHATML_TOOLS, LLAMA_3, GEMMA, MISTRAL])
def test_a_rendered_text_is_the_same_request(template: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "tokenizer", template)
    messages = PLAIN_CHAT * 5
    messages = [{**message, "role": ("user", "assistant")[number % 2]} for number, message in enumerate(messages)]
    text = write_chat(tokenizer(template), messages).text
    chat, rendered = load(directory, {"messages": messages})[0], load(directory, {"text": text})[0]
    assert chat.prompt == rendered.prompt
    assert chat.breakpoints == rendered.breakpoints
    assert len(chat.breakpoints) == 8


def test_texts_have_no_breakpoints_without_marks_or_a_template(directory: Path, tmp_path: Path) -> None:
    text = write_chat(tokenizer(CHATML_TOOLS), PLAIN_CHAT).text
    assert load(directory, {"text": "Once upon a time."})[0].breakpoints == ()
    plain = saved(tmp_path / "plain", None)
    assert not isinstance(load_tokenizer(plain), ChatTokenizer)
    path = write_trace(tmp_path / "trace.jsonl", [{"text": text}])
    with_ends = load_trace(path, load_tokenizer(directory))[0]
    for tokenize in (load_tokenizer(plain), load_tokenizer(directory / "tokenizer.json")):
        without = load_trace(path, tokenize)[0]
        assert without.prompt == with_ends.prompt
        assert (len(with_ends.breakpoints), without.breakpoints) == (2, ())


def test_a_template_in_the_tokenizers_configuration(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    assert isinstance(load_tokenizer(directory), ChatTokenizer)


def test_breakpoints_that_a_line_names(directory: Path) -> None:
    trace = load(
        directory, {"token_ids": [5, 6, 7], "breakpoints": [3, 0, 2, 2]}, {"token_ids": [5], "breakpoints": []}
    )
    assert (trace[0].breakpoints, trace[1].breakpoints) == ((0, 2, 3), ())
    ends = load(directory, {"messages": CHAT})[0]
    both = load(directory, {"messages": CHAT, "breakpoints": [2, ends.breakpoints[0]]})[0]
    assert both.breakpoints == (2, *ends.breakpoints)
    pieces = load(directory, {**blocks([1, 2], 20), "breakpoints": [7]})[0]
    assert (pieces.breakpoints, pieces.all_breakpoints) == ((7,), (7, 16))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"token_ids": [1, 2], "breakpoints": 1}, "breakpoints is 1: it must be a list of positions"),
        ({"token_ids": [1, 2], "breakpoints": "12"}, "breakpoints is '12'"),
        ({"token_ids": [1, 2], "breakpoints": [3]}, "breakpoint 3 of a prompt of 2 tokens: choose 0 to 2"),
        ({"token_ids": [1, 2], "breakpoints": [-1]}, "breakpoint -1 of a prompt of 2 tokens"),
        ({"token_ids": [1, 2], "breakpoints": [1.0]}, "breakpoint 1.0 of"),
        ({"token_ids": [1, 2], "breakpoints": [True]}, "breakpoint True of"),
        ({"token_ids": [1, 2], "breakpoints": [None]}, "breakpoint None of"),
        ({**blocks([1], 9), "breakpoints": [10]}, "breakpoint 10 of a prompt of 9 tokens"),
        ({"messages": []}, "messages is not a list of messages: give each a role and a content"),
        ({"messages": "hi"}, "messages is not a list"),
        ({"messages": ["hi"]}, "messages.0 is a str: give an object"),
        ({"messages": [{"role": "user"}]}, "messages.0: a message of role 'user' has no content: give it a text"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role is None: name one, such as 'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content is a int: give a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url': only text is served"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "it must be UTF-8"),
        ({"messages": CHAT, "tools": "clock"}, "tools is not a list of objects"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs is a list: give an object"),
        ({"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has tokenize"),
        ({"messages": CHAT, "add_generation_prompt": 1}, "add_generation_prompt is 1: it must be true or false"),
        (
            {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message with add_generation_prompt",
        ),
        ({"messages": CHAT, "output_text": 5}, "output_text is not a string"),
        ({"messages": CHAT, "output_length": -1}, "output_length is -1"),
        ({"text": 5}, "text is not a string"),
        ({"text": "\udfff"}, "it must be UTF-8"),
        ({"text": "a", "output_text": "\udfff"}, "it must be UTF-8"),
        ({"text": ""}, "text is empty"),
    ],
)
def test_faults_name_the_file_and_the_line(line: dict[str, Any], words: str, directory: Path) -> None:
    path = directory.parent / "bad.jsonl"
    path.write_text("\n" + json.dumps(line) + "\n")
    with pytest.raises(TraceError) as caught:
        load_trace(path, load_tokenizer(directory))
    assert "bad.jsonl, line 2: " in str(caught.value)
    assert words in str(caught.value)


def test_messages_that_the_template_refuses(tmp_path: Path) -> None:
    directory = saved(tmp_path / "tokenizer", MISTRAL)
    with pytest.raises(TraceError, match=r"line 1: the chat template refuses these messages: .*roles must alternate"):
        load(directory, {"messages": CHAT[1:]})
    broken = saved(tmp_path / "broken", "{% for\n")
    with pytest.raises(TraceError, match="line 1: the chat template refuses these messages: ") as caught:
        load(broken, {"messages": CHAT})
    assert "\n" not in str(caught.value)
    assert load(broken, {"text": "Once upon a time."})[0].breakpoints == ()


def test_messages_need_a_tokenizer_with_a_chat_template(directory: Path, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [{"messages": CHAT}])
    with pytest.raises(TraceError, match=r"line 1: a trace of messages needs a tokenizer: pass --tokenizer"):
        load_trace(path)
    for tokenize in (load_tokenizer(directory / "tokenizer.json"), load_tokenizer(saved(tmp_path / "plain", None))):
        with pytest.raises(
            TraceError, match=r"line 1: .*needs a chat template, and the tokenizer has none: pass --tok"
        ):
            load_trace(path, tokenize)
    with pytest.raises(TraceError, match="a text line in a messages trace: keep kinds apart"):
        load(directory, {"messages": CHAT}, {"text": "a"})


def test_a_chat_template_needs_transformers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(HybridKVError, match=r"needs transformers: pip install .*, or give its tokenizer.json"):
        load_tokenizer(directory)
    assert load_tokenizer(directory / "tokenizer.json")("weather")


def test_a_directory_that_is_no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(HybridKVError, match="cannot read tokenizer") as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)
    shutil.rmtree(directory)
    directory.mkdir()
    with pytest.raises(HybridKVError, match="cannot read tokenizer"):
        load_tokenizer(directory)


def agents(num_agents: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats that share a system message, and little more."""
    rng = random.Random(seed)
    system = {"role": "system", "content": " ".join(str(rng.random()) for _ in range(57))}
    return [
        {"messages": [system, {"role": "user", "content": " ".join(str(rng.random()) for _ in range(30))}]}
        for _ in range(num_agents)
    ]


@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize("tiers", [(), ("1GiB@10GB/s",)])
def test_breakpoints_bring_hits_on_a_model_with_states(serial: bool, tiers: tuple[str, ...], directory: Path) -> None:
    """The first request already leaves a state at the end of what the others share."""
    trace = load(directory, *({**line, "timestamp": 10_000 * at} for at, line in enumerate(agents(2))))
    shared = trace[0].breakpoints[0]
    assert shared % 128 > 16  # no position of the grid
    with_ends, without = (run(trace, serial=serial, tiers=tiers, breakpoints=wanted) for wanted in (True, False))
    assert with_ends.hit_tokens == shared // 16 * 16 > without.hit_tokens
    assert (with_ends.breakpoints_per_request, without.breakpoints_per_request) == (1, 0)
    assert with_ends.as_dict()["breakpoints"] is True
    assert without.as_dict()["breakpoints"] is False


def test_breakpoints_of_whole_blocks_stay(tmp_path: Path) -> None:
    """What a Mooncake trace tells by its blocks is known without messages."""
    trace = load_trace(write_trace(tmp_path / "trace.jsonl", [blocks([1, 2], 20)]))
    assert run(trace, breakpoints=False).breakpoints_per_request == 1


def test_reading_chats_is_fast_and_shows_progress(directory: Path) -> None:
    path = write_trace(directory.parent / "trace.jsonl", agents(300))
    tokenize, seen = load_tokenizer(directory), []
    start = time.process_time()
    assert len(load_trace(path, tokenize, progress=lambda: seen.append(1))) == len(seen) == 300
    assert time.process_time() - start < 20
