"""Prompts that are pushed while they are computed: both requests come at once, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hybridkv.engine import SamplingParams
from tests.engine.drive import GREEDY
from tests.engine.zoo import prompt
from tests.link.pairs import Pair, check
from tests.link.test_handover import KINDS_OVER

ORDERS = ["consumer first", "producer first", "at once"]
PARAMS: dict[str, Any] = {
    "greedy": {},
    "three samples": {"n": 3, "temperature": 1.0, "seed": 4},
    "logprobs": {"logprobs": 2, "temperature": 0.8, "seed": 1},
    "ends at once": {"ignore_eos": False, "logit_bias": {2: 100.0}},
}


@pytest.fixture(scope="module")
def open_pairs() -> Iterator[dict[tuple[str, str], Pair]]:
    found: dict[tuple[str, str], Pair] = {}
    yield found
    for pair in found.values():
        pair.close()


@pytest.fixture
def pair(open_pairs: dict[tuple[str, str], Pair], family: str, transport: str) -> Iterator[Pair]:
    """Steps of at most 64 tokens, so that a prompt takes several."""
    key = (family, transport)
    if key not in open_pairs:
        for old in list(open_pairs)[:-2]:
            open_pairs.pop(old).close()
        open_pairs[key] = Pair(family, transport, max_num_batched_tokens=64, max_num_seqs=32)
    used = open_pairs[key]
    used.producer.call("reset")
    used.consumer.call("reset")
    try:
        yield used
        used.check_at_rest()
    except BaseException:
        open_pairs.pop(key).close()
        raise


@pytest.mark.parametrize(("family", "transport"), KINDS_OVER)
@pytest.mark.parametrize("order", ORDERS)
def test_prompts_of_several_steps(pair: Pair, family: str, transport: str, order: str) -> None:
    for length in (200, 64, 129, 5):
        tokens = prompt(length, length)
        result = pair.early(tokens, GREEDY, order)
        check(family, tokens, GREEDY, result)
        assert result.received is not None
        assert result.received.num_tokens == length


@pytest.mark.parametrize("transport", ["cma"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", PARAMS)
def test_prefixes_that_one_side_has(pair: Pair, family: str, transport: str, order: str, kind: str) -> None:
    params: SamplingParams = replace(GREEDY, **PARAMS[kind])
    shared = prompt(100, 1)
    pair.producer.generate(shared, GREEDY)
    for length, seed in ((100, 2), (48, 3)):
        tokens = shared[:length] + prompt(90, seed)
        result = pair.early(tokens, params, order)
        check(family, tokens, params, result)
        assert result.received is not None
    tokens = tokens + prompt(40, 4)  # both have a prefix of it
    result = pair.early(tokens, params, order)
    check(family, tokens, params, result)
    assert result.received is not None
    assert family != "llama" or result.received.num_tokens < len(tokens)
