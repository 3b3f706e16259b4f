"""The engine as people use it: generate, stream, abort, and what it refuses."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridkv
from hybridkv import Engine, SamplingParams
from hybridkv.engine import EngineError
from hybridkv.errors import ConfigError, HybridKVError, RequestError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.zoo import fresh, make, prompt
from tests.tiny import tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("qwen3_next", directory)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(checkpoint, memory="32MiB", device="cpu") as engine:
        yield engine


def test_texts_and_token_ids(engine: Engine) -> None:
    ids = engine.tokenizer.encode("the quick brown fox")  # type: ignore[union-attr]
    results = engine.generate(["the quick brown fox", ids], GREEDY, progress=False)
    assert results[0].prompt_token_ids == ids
    assert results[0].token_ids == results[1].token_ids
    assert results[0].text == results[1].text
    assert results[0].finish_reason == "length"
    assert len(results[0].token_ids) == 12


def test_one_prompt_or_several_of_any_kind(engine: Engine) -> None:
    assert len(engine.generate("one", GREEDY, progress=False)) == 1
    assert len(engine.generate([5, 6, 7], GREEDY, progress=False)) == 1
    assert len(engine.generate(np.array([5, 6, 7], dtype=np.int32), GREEDY, progress=False)) == 1
    assert len(engine.generate([[5, 6], [7]], GREEDY, progress=False)) == 2
    assert engine.generate([], GREEDY, progress=False) == []


def test_parameters_for_each_prompt(engine: Engine) -> None:
    results = engine.generate(
        [[5, 6], [7, 8]], [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)], progress=False
    )
    assert [len(result.token_ids) for result in results] == [12, 3]
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        engine.generate([[5], [6]], [GREEDY], progress=False)


def test_what_a_result_tells(engine: Engine) -> None:
    tokens = prompt(50, 9)
    first = engine.generate(tokens, SamplingParams(temperature=0, max_tokens=5, logprobs=2), progress=False)[0]
    again = engine.generate(tokens, GREEDY, progress=False)[0]
    assert again.cached_tokens == 48
    assert first.logprobs is not None
    assert len(first.logprobs) == len(first.token_ids)
    assert all(len(one.top) == 2 and one.chosen == max(one.top.values()) for one in first.logprobs)
    metrics = again.metrics
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.total_s
    assert metrics.per_token_s == pytest.approx((metrics.total_s - metrics.ttft_s) / 11)


def test_seeded_samples_do_not_depend_on_company(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=3, n=2, ignore_eos=True)
    alone = engine.generate(prompt(20, 1), params, progress=False)[0]
    among = engine.generate([prompt(30, 2), prompt(20, 1), prompt(9, 3)], params, progress=False)[1]
    assert [one.token_ids for one in alone.completions] == [one.token_ids for one in among.completions]
    assert alone.completions[0].token_ids != alone.completions[1].token_ids


def test_salts_never_meet(engine: Engine) -> None:
    tokens = prompt(60, 11)
    engine.generate(tokens, GREEDY, cache_salt="a", progress=False)
    assert engine.generate(tokens, GREEDY, cache_salt="b", progress=False)[0].cached_tokens == 0
    assert engine.generate(tokens, GREEDY, cache_salt="a", progress=False)[0].cached_tokens == 48


def test_stop_texts_and_stop_tokens_end_a_reply(engine: Engine) -> None:
    full = engine.generate("hello there", GREEDY, progress=False)[0]
    token = full.token_ids[4]
    first = full.token_ids.index(token)
    stopped = engine.generate(
        "hello there",
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[token], ignore_eos=True),
        progress=False,
    )[0]
    assert stopped.token_ids == full.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.completions[0].stop) == ("stop", token)
    piece = full.text[3:6]
    by_text = engine.generate(
        "hello there", SamplingParams(temperature=0, max_tokens=12, stop=piece, ignore_eos=True), progress=False
    )[0]
    assert by_text.text == full.text[: full.text.index(piece)]
    assert (by_text.finish_reason, by_text.completions[0].stop) == ("stop", piece)


def test_streaming_adds_up_to_the_result(engine: Engine) -> None:
    async def collect() -> tuple[list[int], str, Any]:
        ids, text, result = [], "", None
        async for update in engine.stream("stream this please", GREEDY):
            ids += update.token_ids
            text += update.text
            result = update.result
        return ids, text, result

    ids, text, result = asyncio.run(collect())
    assert (ids, text) == (result.token_ids, result.text)
    assert ids == engine.generate("stream this please", GREEDY, progress=False)[0].token_ids


def test_streams_run_side_by_side(engine: Engine) -> None:
    async def one(seed: int) -> list[int]:
        return [token async for update in engine.stream(prompt(15, seed), GREEDY) for token in update.token_ids]

    async def several() -> list[list[int]]:
        return await asyncio.gather(*(one(seed) for seed in range(6)))

    assert asyncio.run(several()) == [
        engine.generate(prompt(15, seed), GREEDY, progress=False)[0].token_ids for seed in range(6)
    ]


def test_leaving_a_stream_aborts_its_request(engine: Engine) -> None:
    async def leave() -> None:
        stream = engine.stream(prompt(20, 1), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    engine.check_integrity()
    assert not engine._core.has_work
    assert not engine._core.cache.leases


def test_threads_share_an_engine(engine: Engine) -> None:
    found: dict[int, list[int]] = {}

    def work(seed: int) -> None:
        found[seed] = engine.generate(prompt(25, seed), GREEDY, progress=False)[0].token_ids

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: engine.generate(prompt(25, seed), GREEDY, progress=False)[0].token_ids for seed in range(5)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "empty"),
        ([4, 99999], "token id 99999.*0 to 319"),
        ([-1], "token id -1"),
        (list(range(4, 300)) * 2, "must stay within 512"),
        (["x"], "integers"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_starts(engine: Engine, bad: Any, message: str) -> None:
    before = engine._core.cache.stats.requests
    with pytest.raises(HybridKVError, match=message):
        engine.generate([[5, 6, 7], bad], GREEDY, progress=False)
    assert engine._core.cache.stats.requests == before


def test_reset_forgets_everything(engine: Engine) -> None:
    tokens = prompt(40, 21)
    engine.generate(tokens, GREEDY, progress=False)
    engine.reset_cache()
    assert engine.generate(tokens, GREEDY, progress=False)[0].cached_tokens == 0


def test_chats_break_at_messages(engine: Engine) -> None:
    messages = [{"role": "system", "content": "be kind " * 8}, {"role": "user", "content": "hello"}]
    rendered = engine.render_chat(messages)
    assert len(rendered.breakpoints) == 1
    tokenizer: Any = engine.tokenizer
    text = tokenizer.decode(rendered.token_ids[: rendered.breakpoints[0]])
    assert text.rstrip().endswith("<|im_end|>")
    result = engine.generate(rendered, GREEDY, progress=False)[0]
    other = engine.generate(
        engine.render_chat([messages[0], {"role": "user", "content": "something else"}]), GREEDY, progress=False
    )[0]
    assert other.cached_tokens >= rendered.breakpoints[0] // 16 * 16 > 0
    assert result.finish_reason == "length"


def test_chats_that_cannot_be_rendered(engine: Engine) -> None:
    with pytest.raises(RequestError, match="at least one message"):
        engine.render_chat([])


def test_a_model_in_memory_needs_no_tokenizer() -> None:
    with Engine(fresh("llama"), memory="4MiB", device="cpu") as engine:
        assert engine.generate([5, 6, 7], GREEDY, progress=False)[0].text == ""
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate("text", GREEDY, progress=False)
        with pytest.raises(RequestError, match="without a tokenizer"):
            engine.generate([5, 6], SamplingParams(stop="x"), progress=False)


def test_a_closed_engine_says_so() -> None:
    engine = Engine(fresh("llama"), memory="4MiB", device="cpu")
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([5], GREEDY, progress=False)


def test_a_bug_in_the_engine_reaches_everyone_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine = Engine(fresh("llama"), memory="4MiB", device="cpu")

    def broken() -> None:
        raise AssertionError("books are wrong")

    monkeypatch.setattr(engine._core, "step", broken)
    with pytest.raises(EngineError, match="books are wrong") as caught:
        engine.generate([5, 6], GREEDY, progress=False)
    assert not isinstance(caught.value, ValueError)
    with pytest.raises(EngineError, match="start a new one"):
        engine.generate([5, 6], GREEDY, progress=False)


def test_what_cannot_be_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        Engine(tmp_path / "nothing here")
    with pytest.raises(ConfigError, match="no directory ''"):
        Engine("")
    with pytest.raises(ConfigError, match=r"has no config\.json: name a directory"):
        Engine(tmp_path)
    with pytest.raises(HybridKVError, match="stream 'layerwise' without a store"):
        Engine(tmp_path / "not even looked at", stream="layerwise")
    with pytest.raises(HybridKVError, match=r"'longcat_flash'.*does not run: each of its .* it runs .*llama"):
        Engine(make(tiny_config("longcat_flash")))
    with pytest.raises(HybridKVError, match="too little"):
        Engine(fresh("llama"), memory=1000)
    with pytest.raises(HybridKVError, match="max_num_seqs"):
        Engine(fresh("llama"), max_num_batched_tokens=10, max_num_seqs=20)
    with pytest.raises(HybridKVError, match="max_num_batched_tokens 0: a step has at least 1 token"):
        Engine(tmp_path / "not even looked at", max_num_batched_tokens=0)
    with pytest.raises(HybridKVError, match=r"memory 1\.5: write a size"):
        Engine(tmp_path / "not even looked at", memory=1.5)  # type: ignore[arg-type]
    with pytest.raises(HybridKVError, match="unknown device"):
        Engine(fresh("llama"), device="abacus")
    with pytest.raises(HybridKVError, match="models run on cpu or cuda"):
        Engine(fresh("llama"), device="meta")
    with pytest.raises(HybridKVError, match="cannot compute in 'fp8'"):
        Engine(fresh("llama"), dtype="fp8")
    with pytest.raises(HybridKVError, match="kv_cache_dtype 'int8'"):
        Engine(fresh("llama"), kv_cache_dtype="int8")


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with Engine(bare, memory="4MiB", device="cpu") as engine:
        assert engine.tokenizer is None
        assert len(engine.generate([5, 6, 7], GREEDY, progress=False)[0].token_ids) == 12
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate("text", GREEDY, progress=False)
    with pytest.raises(ConfigError, match="tokenizer"):
        Engine(checkpoint, memory="4MiB", device="cpu", tokenizer=bare)


def test_texts_that_are_no_unicode_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="bytes that are no text"):
        engine.generate("a\ud800", GREEDY, progress=False)
    with pytest.raises(RequestError, match="bytes that are no text"):
        engine.render_chat([{"role": "user", "content": "\udfff"}])


def test_names_are_found_when_used() -> None:
    assert hybridkv.Engine is Engine
    with pytest.raises(AttributeError, match="nonsense"):
        _ = hybridkv.nonsense
