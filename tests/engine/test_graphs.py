"""Engines on a GPU give the same replies with CUDA graphs and without."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hybridkv import Engine, SamplingParams
from tests.devices import needs_gpu
from tests.engine.drive import NOT_CAPTURED, set_experts
from tests.engine.tokenizers_small import byte_level
from tests.engine.zoo import ALL, fresh, prompt

ASKED = [
    (prompt(70, 1), SamplingParams(temperature=0, max_tokens=24)),
    (prompt(33, 2), SamplingParams(temperature=0, max_tokens=30, stop=["e", "a"])),
    (prompt(12, 3), SamplingParams(temperature=1.2, seed=5, n=3, max_tokens=20, ignore_eos=True)),
    (prompt(40, 4), SamplingParams(temperature=0.8, seed=6, top_k=30, top_p=0.9, max_tokens=26)),
    (prompt(55, 5), SamplingParams(temperature=0.7, seed=7, min_p=0.01, logprobs=2, max_tokens=9)),
    (prompt(70, 1) + prompt(9, 6), SamplingParams(temperature=0, frequency_penalty=0.5, max_tokens=18)),
]


def replies(family: str, **options: Any) -> tuple[list[Any], int]:
    model = fresh(family)
    set_experts(model, "batched_mm")  # grouped products of float32 cannot be captured
    options = {"memory": "16MiB", "compile": False, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    with Engine(
        model,
        device="cuda",
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=byte_level()),
        store="memory://?size=64MiB",
        **options,
    ) as engine:
        told = []
        for _ in range(2):  # from the prompts, and from what memory and store have of them
            results = engine.generate(*map(list, zip(*ASKED, strict=True)), progress=False)
            told += [[(one.token_ids, one.finish_reason) for one in result.completions] for result in results]
            engine.check_integrity()
            engine.flush_store()
            engine.reset_cache()
        return told, engine.stats().captured_steps


@needs_gpu
@pytest.mark.parametrize("family", ALL)
def test_replies_are_the_same_with_graphs_and_without(family: str) -> None:
    expected, none = replies(family, graphs=False)
    found, captured = replies(family)
    assert none == 0
    assert bool(captured) == (family not in NOT_CAPTURED)
    assert found == expected
