"""What a request asks for is what it gets: ends, limits, penalties, salts, and the order of what comes back."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridkv.engine.engine
from hybridkv import Engine, Prompt, SamplingParams
from hybridkv.engine.loop import Submission
from hybridkv.engine.sampling.sampler import Sampled
from hybridkv.errors import RequestError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.drive import GREEDY, Driver, check_greedy
from tests.engine.zoo import build, fresh, prompt

SAMPLES = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("llama", directory)
    with Engine(directory, memory="16MiB", device="cpu") as engine:
        yield engine


def only(engine: Engine, text: str, **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})
    return engine.generate(text, params, progress=False)[0].completions[0]


@pytest.mark.parametrize("stated_by", ["generation config", "config", "tokenizer"])
def test_an_end_of_sequence_ends_a_reply_whoever_states_it(stated_by: str) -> None:
    model = fresh("llama")
    with Engine(fresh("llama"), memory="4MiB", device="cpu") as engine:
        tokens = engine.generate(prompt(9, 1), GREEDY, progress=False)[0].token_ids
    model.generation_config.eos_token_id = tokens[3] if stated_by == "generation config" else None
    model.config.eos_token_id = tokens[3] if stated_by == "config" else None
    tokenizer = type("Plain", (), {"eos_token_id": tokens[3], "decode": lambda self, ids, **options: ""})()
    with Engine(
        model, memory="4MiB", device="cpu", tokenizer=tokenizer if stated_by == "tokenizer" else None
    ) as engine:
        done = engine.generate(prompt(9, 1), replace(GREEDY, ignore_eos=False), progress=False)[0].completions[0]
        assert done.token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert (done.finish_reason, done.stop) == ("stop", None)
        assert engine.generate(prompt(9, 1), GREEDY, progress=False)[0].token_ids == tokens


def test_stop_texts_wait_for_min_tokens_and_are_shown_if_asked(engine: Engine) -> None:
    full = only(engine, "hello there")
    piece = full.text[:2]
    assert only(engine, "hello there", stop=piece).text == ""
    assert only(engine, "hello there", stop=piece, include_stop_str_in_output=True).text == piece
    assert len(only(engine, "hello there", stop=piece, min_tokens=9).token_ids) >= 9


def test_text_that_might_have_become_a_stop_is_shown_at_the_end(engine: Engine) -> None:
    full = only(engine, "hello there")
    assert only(engine, "hello there", stop=full.text[-1] + "never").text == full.text


def test_penalties_see_what_was_said(engine: Engine) -> None:
    said = only(engine, "hello there", max_tokens=60).token_ids
    assert len(set(said)) < len(said)
    penalised = only(engine, "hello there", max_tokens=60, frequency_penalty=2.0, presence_penalty=2.0).token_ids
    assert len(set(penalised)) > len(set(said))


def test_samples_come_back_in_order() -> None:
    driver = Driver(build("llama"))
    driver.add("n", prompt(20, 1), SAMPLES)
    result = driver.run()["n"]
    assert [one.index for one in result.completions] == [0, 1, 2]
    by_index: dict[int, list[int]] = {}
    for update in driver.updates:
        by_index[update.index] = by_index.get(update.index, []) + update.token_ids
    assert [one.token_ids for one in result.completions] == [by_index[index] for index in range(3)]


def test_updates_add_up_to_logprobs() -> None:
    driver = Driver(build("llama"))
    driver.add("a", prompt(20, 1), replace(GREEDY, logprobs=1))
    result = driver.run()["a"]
    assert [one for update in driver.updates for one in update.logprobs or ()] == result.logprobs


@pytest.mark.parametrize("apart", [{"salt": "other"}, {"extra_keys": ["adapter"]}])
def test_nobody_waits_for_a_prefix_that_it_may_not_share(apart: dict[str, Any]) -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=200)
    driver.add("a", prompt(60, 1))
    driver.add("b", prompt(60, 1), **apart)
    driver.step()
    assert not driver.core.scheduler.waiting
    driver.run()
    driver.add("c", prompt(60, 1), **apart)
    driver.add("d", prompt(60, 1))
    results = driver.run()
    assert [results[name].cached_tokens for name in "abcd"] == [0, 0, 48, 48]


def test_ids_in_use_and_prompts_without_room_for_a_reply_are_refused() -> None:
    driver = Driver(build("llama"))
    driver.add("a", prompt(5, 1))
    with pytest.raises(RequestError, match="'a' is in use"):
        driver.add("a", prompt(5, 2))
    with pytest.raises(RequestError, match="must stay within"):
        driver.add("b", prompt(driver.core.limits.max_model_len, 1))
    driver.add("b", prompt(driver.core.limits.max_model_len - 1, 1), replace(GREEDY, max_tokens=None))
    assert len(driver.run()["b"].token_ids) == 1


def test_a_row_that_cannot_be_sampled_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three samples the second fails at once; of the two requests left one fails later."""
    driver = Driver(build("qwen3_next"))
    sample, bad = driver.core._sampler.sample, iter([1, None, 0])

    def some_fail(logits: Any, rows: Any) -> list[Sampled]:
        sampled = sample(logits, rows)
        if (index := next(bad, None)) is not None:
            sampled[index] = Sampled(-1, error="no token")
        return sampled

    monkeypatch.setattr(driver.core._sampler, "sample", some_fail)
    driver.add("n", prompt(20, 1), SAMPLES)
    result = driver.run()["n"]
    assert [(one.finish_reason, len(one.token_ids)) for one in result.completions] == [
        ("error", 2),
        ("error", 0),
        ("length", 6),
    ]
    driver.cache.reset()
    assert not any(driver.cache.pages_in_use().values())


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_step_of_a_row_that_cannot_be_sampled_is_not_cached(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages hold the values that made its logits unusable."""
    driver = Driver(build(family), max_num_batched_tokens=32)
    monkeypatch.setattr(driver.core._sampler, "sample", lambda logits, rows: [Sampled(-1, error="no token")])
    driver.add("a", prompt(60, 1))
    assert driver.run()["a"].completions[0].error == "no token"
    monkeypatch.undo()
    driver.add("b", prompt(60, 1) + prompt(5, 2))
    assert driver.run()["b"].cached_tokens <= 32
    check_greedy(driver, "b")


@pytest.mark.parametrize("n", [1, 3])
def test_a_token_sampled_from_wrong_pages_does_not_count(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(build("qwen3_next"))
    forward = driver.runner._forward
    told = iter([True])

    def then_invalid(*args: Any) -> Any:
        logits = forward(*args)
        if next(told, False):
            pages = {name: list(table) for name, table in driver.runner.work[0].tables.tables.items()}
            driver.cache.invalidate(pages)
        return logits

    monkeypatch.setattr(driver.runner, "_forward", then_invalid)
    driver.add("a", prompt(40, 1), replace(SAMPLES, n=n))
    assert driver.step() == []
    result = driver.run()["a"]
    assert [len(one.token_ids) for one in result.completions] == [6] * n
    assert driver.core.computed_tokens == 2 * 40 + 5 * n


@pytest.mark.parametrize("logprobs", [None, 1], ids=["submitted before", "submitted after"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_token_decoded_from_wrong_pages_does_not_count(
    family: str, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next decoding step is submitted before the tokens of this one are read, or right after."""
    driver = Driver(build(family), decodes="packed")
    submit, calls = driver.runner.decoder._submit, itertools.count(1)  # type: ignore[union-attr]

    def then_invalid() -> Any:
        decoded = submit()
        if next(calls) == 6:
            [sample] = [one for one in driver.core.scheduler.running if one.request.id == "a"]
            assert sample.lease is not None
            driver.cache.invalidate({name: list(table) for name, table in sample.lease.named_tables.items()})
        return decoded

    monkeypatch.setattr(driver.runner.decoder, "_submit", then_invalid)
    driver.add("a", prompt(20, 1), replace(GREEDY, max_tokens=12, logprobs=logprobs))
    driver.add("b", prompt(30, 2), replace(GREEDY, max_tokens=12))
    results = driver.run()
    assert next(calls) > 6
    for name in ("a", "b"):
        assert len(results[name].token_ids) == 12
        check_greedy(driver, name)
    assert driver.core.computed_tokens > 20 + 30 + 2 * 11, "nothing was computed again"


@pytest.mark.parametrize("when", ["before they are queued", "as soon as they are queued", "while they run"])
def test_an_interrupted_generate_aborts_what_it_asked_for(
    when: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine._loop._submit

    def before(call: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def after(call: Any) -> None:
        monkeypatch.undo()
        submit(call)
        raise KeyboardInterrupt

    def later(news: queue.SimpleQueue[Any], count: int, progress: bool) -> Any:
        news.get()
        raise KeyboardInterrupt

    if when == "while they run":
        monkeypatch.setattr(hybridkv.engine.engine, "collect", later)
    else:
        monkeypatch.setattr(engine._loop, "_submit", before if when == "before they are queued" else after)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(9, 1), prompt(9, 2)], replace(GREEDY, max_tokens=400), progress=False)
    engine.check_integrity()
    assert not engine._core.has_work
    assert not engine._loop._sinks


def test_a_request_that_nobody_listens_to_is_aborted(engine: Engine) -> None:
    def gone(message: Any) -> None:
        raise RuntimeError("Event loop is closed")

    def add() -> None:
        engine._core.add("deaf", Prompt(prompt(9, 1)), replace(GREEDY, max_tokens=400))

    engine._loop.add([Submission("deaf", gone, add)])
    engine.generate(prompt(9, 2), GREEDY, progress=False)
    assert not engine._core.has_work


def test_a_limit_of_the_engine_and_its_dtype() -> None:
    with Engine(fresh("llama"), memory="4MiB", device="cpu", max_model_len=30, dtype="bfloat16") as engine:
        assert engine._core.runner.model.dtype == torch.bfloat16
        assert len(engine.generate(prompt(20, 1), replace(GREEDY, max_tokens=50), progress=False)[0].token_ids) == 10
