"""Decoding steps on the buffer of a GPU's graphs: each logit is the stock model's, whatever is decoded, and when.

Without a GPU the same steps run without graphs, their kernels in Triton's interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

pytest.importorskip("triton")

from hybridkv import Engine
from hybridkv.engine.decoding.step_buffer import MAX_ENDS
from hybridkv.engine.loading.families import COMPILED
from hybridkv.engine.sampling.params import SamplingParams
from tests.devices import DEVICE, needs_gpu, uses_device
from tests.engine.drive import GREEDY, NOT_CAPTURED, Driver, PackedDecoder, memory_for
from tests.engine.test_correctness import ends_well
from tests.engine.tokenizers_small import byte_level
from tests.engine.zoo import FAMILIES, build, fresh, prompt

pytestmark = uses_device
KINDS = ["llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "qwen3_5", "kimi_linear", "falcon_h1", "jamba", "lfm2"]
KINDS += ["minimax", "mimo_v2_flash", "gemma4"]
"""One family of each kind of layer: the interpreter is slow."""


def decoding(family: str, **options: Any) -> Driver:
    return Driver(build(family), device=DEVICE, decodes="graphs", **options)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NOT_CAPTURED] if DEVICE == "cuda" else KINDS)
def test_every_family_decodes_as_the_stock_model_does(family: str) -> None:
    """Across the ends of blocks, windows and chunks, with padding, and with a reply that goes on from the cache."""
    decodes_well(decoding(family, max_num_seqs=4))


@needs_gpu
@pytest.mark.parametrize("family", [f for f in KINDS if FAMILIES[f].model_type in COMPILED])
def test_compiled_layers_are_captured(family: str) -> None:
    decodes_well(decoding(family, max_num_seqs=4, compiles=True))


@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_captured_in_bfloat16_or_named_in_the_log(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """As checkpoints are, with experts as transformers computes them."""
    options: dict[str, Any] = {"experts": "grouped_mm", "tolerance": torch.inf}
    driver = Driver(fresh(family).bfloat16(), device=DEVICE, decodes="graphs", max_num_seqs=4, **options)
    assert (driver.runner.decoder is None) == (family in NOT_CAPTURED)
    told = [message for message in caplog.messages if "decodes without CUDA graphs" in message]
    assert bool(told) == (family in NOT_CAPTURED)
    driver.add("a", prompt(30, 1), replace(GREEDY, max_tokens=5))
    assert len(driver.run()["a"].token_ids) == 5


def decodes_well(driver: Driver) -> None:
    driver.add("a", prompt(30, 1), replace(GREEDY, max_tokens=5))
    driver.add("b", prompt(14, 2), replace(GREEDY, max_tokens=4))
    driver.add("c", prompt(1, 3), replace(GREEDY, max_tokens=2))
    results = driver.run()
    assert driver.core.captured_steps == 4
    said = results["a"].prompt_token_ids + results["a"].token_ids
    driver.add("next turn", said + prompt(2, 4), replace(GREEDY, max_tokens=1))
    cached = ends_well(driver)
    assert cached["next turn"] == len(said) - 1


def test_arrivals_aborts_and_samples() -> None:
    driver = decoding("llama", max_num_seqs=4)
    driver.add("a", prompt(20, 1), replace(GREEDY, max_tokens=12))
    driver.add("n", prompt(15, 2), SamplingParams(n=2, temperature=1.5, max_tokens=6, ignore_eos=True, seed=7))
    for _ in range(4):
        driver.step()
    assert driver.core.captured_steps
    driver.abort("a")  # while its step is on the device
    driver.add("late", prompt(33, 3), replace(GREEDY, max_tokens=4))
    driver.step()
    driver.cache.reset()
    driver.run()
    assert len({tuple(one.token_ids) for one in driver.results["n"].completions}) == 2
    driver.cache.reset()
    driver.cache.check_integrity()
    assert not any(driver.cache.pages_in_use().values())


def test_equal_replies_share_the_blocks_that_they_compute() -> None:
    """The page that one of them gives up is soon another's: steps that follow must not read it any more."""
    driver = decoding("llama", max_num_seqs=4, block_tokens=8)
    for number in range(2):
        driver.add(str(number), prompt(13, 1), replace(GREEDY, max_tokens=12))
    driver.add("other", prompt(12, 2), replace(GREEDY, max_tokens=12))
    ends_well(driver)
    assert driver.cache.stats.blocks_shared


def test_preemption_in_a_tiny_arena() -> None:
    driver = decoding("llama", memory_bytes=memory_for(build("llama"), 2, 50), max_num_batched_tokens=40)
    for index in range(3):
        driver.add(str(index), prompt(30 + 4 * index, index), replace(GREEDY, max_tokens=6))
    ends_well(driver)
    assert driver.core.scheduler.preempted or driver.cache.stats.blocks_evicted


def test_replies_do_not_depend_on_how_steps_run() -> None:
    """Seeded draws, logprobs, penalties, stop tokens and filters: with a decoder and without one."""
    chance = random.Random(5)
    kinds = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=2, top_k=20, top_p=0.8, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, stop_token_ids=chance.sample(range(10, 300), 60)),
    ]
    replies = []
    for decodes in ("graphs", ""):
        driver = Driver(build("llama"), device=DEVICE, decodes=decodes)
        driver.core._sampler._draws_on_device = True
        for number, params in enumerate(kinds):
            driver.add(str(number), prompt(10 + number, number), params)
        results = driver.run()
        replies.append([(results[str(i)].token_ids, results[str(i)].finish_reason) for i in range(len(kinds))])
        assert bool(driver.core.captured_steps) == bool(decodes)
    assert replies[0] == replies[1]


def test_a_reply_ends_at_a_token_that_the_device_does_not_know() -> None:
    """No step goes past the end nevertheless: it would write to the state that the next turn resumes from."""
    plain = Driver(build("mamba2"))
    plain.add("whole", prompt(20, 1), replace(GREEDY, max_tokens=5))
    whole = plain.run()["whole"].token_ids
    last = next(token for token in whole[2:] if token not in whole[:2])
    ends = [*(token for token in range(300) if token not in whole), last][-60:]
    params = replace(GREEDY, max_tokens=5, stop_token_ids=ends)
    assert last not in list(params.ends(()))[:MAX_ENDS]
    driver = decoding("mamba2", max_num_seqs=1)
    driver.add("a", prompt(20, 1), params)
    result = driver.run()["a"]
    assert (result.token_ids, result.finish_reason) == (whole[: whole.index(last) + 1], "stop")
    said = result.prompt_token_ids + result.token_ids
    driver.add("next turn", said + prompt(2, 4), replace(GREEDY, max_tokens=1))
    assert ends_well(driver)["next turn"] == len(said) - 1


def test_stop_texts_end_replies_while_steps_run_ahead() -> None:
    """The next turn finds what a reply left, too: no step has gone past its end."""
    told = []
    for runs_ahead in (False, True):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
        with Engine(fresh("falcon_h1"), memory="16MiB", device="cpu", tokenizer=tokenizer, max_num_seqs=4) as engine:
            if runs_ahead:
                engine._core.runner.decoder = PackedDecoder(engine._core.runner)
            params = [SamplingParams(temperature=0, max_tokens=20, stop=stop) for stop in (["e", "t"], [], ["a"])]
            first = engine.generate([prompt(20 + i, i) for i in range(3)], params, progress=False)
            turns = [one.prompt_token_ids + one.token_ids + prompt(3, 9) for one in first]
            second = engine.generate(turns, params, progress=False)
            told.append([(one.token_ids, one.finish_reason, one.cached_tokens) for one in [*first, *second]])
            assert bool(engine.stats().captured_steps) == runs_ahead
            engine.check_integrity()
    assert told[0] == told[1]
    assert {reason for _, reason, _ in told[0]} == {"stop", "length"}
