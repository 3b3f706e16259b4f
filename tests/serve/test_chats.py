"""`/v1/chat/completions`, models and tokens, through OpenAI's own client where it can."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from hybridkv import SamplingParams
from tests.serve.serving import MODEL, Served

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "The assistant answers what the user asks."},
    {"role": "user", "content": "Who keeps the pages?"},
]


def ask(served: Served, messages: Any = MESSAGES, *, extra: dict[str, Any] | None = None, **named: Any) -> Any:
    sent = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 10, **named}
    return served.client.chat.completions.create(**sent, extra_body={"ignore_eos": True, **(extra or {})})


def test_a_chat_is_the_templates_prompt(served: Served) -> None:
    reply = ask(served)
    [result] = served.engine.generate(served.engine.render_chat(MESSAGES), GREEDY, progress=False)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", result.text)
    assert (choice.finish_reason, reply.object, reply.id[:9]) == ("length", "chat.completion", "chatcmpl-")
    assert reply.usage.prompt_tokens == len(result.prompt_token_ids)


def test_a_stream_has_a_role_then_text_then_a_reason(served: Served) -> None:
    chunks = list(ask(served, stream=True, n=2, stream_options={"include_usage": True}))
    whole = ask(served, n=2)
    for index in range(2):
        mine = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == whole.choices[index].message.content
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
    assert chunks[-1].usage.completion_tokens == 20
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_an_async_client_gets_the_same(served: Served) -> None:
    async def stream() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            sent: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 10}
            chunks = await client.chat.completions.create(**sent, stream=True, extra_body={"ignore_eos": True})
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(stream()) == ask(served).choices[0].message.content


def test_turns_of_a_conversation_resume(served: Served) -> None:
    """Each turn finds the one before: at least everything up to the last whole block but one of its messages."""
    messages, before = list(MESSAGES), 0
    for turn in range(4):
        reply = ask(served, messages)
        cached = reply.usage.prompt_tokens_details.cached_tokens
        assert cached >= before // 16 * 16 - 16
        assert turn == 0 or cached > 0
        before = served.post("/tokenize", messages=messages, add_generation_prompt=False).json()["count"]
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": f"And then, {turn}?"}]


def test_conversations_share_their_system_message(served: Served) -> None:
    system = {"role": "system", "content": "The system keeps the pages that the next request will read. " * 3}
    ask(served, [system, {"role": "user", "content": "A state?"}])
    usage = ask(served, [system, {"role": "user", "content": "Windows?"}]).usage
    shared = served.post("/tokenize", messages=[system], add_generation_prompt=False).json()["count"]
    assert usage.prompt_tokens_details.cached_tokens >= shared // 16 * 16 > 0


def test_logprobs(served: Served) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
    [result] = served.engine.generate(served.engine.render_chat(MESSAGES), params, progress=False)
    found = ask(served, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert result.logprobs is not None
    assert [one.logprob for one in found] == pytest.approx([one.chosen for one in result.logprobs], abs=1e-4)
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in found)
    for one in found:
        assert one.bytes is None if "\N{REPLACEMENT CHARACTER}" in one.token else bytes(one.bytes).decode() == one.token
    streamed = [
        token.token
        for chunk in ask(served, stream=True, logprobs=True)
        for choice in chunk.choices
        for token in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert streamed == [one.token for one in found]


def test_contents_in_parts_are_one_text(served: Served) -> None:
    text = MESSAGES[1]["content"]
    parts = [{"type": "text", "text": text[:7]}, {"type": "text", "text": text[7:]}]
    split = [MESSAGES[0], {"role": "user", "content": parts}]
    assert ask(served, split).choices[0].message.content == ask(served).choices[0].message.content


def test_what_the_template_is_told(served: Served) -> None:
    def count(**named: Any) -> int:
        return int(served.post("/tokenize", messages=MESSAGES, **named).json()["count"])

    assert count(add_generation_prompt=False) < count()
    assert count(chat_template_kwargs={"enable_thinking": False}) == count()


def test_the_model_that_is_served(served: Served) -> None:
    [card] = served.client.models.list().data
    assert (card.id, card.owned_by) == (MODEL, "hybridkv")
    assert served.client.models.retrieve(MODEL).id == MODEL
    assert served.http.get("/v1/models").json()["data"][0]["root"] == MODEL  # no directory is known
    assert served.http.get("/health").json() == {"status": "ok"}
