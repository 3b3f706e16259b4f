"""Engines whose caches are laid out differently hand over all the same; engines with different models do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.drive import GREEDY
from tests.engine.zoo import build, oracle_logits, prompt
from tests.link.pairs import Pair, at_rest, check
from tests.link.test_handover import check_received

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks of 8 and 16": ({"block_size": 8}, {"block_size": 16}),
    "blocks of 32 and 16": ({"block_size": 32}, {"block_size": 16}),
    "blocks of 16 and 8, small": ({"memory": "2MiB"}, {"block_size": 8, "memory": "3MiB"}),
    "single packs to one": ({"attn_pack_size": 1}, {}),
    "row orders": ({"row_order": "hlkt"}, {"row_order": "ltkh"}),
    "rows of one layer": ({"row_layers": 1}, {"row_layers": 3}),
    "everything": (
        {"block_size": 32, "attn_pack_size": 1, "row_order": "tkhl", "row_layers": 1, "memory": "6MiB"},
        {"block_size": 8, "row_order": "ltkh", "row_layers": 2, "memory": "30MiB"},
    ),
}
TURNS = replace(GREEDY, max_tokens=6, logprobs=1)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "kimi_linear", "falcon_h1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_may_differ(family: str, layout: str) -> None:
    producer, consumer = LAYOUTS[layout]
    pair = Pair(family, producer=producer, consumer=consumer)
    try:
        said: list[int] = []
        for seed, length in enumerate((70, 33, 5)):  # turns of a conversation: ends inside blocks of either side
            tokens = said + prompt(length, seed)
            result = pair.hand_over(tokens, TURNS)
            check(family, tokens, TURNS, result)
            check_received(family, result, len(tokens) - max(0, len(said) - 1))
            said = tokens + result.token_ids
        tokens = prompt(100, 9)
        check(family, tokens, TURNS, pair.early(tokens, TURNS, "consumer first"))
        assert not pair.failures()
        pair.check_at_rest()
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"weights": 1}, "identity of the weights"),
        ({"family": "qwen3"}, "model type"),
        ({"kv_cache_dtype": "bfloat16"}, "parts of layer"),
    ],
    ids=["weights", "model", "dtype"],
)
def test_other_models_are_refused_and_the_request_is_answered(other: dict[str, Any], reason: str) -> None:
    pair = Pair("llama", consumer=other)
    try:
        tokens = prompt(50, 1)
        result = pair.hand_over(tokens, GREEDY)
        assert len(result.token_ids) == 8
        if "kv_cache_dtype" not in other:
            stock = build(other.get("family", "llama"), other.get("weights", 0))
            logits = oracle_logits(stock, tokens + result.token_ids)[len(tokens) - 1 : -1]
            assert result.token_ids == logits.argmax(-1).tolist()
        assert result.received is None
        assert pair.failures() == {"mismatch": 1}
        assert any(reason in message for message in pair.consumer.call("log"))
        at_rest(pair.consumer)  # the producer keeps its prompt for the time of a lease
    finally:
        pair.close()
