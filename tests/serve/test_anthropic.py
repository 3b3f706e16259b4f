"""`/v1/messages` through Anthropic's own client where it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from hybridkv import SamplingParams
from tests.chats.templates import CHATML_TOOLS
from tests.serve.serving import MODEL, Client, Served, record, serving

SYSTEM = "The system keeps the pages that the next request will read. " * 3
QUESTION: list[Any] = [{"role": "user", "content": "Who keeps the pages?"}]
GREEDY = {"temperature": 0}
"""No field of newer clients."""
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {}}},
}


@pytest.fixture
def served(recorded: Served) -> Served:
    return recorded


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def knows_tools(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", CHATML_TOOLS)


def ask(client: anthropic.Anthropic, messages: list[Any] = QUESTION, **named: Any) -> Any:
    sent = {"model": MODEL, "messages": messages, "max_tokens": 8, **named}
    return client.messages.create(**sent, extra_body=GREEDY)


def text(words: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": words, **({} if mark is None else {"cache_control": mark})}


def test_a_message_is_the_templates_prompt(served: Served, client: anthropic.Anthropic) -> None:
    reply = ask(client, system=SYSTEM)
    chat = [{"role": "system", "content": SYSTEM}, *QUESTION]
    params = SamplingParams(temperature=0, max_tokens=8)
    [result] = served.engine.generate(served.engine.render_chat(chat), params, progress=False)
    assert "".join(block.text for block in reply.content) == result.text
    assert (reply.type, reply.role, reply.model, reply.id[:4]) == ("message", "assistant", MODEL, "msg-")
    assert reply.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[result.finish_reason]
    assert reply.usage.input_tokens == len(result.prompt_token_ids)
    assert reply.usage.output_tokens == len(result.token_ids)
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system=SYSTEM)
    assert counted.input_tokens == len(result.prompt_token_ids)


def test_a_stream_has_the_events_of_anthropics(served: Served, client: anthropic.Anthropic) -> None:
    events = list(ask(client, stream=True, system=SYSTEM))
    whole = ask(client, system=SYSTEM)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) <= {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == "".join(block.text for block in whole.content)
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(
        model=MODEL, messages=QUESTION, system=SYSTEM, max_tokens=8, extra_body=GREEDY
    ) as stream:
        assert stream.get_final_text() == "".join(block.text for block in whole.content)


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    whole = "".join(block.text for block in ask(client, max_tokens=16).content)
    stop = whole[2:4]
    reply = ask(client, max_tokens=16, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)


def test_breakpoints_are_counted_as_they_are_kept(client: anthropic.Anthropic) -> None:
    """What others share is created once and read from then on; the three kinds of tokens are the prompt."""
    system: list[Any] = [text(SYSTEM, HOUR), text("Be brief.")]
    size = client.messages.count_tokens(model=MODEL, messages=QUESTION, system=system).input_tokens
    first, second = (ask(client, system=system, messages=[{"role": "user", "content": one}]).usage for one in "AB")
    created = first.cache_creation
    assert first.cache_creation_input_tokens == created.ephemeral_1h_input_tokens > 0
    assert (created.ephemeral_5m_input_tokens, first.cache_read_input_tokens) == (0, 0)
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0
    for usage in (first, second):
        parts = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
        assert 0 < parts <= size


def test_named_breakpoints_take_the_place_of_those_after_messages(served: Served, client: anthropic.Anthropic) -> None:
    def breakpoints(system: Any, messages: list[Any], **named: Any) -> list[int]:
        reply = ask(client, messages, system=system, **named)
        return list(record(served, reply.id)["prompts"][0]["breakpoints"])

    def count(*parts: str) -> int:
        return len(served.engine.prepare("".join(parts)).token_ids)

    head = "<|im_start|>system\n"
    [inner] = breakpoints([text(SYSTEM, MARK), text("Be brief.")], QUESTION)
    assert inner == count(head, SYSTEM)
    [end] = breakpoints([text("Be brief."), text(SYSTEM, MARK)], QUESTION)
    assert end == count(head, "Be brief.", SYSTEM, "<|im_end|>\n")
    question = [{"role": "user", "content": [text("Who?", MARK), text("And why?", MARK)]}]
    middle, last = breakpoints(SYSTEM, question)
    opening = [head, SYSTEM, "<|im_end|>\n<|im_start|>user\n"]
    assert (middle, last) == (count(*opening, "Who?"), count(*opening, "Who?And why?<|im_end|>\n"))
    assert breakpoints(SYSTEM, QUESTION, cache_control=MARK) == [count(*opening, "Who keeps the pages?<|im_end|>\n")]
    assert len(breakpoints(SYSTEM, QUESTION)) == 1  # after the system message


@pytest.mark.usefixtures("knows_tools")
def test_tools_and_their_results_are_rendered_by_the_template(served: Served, client: anthropic.Anthropic) -> None:
    other = {**WEATHER, "name": "get_time"}
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": [
            text("I ask."), {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("Rain.")], "cache_control": MARK},
            text("And now?"),
        ]},
    ]  # fmt: skip
    reply = ask(client, messages, max_tokens=1, tools=[{**WEATHER, "cache_control": HOUR}, other])
    [found] = record(served, reply.id)["prompts"]
    tokens = served.http.get(f"/v1/hybridkv/requests/{reply.id}/tokens").json()["texts"]
    prompt = "".join(tokens)
    tools, result = (("".join(tokens[:position])) for position in found["breakpoints"])
    assert '"name": "get_weather", "arguments": {"city": "Oslo"}' in prompt
    assert tools.count('"type": "function"') in (1, 2)  # the next tool begins alike
    assert '"get_weather"' in tools
    assert "get_time" not in tools
    assert result.endswith("Rain.\n</tool_response><|im_end|>\n")
    forced = pytest.raises(anthropic.BadRequestError, match="tool_choice is of type 'any'")
    with forced:
        ask(client, messages, tools=[WEATHER], tool_choice={"type": "any"})
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0 is a tool of type 'web_search_20250305'"):
        ask(client, messages, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def test_tools_that_the_template_does_not_know_are_refused(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="chat template does not know them"):
        ask(client, tools=[WEATHER])


def test_a_reply_goes_on_where_the_last_message_ends(served: Served, client: anthropic.Anthropic) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The system"}]
    reply = ask(client, messages)
    prompt = served.engine.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == prompt.num_tokens


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it should be greater"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only text is served"),
        ({"messages": [{"role": "user", "content": "x " * 900}]}, "prompt is too long: "),
        ({"system": 5}, "system is 5: pass a text, or a list of blocks of type text"),
        ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "cache_control.ttl is 'soon': pass a time"),
        ({"container": "x"}, "container is not supported"),
    ],
)
def test_errors_have_anthropics_form(client: anthropic.Anthropic, named: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as found:
        ask(client, **named)
    body: Any = found.value.body
    assert message in body["error"]["message"]
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == found.value.request_id == found.value.response.headers["x-request-id"]


def test_other_errors_are_those_that_the_client_knows(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
        ask(client, model="claude")
    batches = served.post("/v1/messages/batches", requests=[])
    assert (batches.status_code, batches.json()["error"]["type"]) == (404, "not_found_error")


def test_a_key_is_sent_as_anthropics_clients_do(served: Served) -> None:
    with serving(served.engine, api_keys=("secret",)) as locked:

        def keyed(key: str, path: str) -> Any:
            return anthropic.Anthropic(base_url=f"{locked.url}{path}", api_key=key, max_retries=0)

        assert ask(keyed("secret", "")).type == "message"
        with pytest.raises(anthropic.AuthenticationError) as found:
            ask(keyed("wrong", ""))
        body: Any = found.value.body
        assert body["error"]["type"] == "authentication_error"
        bearer = anthropic.Anthropic(base_url=locked.url, auth_token="secret", max_retries=0)
        assert ask(bearer).type == "message"


def test_a_server_that_stops_ends_a_stream_with_an_error(served: Served) -> None:
    with serving(served.engine, shutdown_timeout=0) as stopping:
        reader = Client(stopping, path="/v1/messages", messages=QUESTION, stream=True, stop_sequences=["\0never"])
        begin = reader.read()
    told = (begin + reader.read_all()).decode()
    if "message_stop" not in told:
        assert 'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"' in told
    assert "[DONE]" not in told
