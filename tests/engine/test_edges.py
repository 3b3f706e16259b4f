"""Edges: full arenas, steps that fail where they failed before, threads that come too late, input that is no input."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridkv import Engine, SamplingParams
from hybridkv.cache import could_fit
from hybridkv.engine import EngineError
from hybridkv.engine.loop import EngineLoop, Submission
from hybridkv.errors import ConfigError, HybridKVError, RequestError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.drive import GREEDY, Driver, memory_for
from tests.engine.zoo import build, fresh, prompt

OPEN_END = replace(GREEDY, max_tokens=None)
SAMPLES = SamplingParams(n=6, temperature=1.0, max_tokens=9, ignore_eos=True)


def longest_that_fits(driver: Driver) -> int:
    return max(length for length in range(1, 400) if could_fit(driver.cache.layout, length))


# --- full arenas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "qwen3_next", "deepseek_v3"])
def test_what_could_fit_does_fit(family: str) -> None:
    """To the last token, alone: a window that begins inside a block takes one block more."""
    model = build(family)
    for block_tokens in (4, 7, 16):
        memory_bytes = memory_for(model, 1, 90, block_tokens=block_tokens)
        driver = Driver(model, memory_bytes=memory_bytes, block_tokens=block_tokens, max_num_batched_tokens=50)
        length = longest_that_fits(driver)
        driver.add("a", prompt(length - 11, 1), replace(GREEDY, max_tokens=12))
        assert len(driver.run(200)["a"].token_ids) == 12


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_reply_without_a_limit_ends_where_the_arena_does(family: str) -> None:
    model = build(family)
    driver = Driver(model, memory_bytes=memory_for(model, 1, 100))
    driver.add("a", prompt(40, 1), OPEN_END)
    result = driver.run(400)["a"]
    assert (result.finish_reason, result.completions[0].error) == ("length", None)
    assert 40 + len(result.token_ids) - 1 >= longest_that_fits(driver)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_the_longest_request_is_what_memory_allows_and_a_longer_one_is_cut(family: str) -> None:
    model = build(family)
    driver = Driver(model, memory_bytes=memory_for(model, 1, 100))
    longest = longest_that_fits(driver)
    assert driver.core.limits.max_model_len == longest + 1
    driver.add("long", prompt(longest - 3, 1), replace(GREEDY, max_tokens=300))
    driver.add("longest", prompt(longest, 2), replace(GREEDY, max_tokens=300))
    results = driver.run(400)
    assert [len(results[name].token_ids) for name in ("long", "longest")] == [4, 1]
    assert [results[name].finish_reason for name in ("long", "longest")] == ["length"] * 2
    with pytest.raises(RequestError, match="more memory"):
        driver.add("too long", prompt(longest + 1, 3))


def test_memory_is_no_limit_where_the_model_has_a_lower_one() -> None:
    driver = Driver(build("llama"))
    assert (driver.core.limits.max_model_len, driver.core.limits.is_short_of_memory) == (512, False)
    with pytest.raises(RequestError, match=r"within 512; shorten it$"):
        driver.add("a", prompt(512, 1))


def test_a_reply_that_fills_the_arena_ends_once_although_others_wait() -> None:
    model = build("llama")
    driver = Driver(model, memory_bytes=memory_for(model, 1, 100))
    driver.add("a", prompt(40, 1), OPEN_END)
    driver.add("b", prompt(40, 2), OPEN_END)
    driver.add("c", prompt(40, 3))
    results = driver.run(800)
    assert [results[name].finish_reason for name in "abc"] == ["length"] * 3
    assert sum(update.result is not None for update in driver.updates) == 3


def test_samples_keep_to_the_limits_of_a_step() -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=4, max_num_seqs=4)
    driver.add("n", prompt(20, 1), SAMPLES)
    driver.add("beside", prompt(20, 2))
    while driver.core.has_work:
        driver.step()
        assert len(driver.core.scheduler.running) <= 4
        assert sum(len(work.tokens) for work in driver.runner.work) <= 4
    assert [len(one.token_ids) for one in driver.results["n"].completions] == [9] * 6


# --- steps that fail --------------------------------------------------------------------------------------------------


def test_a_prompt_that_always_fails_at_the_same_place_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state was written in place: it begins again, and the steps before that place succeed each time."""
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=16)
    forward = driver.runner._forward

    def fails(frame: Any, *inputs: Any) -> Any:
        if int(frame.positions.max()) > 40:
            raise RuntimeError("too far")
        return forward(frame, *inputs)

    monkeypatch.setattr(driver.runner, "_forward", fails)
    driver.add("a", prompt(60, 1))
    updates = [update for _ in range(20) for update in driver.core.step()]
    assert [update.finish_reason for update in updates] == ["error"]
    assert not driver.core.has_work


def test_failures_far_apart_are_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=16)
    forward = driver.runner._forward
    fails_at = {20, 50, 66}

    def fails(frame: Any, *inputs: Any) -> Any:
        for place in sorted(fails_at):
            if int(frame.positions.max()) >= place:
                fails_at.remove(place)
                raise RuntimeError("a hiccup")
        return forward(frame, *inputs)

    monkeypatch.setattr(driver.runner, "_forward", fails)
    driver.add("a", prompt(60, 1))
    updates = [update for _ in range(60) for update in driver.core.step()]
    assert not fails_at
    assert updates[-1].finish_reason == "length"


def test_every_sample_of_a_request_tells_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(build("qwen3_next"))
    driver.add("n", prompt(20, 1), SAMPLES)
    driver.step()
    driver.step()

    def fails(*args: object) -> object:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(driver.runner, "_forward", fails)
    (result,) = [update.result for _ in range(3) for update in driver.core.step() if update.result]
    assert all("no kernel image" in str(one.error) for one in result.completions)


class Stutterer:
    """A tokenizer that has no text for some tokens, as slow ones have for ids that only pad the vocabulary."""

    eos_token_id = None
    bad: frozenset[int] = frozenset()

    def decode(self, token_ids: list[int], **options: Any) -> str:
        if self.bad & set(token_ids):
            raise TypeError("sequence item 0: expected str instance, NoneType found")
        return "".join(chr(0x4E00 + token) for token in token_ids)


def test_a_token_without_a_text_ends_one_reply_and_not_the_engine() -> None:
    tokenizer = Stutterer()
    with Engine(fresh("llama"), memory="4MiB", device="cpu", tokenizer=tokenizer) as engine:
        fine = engine.generate(prompt(9, 2), GREEDY, progress=False)[0]
        tokens = engine.generate(prompt(9, 1), GREEDY, progress=False)[0].token_ids
        bad = next(token for token in tokens if token not in fine.token_ids)
        tokenizer.bad = frozenset([bad])
        broken, again = engine.generate([prompt(9, 1), prompt(9, 2)], GREEDY, progress=False)
        assert broken.finish_reason == "error"
        assert f"token {bad} cannot become text" in str(broken.completions[0].error)
        assert again.token_ids == fine.token_ids
        with pytest.raises(RequestError, match="cannot be served"):
            engine.generate([7, 8, bad], GREEDY, progress=False)
        assert engine.generate(prompt(9, 2), GREEDY, progress=False)[0].token_ids == fine.token_ids
        engine.check_integrity()


# --- threads ----------------------------------------------------------------------------------------------------------


class SlowCore:
    """A core whose first step waits, and then fails if told to."""

    has_work = waits = False

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.ended: list[str] = []

    def add(self) -> None:
        self.has_work = True

    def step(self) -> list[Any]:
        self.entered.set()
        self.go.wait(10)
        raise AssertionError("books are wrong")

    def abort(self, request_id: str) -> list[Any]:
        self.ended.append(request_id)
        self.has_work = False
        return []


def nothing(message: Any) -> None:
    pass


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)


def test_a_request_that_was_still_in_the_inbox_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    core = SlowCore()
    told: list[Any] = []
    loop = EngineLoop(core)  # type: ignore[arg-type]
    loop.add([Submission("first", nothing, core.add)])
    core.entered.wait(10)
    loop.add([Submission("second", told.append, core.add)])
    core.go.set()
    loop.close()
    assert [type(one) for one in told] == [EngineError]


def test_a_listener_that_has_gone_keeps_nobody_from_hearing_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    core = SlowCore()
    told: list[Any] = []

    def gone(message: Any) -> None:
        raise RuntimeError("Event loop is closed")

    loop = EngineLoop(core)  # type: ignore[arg-type]
    loop.add([Submission("first", gone, core.add)])
    core.entered.wait(10)
    loop.add([Submission("second", told.append, core.add)])
    core.go.set()
    loop.close()
    assert [type(one) for one in told] == [EngineError]


def test_a_request_that_is_refused_when_it_starts_is_told_and_others_go_on() -> None:
    told: list[Any] = []

    def refuse() -> None:
        raise RequestError("request id 'x' is in use")

    loop = EngineLoop(SlowCore())  # type: ignore[arg-type]
    loop.add([Submission("x", told.append, refuse)])
    loop.call(lambda: None)
    assert not loop._sinks, "its id is free again"
    loop.close()
    assert [str(one) for one in told] == ["request id 'x' is in use"]


def test_whoever_comes_in_gets_an_answer_although_the_engine_closes() -> None:
    """Callers and `close` race: each call returns or raises, none waits forever."""
    for _ in range(8):
        engine = Engine(fresh("llama"), memory="4MiB", device="cpu")
        ended: list[str] = []

        def call(engine: Engine = engine, ended: list[str] = ended) -> None:
            try:
                ended.append(engine.generate([5, 6], OPEN_END, progress=False)[0].finish_reason)
            except EngineError:
                ended.append("closed")

        threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(10)
        assert len(ended) == 4
        assert set(ended) <= {"closed", "abort"}


# --- what is refused --------------------------------------------------------------------------------------------------


def broken_copy(checkpoint: Path, directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The checkpoint with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, directory)
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "whole")
    name = "model.layers.0.mlp.down_proj.weight"
    lacking = broken_copy(tmp_path / "whole", tmp_path / "lacking", lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=f"lacks 1 weights, such as {name}"):
        Engine(lacking, memory="4MiB", device="cpu")
    cut = broken_copy(
        tmp_path / "whole", tmp_path / "cut", lambda weights: weights.update({name: weights[name][:3].contiguous()})
    )
    with pytest.raises(ConfigError, match="cannot load"):
        Engine(cut, memory="4MiB", device="cpu")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="cannot load"):
        Engine(cut, memory="4MiB", device="cpu")


@pytest.mark.parametrize(
    "option", [{"kv_cache_dtype": "int8"}, {"state_dtype": "int8"}, {"device": "meta"}, {"max_model_len": -3}]
)
def test_options_that_would_serve_nonsense_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(HybridKVError, match=str(next(iter(option.values())))):
        Engine(fresh("qwen3_next"), **{"memory": "4MiB", "device": "cpu", **option})


@pytest.mark.parametrize("bad", [None, 5, [5.0, 6.0], iter([5])])
def test_prompts_of_no_known_kind_are_refused(bad: Any) -> None:
    with (
        Engine(fresh("llama"), memory="4MiB", device="cpu") as engine,
        pytest.raises(RequestError, match=r"of type (NoneType|int|float|list_iterator)"),
    ):
        engine.generate(bad, GREEDY, progress=False)


@pytest.mark.parametrize("salt", [None, "\ud800"])
def test_a_salt_that_is_no_text_is_refused_and_the_engine_lives(salt: Any) -> None:
    with Engine(fresh("llama"), memory="4MiB", device="cpu") as engine:
        with pytest.raises(RequestError, match="salt"):
            engine.generate([5, 6], GREEDY, cache_salt=salt, progress=False)
        assert len(engine.generate([5, 6], GREEDY, progress=False)) == 1


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    with Engine(tmp_path, memory="4MiB", device="cpu") as engine, pytest.raises(RequestError, match="UTF-8"):
        engine.generate(b"caf\xe9".decode(errors="surrogateescape"), GREEDY, progress=False)
