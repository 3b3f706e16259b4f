"""Agents as they speak to Anthropic's API: LangChain's model, and the wire format of Claude Code.

The requests of the latter are made after public descriptions of the format: headers, system blocks with cache_control,
tools, a conversation of tool calls and results with cache_control at its end, and streaming.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from hybridkv import Engine
from tests.chats.templates import CHATML_TOOLS
from tests.serve.serving import MODEL, Served, record, serving

MARK = {"type": "ephemeral"}
SYSTEM = "The system keeps the pages that the next request will read. "


@pytest.fixture(scope="module")
def agents(engine: Engine) -> Iterator[Served]:
    tokenizer: Any = engine.tokenizer
    template, tokenizer.chat_template = tokenizer.chat_template, CHATML_TOOLS
    with serving(engine) as served:
        yield served
    tokenizer.chat_template = template
    engine.reset_cache()


def model(agents: Served) -> ChatAnthropic:
    known: dict[str, Any] = {"model": MODEL, "base_url": agents.url, "api_key": "none", "max_retries": 0}
    known |= {"max_tokens": 6, "model_kwargs": {"extra_body": {"temperature": 0}}}
    return ChatAnthropic(**known)


def test_langchain_gets_text_and_usage(agents: Served) -> None:
    system = SystemMessage([{"type": "text", "text": SYSTEM * 2, "cache_control": MARK}])
    first, second = (model(agents).invoke([system, HumanMessage(question)]) for question in ("Who?", "And why?"))
    assert isinstance(first.content, (str, list))
    assert first.response_metadata["stop_reason"] in ("max_tokens", "end_turn")
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    created = first.usage_metadata["input_token_details"]
    assert second.usage_metadata["input_token_details"]["cache_read"] > 0
    assert created["cache_read"] == 0
    chunks = list(model(agents).stream([system, HumanMessage("Who?")]))
    text = "".join(chunk.text for chunk in chunks)
    assert text == first.text


def test_langchain_sends_tools_and_their_results(agents: Served) -> None:
    def clock(city: str) -> str:
        """The time in a city."""
        return city

    asked = model(agents).bind_tools([clock])
    call = AIMessage("", tool_calls=[{"name": "clock", "args": {"city": "Oslo"}, "id": "t1"}])
    reply = asked.invoke([HumanMessage("When?"), call, ToolMessage("Noon.", tool_call_id="t1"), HumanMessage("So?")])
    requests = agents.http.get("/v1/hybridkv/requests").json()["data"]
    name = record(agents, requests[0]["id"])["id"]
    texts = agents.http.get(f"/v1/hybridkv/requests/{name}/tokens").json()["texts"]
    prompt = "".join(texts)
    assert '"name": "clock"' in prompt
    assert '"arguments": {"city": "Oslo"}' in prompt
    assert "<tool_response>\nNoon.\n</tool_response>" in prompt
    assert reply.usage_metadata is not None


class ClaudeCode:
    """A session: each turn repeats all before it, and marks its last block."""

    HEADERS: ClassVar[dict[str, str]] = {
        "accept": "application/json",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,prompt-caching-scope-2026-01-05",
        "anthropic-dangerous-direct-browser-access": "true",
        "anthropic-version": "2023-06-01",
        "user-agent": "claude-cli/2.1.69 (external, cli)",
        "x-api-key": "sk-ant-none",
        "x-app": "cli",
        "x-stainless-helper-method": "stream",
    }

    def __init__(self, served: Served) -> None:
        self._served = served
        self._messages: list[dict[str, Any]] = []

    def say(self, *blocks: dict[str, Any]) -> dict[str, Any]:
        """A turn of the user. Returns the usage that the stream ends with."""
        self._messages.append({"role": "user", "content": [*blocks[:-1], {**blocks[-1], "cache_control": MARK}]})
        body = {
            "model": MODEL,
            "messages": self._messages,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={len(self._messages)};"},
                {"type": "text", "text": "You are an agent.", "cache_control": MARK},
                {"type": "text", "text": SYSTEM, "cache_control": {**MARK, "ttl": "1h", "scope": "global"}},
            ],
            "tools": [{"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}],
            "metadata": {"user_id": "user_1_account_2_session_3"},
            "max_tokens": 6,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "medium"},
            "stream": True,
        }
        reply = self._served.http.post("/v1/messages?beta=true", json=body, headers=self.HEADERS)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["request-id"]
        events = [part.split("\n") for part in reply.text.strip().split("\n\n")]
        told = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name.removeprefix("event: ") for name, _ in events] == [one["type"] for one in told]
        del self._messages[-1]["content"][-1]["cache_control"]
        usage: dict[str, Any] = told[-2]["usage"]
        return usage

    def calls(self, number: int) -> None:
        """A turn of the assistant that calls a tool."""
        content = [
            {"type": "thinking", "thinking": "I read.", "signature": "s"},
            {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"file": f"{number}.txt"}},
        ]
        self._messages.append({"role": "assistant", "content": content})


def test_a_session_of_claude_code_reads_what_its_last_turn_kept(agents: Served) -> None:
    session = ClaudeCode(agents)
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    usage = session.say(reminder, {"type": "text", "text": "What does the file say?"})
    before = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert usage["cache_creation_input_tokens"] > 0
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 0
    for number in range(2):
        session.calls(number)
        usage = session.say({"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "The file says this."})
        assert usage["cache_read_input_tokens"] == before
        assert usage["cache_creation_input_tokens"] > 0
        before += usage["cache_creation_input_tokens"]
    counted = agents.http.post("/v1/messages/count_tokens?beta=true", headers=session.HEADERS, json={
        "model": MODEL, "messages": [{"role": "user", "content": "quota"}],
    })  # fmt: skip
    assert counted.json()["input_tokens"] > 0
