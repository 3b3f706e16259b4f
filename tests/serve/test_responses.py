"""`/v1/responses` through OpenAI's own client, and paths that are not served."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from hybridkv.serve import conversations
from tests.serve.serving import MODEL, Served, error_of, serving

QUESTION = "Who keeps the pages that the next request will read, and what does the state remember?"


def ask(served: Served, text: Any = QUESTION, **named: Any) -> Any:
    sent = {"model": MODEL, "input": text, "max_output_tokens": 8, "temperature": 0, **named}
    return served.client.responses.create(**sent)


def test_a_response_is_the_reply_to_a_chat(served: Served) -> None:
    response = ask(served, instructions="Be brief.", metadata={"a": "b"})
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = served.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert (response.object, response.id[:5]) == ("response", "resp-")
    assert response.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    parts = [{"role": "developer", "content": "Be brief."},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]  # fmt: skip
    assert ask(served, parts).output_text == response.output_text


def test_a_stream_has_the_events_of_openais(served: Served) -> None:
    events = list(ask(served, stream=True))
    whole = ask(served)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[-1] == whole.status
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text


def test_a_response_goes_on_with_an_earlier_one(served: Served) -> None:
    first = ask(served)
    second = ask(served, "And why?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 - 16 > 0
    said = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And why?"}]
    assert ask(served, said).output_text == second.output_text
    third = list(ask(served, "So?", previous_response_id=second.id, stream=True))[-1].response
    assert third.usage.input_tokens > second.usage.input_tokens
    assert ask(served, "So?", previous_response_id=third.id).usage.input_tokens > third.usage.input_tokens


def test_what_is_not_kept_is_not_found(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    unkept = ask(served, store=False)
    with pytest.raises(openai.NotFoundError, match="is not kept here") as found:
        ask(served, previous_response_id=unkept.id)
    assert found.value.param == "previous_response_id"
    with serving(served.engine, api_keys=("one", "other")) as keyed:
        keyed.client.api_key = "one"
        own = ask(keyed, "Hi")
        keyed.client.api_key = "other"
        with pytest.raises(openai.NotFoundError):
            ask(keyed, previous_response_id=own.id)
    monkeypatch.setattr(conversations, "_MOST_CHARS", 300)
    first, *_ = [ask(served) for _ in range(4)]
    with pytest.raises(openai.NotFoundError):
        ask(served, previous_response_id=first.id)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"text": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "only messages are served"),
        ({"text": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text is served"),
        ({"tools": [{"type": "web_search"}]}, "tools is not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning is not supported"),
        ({"background": True}, "background is not supported"),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: Served, named: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(served, **named)


def test_other_paths_name_those_that_generate(served: Served) -> None:
    error = error_of(served.post("/v1/embeddings", input="x"), 404)
    assert error["message"].startswith("there is no path '/v1/embeddings' here: text is generated at /v1/completions, ")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        served.client.embeddings.create(model=MODEL, input="x")
