"""A prompt computed by one process and continued by another: the answer is that of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hybridkv.engine import Result, SamplingParams
from tests.engine.drive import GREEDY
from tests.engine.zoo import ALL, FAMILIES, KIN, prompt
from tests.link.pairs import Pair, check, expected
from tests.link.workers import TRANSPORTS

KINDS = ["llama", "gemma3", "qwen3_next", "mamba2", "nemotron_h", "kimi_linear", "falcon_h1"]
"""One family for each kind of layer: full, window, GDN, Mamba-2 alone and with attention, MLA and KDA, two in one."""
KINDS_OVER = [
    *zip(KINDS, ["cma", "tcp", "cma", "tcp", "cma", "tcp", "cma"], strict=True),
    ("llama", "tcp"),
    ("qwen3_next", "tcp"),
]
"""Each family over one transport, and two over both."""
KINDS_OVER += [(family, "tcp") for family in KIN if FAMILIES is ALL]
EOS = 2
transports = pytest.mark.parametrize("transport", TRANSPORTS)
kinds = pytest.mark.parametrize(("family", "transport"), KINDS_OVER)
two_families = pytest.mark.parametrize("family", ["llama", "qwen3_next"])


@dataclass(frozen=True)
class Case:
    """A request, as a change of the greedy one with logprobs: tokens alone show only large errors."""

    length: int
    params: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    num_replied: int | None = None
    """Tokens of its reply, where it is known beforehand."""

    @property
    def sampling(self) -> SamplingParams:
        return replace(GREEDY, **{"logprobs": 1, **self.params})


_DRAWN = {"temperature": 0.9, "seed": 5}
CASES = {
    "one token": Case(1),
    "shorter than a block": Case(7),
    "a block": Case(16),
    "four blocks": Case(64, {"logprobs": None}, num_replied=8),
    "longer than a window": Case(101),
    "top p and penalties": Case(
        61, _DRAWN | {"top_p": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    ),
    "top k and biases": Case(33, _DRAWN | {"top_k": 9, "min_p": 0.01, "logit_bias": {7: 2.0, 70: 3.5}}),
    "three samples": Case(45, _DRAWN | {"n": 3, "max_tokens": 14}),
    "three samples of whole blocks": Case(48, _DRAWN | {"n": 3, "logprobs": 0}),
    "logprobs": Case(50, {"logprobs": 4}),
    "logprobs of draws": Case(20, _DRAWN | {"logprobs": 2}),
    "one more token": Case(40, {"max_tokens": 1}, num_replied=1),
    "no end before the fourth": Case(40, {"min_tokens": 4, "ignore_eos": False, "logit_bias": {EOS: 9.0}}),
    "ends at once": Case(40, {"ignore_eos": False, "logit_bias": {EOS: 100.0}}, num_replied=1),
    "ends at once, three samples": Case(
        40, _DRAWN | {"n": 3, "ignore_eos": False, "logit_bias": {EOS: 100.0}}, num_replied=1
    ),
    "a stop token": Case(40, {"stop_token_ids": (9,), "logit_bias": {9: 100.0}}, num_replied=1),
    "hidden states of the prompt": Case(37, {"hidden_layers": (0, 2, "final")}),
    "hidden states of all": Case(37, {"hidden_layers": (-1, 1), "hidden_tokens": "all"}),
    # With seed 5 a router of Qwen3-Next finds two experts within 2e-7: rounding decides which the stock model takes.
    "hidden states of three samples": Case(
        32, _DRAWN | {"seed": 6, "n": 3, "hidden_layers": (1, "final"), "hidden_tokens": "all"}
    ),
    "a salt": Case(70, salt="one tenant"),
}


def check_received(family: str, result: Result, num_tokens: int) -> None:
    """So many tokens came from the producer, in fewer bytes than full attention takes."""
    received = result.received
    assert received is not None
    assert received.num_tokens == num_tokens
    assert received.num_descriptors > 0
    assert received.seconds > 0
    if result.hidden_layers:  # hidden states are not counted as layers
        return
    if family == "llama":
        assert received.num_bytes <= received.full_attention_bytes
    elif num_tokens >= 100:
        assert received.num_bytes < received.full_attention_bytes
    assert result.cached_tokens == len(result.prompt_token_ids)


@kinds
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_handover(pair: Pair, family: str, transport: str, case: Case) -> None:
    before = pair.consumer.stats()
    tokens = prompt(case.length, 3)
    result = pair.hand_over(tokens, case.sampling, salt=case.salt)
    check(family, tokens, case.sampling, result, case.salt)
    check_received(family, result, case.length)
    if case.num_replied is not None:
        assert {len(one.token_ids) for one in result.completions} == {case.num_replied}
    computed = pair.consumer.stats().computed_tokens - before.computed_tokens
    assert computed == sum(len(one.token_ids) - 1 for one in result.completions)  # no token of the prompt


@kinds
def test_stop_texts(pair: Pair, family: str, transport: str) -> None:
    """The first token, a later one, or several together complete the text that ends the reply."""
    tokens = prompt(50, 6)
    long = replace(GREEDY, max_tokens=24)
    pieces = [expected(family, tokens, replace(long, max_tokens=count)).text for count in (1, 2, 6)]
    whole = expected(family, tokens, long).text
    texts = {text for text in (pieces[0], pieces[1], pieces[2][-3:]) if text and text in whole}
    assert texts  # a reply that is cut inside a character ends with a replacement, which the whole one does not have
    for text in texts:
        for includes in (False, True):
            params = replace(long, stop=text, include_stop_str_in_output=includes)
            result = pair.hand_over(tokens, params)
            assert result.finish_reason == "stop"
            check(family, tokens, params, result)


@kinds
@pytest.mark.parametrize("known", ["received", "computed"])
def test_the_next_turn_of_a_conversation_sends_what_is_new(pair: Pair, family: str, transport: str, known: str) -> None:
    tokens = prompt(90, 1)
    first = pair.hand_over(tokens, GREEDY) if known == "received" else pair.consumer.generate(tokens, GREEDY)
    said = tokens + first.token_ids
    turn = said + prompt(40, 2)
    again = pair.hand_over(turn, GREEDY)
    check(family, turn, GREEDY, again)
    check_received(family, again, len(turn) - (len(said) - 1))  # the last token of a reply was never fed
    whole = pair.hand_over(turn, GREEDY, salt="else")
    assert again.received is not None
    assert whole.received is not None
    if FAMILIES[family].attention:
        assert again.received.num_bytes < whole.received.num_bytes


@kinds
def test_prompts_that_begin_alike(pair: Pair, family: str, transport: str) -> None:
    """Their KV is there up to where they part; states and windows may not be."""
    shared = prompt(120, 1)
    pair.consumer.generate(shared, GREEDY)
    for length, seed in ((70, 2), (33, 3), (120, 4), (110, 5)):
        tokens = shared[:length] + prompt(30, seed)
        params = replace(GREEDY, logprobs=1)
        result = pair.hand_over(tokens, params)
        check(family, tokens, params, result)
        assert result.received is not None
        if family == "llama":
            assert result.received.num_tokens == len(tokens) - length // 16 * 16
    result = pair.hand_over(shared, GREEDY)  # all of it is there but for the last token's logits
    check(family, shared, GREEDY, result)


@transports
@two_families
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"temperature": 1.0, "seed": 3}),
        ({}, {"min_tokens": 3}),
        ({"n": 2, "temperature": 1.0, "seed": 3}, {"n": 3, "temperature": 1.0, "seed": 3}),
        ({}, {"logprobs": 2}),
        ({"seed": 1, "temperature": 1.0}, {"seed": 2, "temperature": 1.0}),
        ({}, {"hidden_layers": (1,)}),
        ({"hidden_layers": (1,)}, {}),
    ],
    ids=["temperature", "min_tokens", "n", "logprobs", "seed", "hidden states", "no hidden states"],
)
def test_requests_that_differ_are_computed(
    pair: Pair, family: str, transport: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    tokens, before = prompt(60, 1), pair.failures().get("prompt", 0)
    decode = replace(GREEDY, **other)
    result = pair.hand_over(tokens, replace(GREEDY, **one), decode=decode)
    check(family, tokens, decode, result)
    assert result.received is None
    assert pair.failures()["prompt"] == before + 1


@transports
@two_families
def test_other_tokens_or_another_salt_are_computed(pair: Pair, family: str, transport: str) -> None:
    before = pair.failures().get("prompt", 0)
    tokens = prompt(60, 1)
    for theirs, salt in ((prompt(60, 2), ""), (tokens[:-1], ""), (tokens, "another")):
        first = pair.producer.generate(tokens, GREEDY, transfer={"do_remote_decode": True})
        result = pair.consumer.generate(theirs, GREEDY, salt=salt, transfer=first.kv_transfer_params)
        check(family, theirs, GREEDY, result, salt)
        assert result.received is None
    assert pair.failures()["prompt"] == before + 3
