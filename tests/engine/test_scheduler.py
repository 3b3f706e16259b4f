"""Who gets a turn: decodes before prompts, old before young, nobody forever."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.errors import RequestError
from tests.engine.drive import GREEDY, Driver, check_greedy, memory_for
from tests.engine.tokenizers_small import byte_level
from tests.engine.zoo import build, prompt


def test_a_long_prompt_does_not_hold_up_those_that_decode() -> None:
    driver = Driver(build("llama"), max_num_batched_tokens=20)
    driver.add("quick", prompt(5, 1), replace(GREEDY, max_tokens=40))
    driver.step()
    driver.add("long", prompt(300, 2))
    for _ in range(15):
        updates = driver.step()
        assert [update.request_id for update in updates if update.token_ids] == ["quick"]
        assert sum(len(work.tokens) for work in driver.runner.work) == 20
    driver.run()


def test_steps_keep_to_the_budget() -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=30, max_num_seqs=8)
    for index in range(12):
        driver.add(str(index), prompt(50, index))
    while driver.core.has_work:
        driver.step()
        assert sum(len(work.tokens) for work in driver.runner.work) <= 30
        assert len(driver.runner.work) <= 8


def test_prompts_start_in_order_of_arrival() -> None:
    driver = Driver(build("llama"), max_num_batched_tokens=25)
    for index in range(4):
        driver.add(str(index), prompt(40, index))
    driver.run()
    first_tokens = list(dict.fromkeys(update.request_id for update in driver.updates))
    assert first_tokens == ["0", "1", "2", "3"]


def test_the_oldest_is_never_preempted_and_all_end() -> None:
    model = build("qwen3_next")
    driver = Driver(model, memory_bytes=memory_for(model, 2, 100), max_num_batched_tokens=64)
    for index in range(5):
        driver.add(str(index), prompt(60, index), replace(GREEDY, max_tokens=39))
    results = driver.run()
    assert results["0"].metrics.preemptions == 0
    assert driver.core.scheduler.preempted == sum(result.metrics.preemptions for result in results.values())
    assert all(len(result.token_ids) == 39 for result in results.values())


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Its state is kept while there is room: nothing is computed twice."""
    model = build("falcon_h1")
    driver = Driver(model, max_num_batched_tokens=64)
    driver.add("a", prompt(50, 1), replace(GREEDY, max_tokens=20))
    for _ in range(5):
        driver.step()
    driver.core.scheduler._preempt(driver.core.scheduler.running[0])
    driver.run()
    assert driver.core.computed_tokens == 50 + 19
    assert driver.results["a"].metrics.preemptions == 1
    assert driver.results["a"].cached_tokens == 0  # what it computed itself is no hit


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    model = build("llama")
    driver = Driver(model, memory_bytes=memory_for(model, 1, 100))
    with pytest.raises(
        RequestError, match=r"300 tokens: .* all that fits into the cache; shorten it, or give the engine more memory"
    ):
        driver.add("large", prompt(300, 1))
    driver.add("small", prompt(60, 1))
    driver.run()


def test_a_full_arena_keeps_the_queue_waiting_without_counting_it_again() -> None:
    model = build("qwen3_next")
    driver = Driver(model, memory_bytes=memory_for(model, 1, 120), max_num_batched_tokens=128)
    for index in range(4):
        driver.add(str(index), prompt(80, index), replace(GREEDY, max_tokens=30))
    driver.run()
    assert driver.cache.stats.requests <= 4 + 4 + driver.core.scheduler.preempted


def test_whoever_found_no_room_goes_on_as_soon_as_someone_has_ended() -> None:
    """Not only when everyone has."""
    model = build("qwen3_next")
    driver = Driver(model, memory_bytes=memory_for(model, 2, 150), max_num_batched_tokens=128)
    for name, length in (("long", 90), ("short", 60), ("waits", 90)):
        driver.add(name, prompt(60, length + len(name)), replace(GREEDY, max_tokens=length))
    while "short" not in driver.results:
        driver.step()
    assert [sample.request.id for sample in driver.core.scheduler.waiting] == ["waits"], "it must have found no room"
    driver.step()
    assert len(driver.runner.work) == 2
    driver.run()


def test_an_abort_frees_everything_at_any_moment() -> None:
    for steps in range(8):
        driver = Driver(build("qwen3_next"), max_num_batched_tokens=32)
        driver.add("gone", prompt(90, 1), SamplingParams(n=3, temperature=1.0, max_tokens=9, ignore_eos=True))
        driver.add("stays", prompt(40, 2))
        for _ in range(steps):
            driver.step()
        driver.abort("gone")
        assert driver.results["gone"].finish_reason == "abort"
        driver.run()
        driver.cache.reset()
        assert not any(driver.cache.pages_in_use().values())


def test_followers_start_when_their_leader_is_gone() -> None:
    shared = prompt(64, 1)
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=16)
    driver.add("leader", shared + prompt(10, 2))
    driver.add("follower", shared + prompt(10, 3))
    driver.step()
    assert [sample.request.id for sample in driver.core.scheduler.waiting] == ["follower"]
    driver.abort("leader")
    driver.run()
    assert driver.results["follower"].finish_reason == "length"


def test_a_forward_pass_that_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=32)
    driver.add("a", prompt(50, 1))
    driver.add("b", prompt(20, 2))
    for _ in range(4):
        driver.step()
    forward = driver.runner._forward
    calls = iter([True])

    def fails_once(*args: object) -> object:
        result = forward(*args)  # type: ignore[arg-type]
        if next(calls, False):
            raise RuntimeError("the device hiccuped")  # after states were written in place
        return result

    monkeypatch.setattr(driver.runner, "_forward", fails_once)
    driver.core.step()
    driver.cache.check_integrity()
    results = driver.run()
    assert {name: result.finish_reason for name, result in results.items()} == {"a": "length", "b": "length"}


def test_a_forward_pass_that_always_fails_ends_in_errors_not_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(build("qwen3_next"))
    driver.add("a", prompt(50, 1), replace(GREEDY, n=3, temperature=1.0))

    def fails(*args: object) -> object:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(driver.runner, "_forward", fails)
    for _ in range(3):
        driver.results |= {u.request_id: u.result for u in driver.core.step() if u.result}
    assert driver.results["a"].finish_reason == "error"
    assert "no kernel image" in str(driver.results["a"].completions[0].error)
    assert not driver.core.has_work
    driver.cache.reset()
    assert not any(driver.cache.pages_in_use().values())


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_equal_replies_share_the_blocks_that_they_compute(family: str) -> None:
    """The page that a reply gives up is soon another's: steps that follow must not read it any more."""
    driver = Driver(build(family), decodes="packed")
    for number in range(3):
        driver.add(str(number), prompt(21, 1), replace(GREEDY, max_tokens=70))
    driver.add("other", prompt(27, 2), replace(GREEDY, max_tokens=70))
    driver.run()
    assert driver.cache.stats.blocks_shared
    assert driver.core.captured_steps > 60
    for name in driver.results:
        check_greedy(driver, name)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
@pytest.mark.parametrize("failing", [1, 3, 7])
def test_a_decoding_step_whose_tokens_cannot_be_read_is_computed_again(
    family: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it may have begun: its results are dropped."""
    driver = Driver(build(family), decodes="packed")
    collect, calls = driver.core._sampler.collect, itertools.count(1)

    def fails(*args: Any) -> Any:
        if next(calls) == failing:
            raise RuntimeError("the device hiccuped")
        return collect(*args)

    monkeypatch.setattr(driver.core._sampler, "collect", fails)
    driver.add("a", prompt(23, 1), replace(GREEDY, max_tokens=14))
    driver.add("b", prompt(11, 2), replace(GREEDY, max_tokens=14))
    driver.run()
    assert next(calls) > failing
    for name in ("a", "b"):
        assert driver.results[name].finish_reason == "length"
        assert len(driver.results[name].token_ids) == 14
        check_greedy(driver, name)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("failing", [1, 2, 5, 9])
@pytest.mark.parametrize("logprobs", [None, 1], ids=["submitted before", "submitted after"])
def test_a_decoding_step_that_cannot_be_submitted_costs_no_token(
    family: str, failing: int, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of all, one that follows another, and one at which some samples need a page and others do not.

    It is submitted before the tokens of the last one are read, or after, when they must not be lost with it.
    """
    driver = Driver(build(family), decodes="packed")
    assert driver.runner.decoder is not None
    submit, calls = driver.runner.decoder._submit, itertools.count(1)

    def fails() -> Any:
        if next(calls) == failing:
            raise RuntimeError("the device hiccuped")
        return submit()

    monkeypatch.setattr(driver.runner.decoder, "_submit", fails)
    driver.add("a", prompt(23, 1), replace(GREEDY, max_tokens=14, logprobs=logprobs))
    driver.add("b", prompt(11, 2), replace(GREEDY, max_tokens=14))
    while driver.core.has_work:
        updates = driver.core.step()
        driver.cache.check_integrity()
        driver.results |= {update.request_id: update.result for update in updates if update.result is not None}
    driver.compare()
    assert next(calls) > failing
    assert family != "llama" or driver.core.computed_tokens == 23 + 11 + 2 * 13  # no token is computed twice
    for name in ("a", "b"):
        assert driver.results[name].finish_reason == "length"
        check_greedy(driver, name)


@pytest.mark.parametrize("failing", [2, 5])
def test_a_sample_that_has_begun_its_next_step_takes_part_again_if_that_cannot_be_submitted(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stop texts a step is committed before the next one begins: its pages are given back."""
    driver = Driver(
        build("falcon_h1"), decodes="packed", tokenizer=PreTrainedTokenizerFast(tokenizer_object=byte_level())
    )
    assert driver.runner.decoder is not None
    submit, calls = driver.runner.decoder._submit, itertools.count(1)

    def fails() -> Any:
        if next(calls) == failing:
            raise RuntimeError("the device hiccuped")
        return submit()

    monkeypatch.setattr(driver.runner.decoder, "_submit", fails)
    driver.add("a", prompt(23, 1), replace(GREEDY, stop="never said"))
    driver.add("b", prompt(11, 2))
    results = driver.run(limit=50)
    assert next(calls) > failing
    for name in ("a", "b"):
        assert len(results[name].token_ids) == GREEDY.max_tokens
        check_greedy(driver, name)
