"""`/v1/completions` through OpenAI's own client: what it gets is what the engine generates."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from hybridkv import SamplingParams
from tests.engine.counting import count_work
from tests.engine.zoo import prompt
from tests.serve.serving import MODEL, Served

TEXT = "The system keeps the pages that the next request will read."
OTHER = "A state remembers what the window forgets."
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ask(served: Served, text: Any = TEXT, *, extra: dict[str, Any] | None = None, **named: Any) -> Any:
    sent = {"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": 12, **named}
    return served.client.completions.create(**sent, extra_body={"ignore_eos": True, **(extra or {})})


def pieces(served: Served, text: Any = TEXT, **named: Any) -> list[Any]:
    return list(ask(served, text, stream=True, **named))


def joined(stream: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for piece in stream:
        for choice in piece.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_a_reply_is_what_the_engine_generates(served: Served) -> None:
    reply = ask(served)
    [result] = served.engine.generate(TEXT, GREEDY, progress=False)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (result.text, "length")
    assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens == len(result.prompt_token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_a_stream_adds_up_to_the_reply(served: Served) -> None:
    stream = pieces(served, stream_options={"include_usage": True}, n=2)
    reply = ask(served, n=2)
    assert joined(stream) == {one.index: one.text for one in reply.choices}
    ends = [choice for piece in stream for choice in piece.choices if choice.finish_reason]
    assert [(one.index, one.finish_reason) for one in sorted(ends, key=lambda one: one.index)] == [
        (0, "length"),
        (1, "length"),
    ]
    assert len({piece.id for piece in stream}) == 1
    assert not stream[-1].choices
    assert stream[-1].usage.completion_tokens == 24
    assert all(piece.usage is None for piece in stream[:-1])


def test_without_being_asked_a_stream_tells_no_usage(served: Served) -> None:
    assert all(piece.choices and piece.usage is None for piece in pieces(served))


def test_clients_side_by_side(served: Served) -> None:
    texts = [f"{number} {TEXT}"[: 20 + 5 * number] for number in range(12)]

    async def one(client: openai.AsyncOpenAI, text: str, stream: bool) -> str:
        named: Any = {"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": 12}
        answer: Any = await client.completions.create(**named, stream=stream, extra_body={"ignore_eos": True})
        if not stream:
            return str(answer.choices[0].text)
        return "".join([piece.choices[0].text async for piece in answer])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, text, i % 2 == 0) for i, text in enumerate(texts)))

    expected = served.engine.generate(texts, GREEDY, progress=False)
    assert asyncio.run(all_of_them()) == [result.text for result in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_n_choices_in_order(stream: bool, served: Served) -> None:
    ids = [prompt(30, 1), prompt(7, 2)]
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=6, ignore_eos=True)
    results = served.engine.generate(ids, params, progress=False)
    expected = {i: one.text for i, one in enumerate(one for result in results for one in result.completions)}
    named: Any = {"temperature": 0.9, "seed": 5, "n": 3, "max_tokens": 6}
    if stream:
        assert joined(pieces(served, ids, **named)) == expected
    else:
        reply = ask(served, ids, **named)
        assert {one.index: one.text for one in reply.choices} == expected
        assert [one.index for one in reply.choices] == list(range(6))
        assert reply.usage.prompt_tokens == 37


def test_texts_and_token_ids_are_the_same_prompt(served: Served) -> None:
    ids = served.engine.prepare(TEXT).token_ids
    assert ask(served, ids).choices[0].text == ask(served, TEXT).choices[0].text
    assert [one.text for one in ask(served, [TEXT, OTHER]).choices] == [
        ask(served, TEXT).choices[0].text,
        ask(served, OTHER).choices[0].text,
    ]


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "seed": 7, "top_p": 0.5},
    {"temperature": 1.5, "seed": 8, "top_k": 3},
    {"temperature": 1.5, "seed": 9, "min_p": 0.3},
    {"frequency_penalty": -2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 0.1},
    {"logit_bias": {"17": 100}},
    {"ignore_eos": False, "min_tokens": 4, "logit_bias": {"2": 100}},
    {"stop_token_ids": [17], "logit_bias": {"17": 100}},
]


@pytest.mark.parametrize("asked", PARAMETERS, ids=lambda asked: "-".join(asked))
def test_parameters_reach_the_engine(asked: dict[str, Any], served: Served) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **asked}
    named = {name: value for name, value in body.items() if name not in ("prompt", "return_token_ids")}
    named["logit_bias"] = {int(token): bias for token, bias in named.get("logit_bias", {}).items()}
    [result] = served.engine.generate(TEXT, SamplingParams(**named), progress=False)
    plain = served.engine.generate(TEXT, GREEDY, progress=False)[0]
    choice = served.post("/v1/completions", **body).json()["choices"][0]
    assert choice["token_ids"] == result.token_ids
    assert (choice["text"], choice["finish_reason"]) == (result.text, result.finish_reason)
    assert result.token_ids != plain.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts(stream: bool, served: Served) -> None:
    full = ask(served).choices[0].text
    piece = full[3:5]
    named: Any = {"stop": [piece, "never said"]}
    text = joined(pieces(served, **named))[0] if stream else ask(served, **named).choices[0].text
    assert text == full[: full.index(piece)]
    kept = ask(served, stop=piece, extra={"include_stop_str_in_output": True}).choices[0]
    assert (kept.text, kept.finish_reason) == (full[: full.index(piece) + len(piece)], "stop")


def test_logprobs_are_the_engines_whole_or_streamed(served: Served) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    [result] = served.engine.generate(TEXT, params, progress=False)
    found = ask(served, logprobs=3).choices[0].logprobs
    assert result.logprobs is not None
    assert found.token_logprobs == pytest.approx([one.chosen for one in result.logprobs], abs=1e-4)
    assert all(1 <= len(top) <= 3 for top in found.top_logprobs)
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(12)]
    streamed = [piece.choices[0].logprobs for piece in pieces(served, logprobs=3)]
    assert [token for one in streamed for token in one.tokens] == found.tokens
    assert [offset for one in streamed for offset in one.text_offset] == found.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(stream: bool, served: Served) -> None:
    plain = ask(served).choices[0].text
    asked: list[Any] = [TEXT, served.engine.prepare(TEXT).token_ids]
    for text in asked:
        replies = joined(pieces(served, text, echo=True, n=2)) if stream else None
        if replies is None:
            replies = {one.index: one.text for one in ask(served, text, echo=True, n=2).choices}
        assert replies == {0: TEXT + plain, 1: TEXT + plain}


def test_cached_tokens_of_a_repeated_prompt(served: Served) -> None:
    tokens = prompt(60, 3)
    first, again = ask(served, tokens).usage, ask(served, tokens).usage
    assert (first.prompt_tokens_details.cached_tokens, again.prompt_tokens_details.cached_tokens) == (0, 48)
    last = pieces(served, tokens, stream_options={"include_usage": True})[-1]
    assert last.usage.prompt_tokens_details.cached_tokens == 48


def test_salts_never_meet(served: Served) -> None:
    tokens = prompt(60, 4)

    def cached(salt: str) -> int:
        usage = ask(served, tokens, extra={"cache_salt": salt}).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert [cached("a"), cached("b"), cached("a"), cached("b")] == [0, 0, 48, 48]


def test_breakpoints_are_where_others_resume(served: Served) -> None:
    """Most of a prompt is shared, no boundary of its own near the end of that: only the caller knows where it is."""
    shared = prompt(176, 5)

    def cached_after(breakpoints: list[int]) -> int:
        served.engine.reset_cache()
        ask(served, shared + prompt(120, 6), extra={"breakpoints": breakpoints})
        usage = ask(served, shared + prompt(130, 7)).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached_after([176]) == 176
    assert cached_after([]) < 176
    with pytest.raises(openai.BadRequestError, match="breakpoint 5000 of a prompt of 296 tokens: choose 0 to 296"):
        cached_after([5000])


def test_token_ids_come_with_the_text_if_asked_for(served: Served) -> None:
    [result] = served.engine.generate(TEXT, GREEDY, progress=False)
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    assert served.post("/v1/completions", **body).json()["choices"][0]["token_ids"] == result.token_ids
    streamed = pieces(served, extra={"return_token_ids": True})
    assert [token for piece in streamed for token in piece.choices[0].token_ids] == result.token_ids


def test_what_may_be_left_out(served: Served) -> None:
    reply = served.post("/v1/completions", prompt=TEXT, user="someone", best_of=1, metadata={"unknown": "field"}).json()
    assert reply["usage"]["completion_tokens"] <= 16
    assert reply["model"] == MODEL


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"breakpoints": [4]}, {"stream": True}])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_prompt_is_packed_and_scanned_once(
    served: Served, kind: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_work(monkeypatch)
    asked = {"prompt": TEXT if kind == "text" else prompt(30, 1), "max_tokens": 3, "ignore_eos": True, **extra}
    assert served.post("/v1/completions", **asked).status_code == 200
    assert (counts["packs"], counts["scans"]) == (1, 1)
    assert counts["matches"] == counts["walks"] == 1


def test_a_chat_is_packed_and_scanned_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_work(monkeypatch)
    asked = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3, "breakpoints": [4]}
    assert served.post("/v1/chat/completions", **asked).status_code == 200
    assert (counts["packs"], counts["scans"]) == (1, 1)
