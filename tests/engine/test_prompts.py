"""A prompt's tokens are packed and scanned once, and looked up once for each time that its request may start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridkv import Engine, Prompt, SamplingParams
from tests.engine.checkpoints import save_checkpoint
from tests.engine.counting import count_work
from tests.engine.drive import Driver
from tests.engine.drive import every_step_is_compared as every_step_is_compared
from tests.engine.zoo import build, prompt

BRIEF = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
IDS = prompt(50, 1)
KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: IDS,
    "tuple": lambda: tuple(IDS),
    "int64 array": lambda: np.array(IDS),
    "int32 array": lambda: np.array(IDS, dtype=np.int32),
    "uint16 array": lambda: np.array(IDS, dtype=np.uint16),
    "every second": lambda: np.repeat(IDS, 2)[::2],
    "tensor": lambda: torch.tensor(IDS),
    "prompt": lambda: Prompt(IDS, [16]),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("qwen3_next", directory)
    with Engine(directory, memory="32MiB", device="cpu") as engine:
        yield engine


async def stream(engine: Engine, asked: Any) -> None:
    async for _ in engine.stream(asked, BRIEF):
        pass


@pytest.mark.parametrize("kind", [*KINDS, "text"])
def test_generate_packs_and_scans_once(engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_work(monkeypatch)
    asked = "the quick brown fox" if kind == "text" else KINDS[kind]()
    [result] = engine.generate(asked, BRIEF, progress=False)
    assert kind == "text" or result.prompt_token_ids == IDS
    assert (counts["packs"], counts["scans"]) == (1, 1)
    assert counts["matches"] == counts["walks"] == 1


@pytest.mark.parametrize("kind", [*KINDS, "text"])
def test_stream_packs_and_scans_once(engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_work(monkeypatch)
    asyncio.run(stream(engine, "the quick brown fox" if kind == "text" else KINDS[kind]()))
    assert (counts["packs"], counts["scans"]) == (1, 1)
    assert counts["matches"] == counts["walks"] == 1


def test_rows_of_a_batch_are_packed_and_scanned_once_each(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_work(monkeypatch)
    engine.generate(np.array([IDS, IDS]), BRIEF, progress=False)
    engine.generate(torch.tensor([IDS, IDS]), BRIEF, progress=False)
    assert (counts["packs"], counts["scans"]) == (4, 4)


def test_a_prompt_that_is_asked_twice_is_packed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_work(monkeypatch)
    ready = engine.prepare(IDS)
    engine.check(ready, BRIEF)
    engine.generate([ready, ready, Prompt(ready.ids, [16])], BRIEF, progress=False)
    assert engine.detokenize(ready) == engine.detokenize(IDS)
    assert (counts["packs"], counts["scans"]) == (2, 2)  # the second is detokenize's list


def test_begin_walks_no_index_that_match_has_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others compute, and where prompts wait for a leader."""
    counts = count_work(monkeypatch)
    driver = Driver(build("qwen3_next"))
    driver.add("a", IDS + prompt(40, 2))
    driver.step()
    assert counts["matches"] == counts["walks"] == 1
    for name, seed in (("b", 3), ("c", 4), ("d", 5)):
        driver.add(name, IDS + prompt(40, seed))
    driver.run()
    assert driver.core.scheduler.followed
    assert counts["matches"] == counts["walks"] > 4
    assert not any(sample.match for sample in driver.core.scheduler.running)


def test_a_store_is_asked_with_the_match_of_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama", tmp_path / "model")
    url = f"file://{tmp_path / 'store'}?size=64MiB"
    with Engine(tmp_path / "model", memory="32MiB", device="cpu", store=url) as engine:
        engine.generate(IDS, BRIEF, progress=False)
    with Engine(tmp_path / "model", memory="32MiB", device="cpu", store=url) as engine:
        counts = count_work(monkeypatch)
        [result] = engine.generate(IDS, BRIEF, progress=False)
        assert result.cached_tokens == 48
    assert (counts["packs"], counts["scans"]) == (1, 1)
    assert counts["matches"] >= 1
    assert counts["walks"] == counts["matches"] + 1, "the load asks the index once which blocks it has"


def test_a_waiting_sample_has_one_buffer() -> None:
    driver = Driver(build("llama"), max_num_seqs=1)
    driver.add("a", IDS)
    driver.add("b", prompt(50, 2))
    driver.step()
    [first], [second] = driver.core.scheduler.running, driver.core.scheduler.waiting
    assert second.tokens is second.tokens is second.request.prompt.ids.packed
    driver.step()
    assert first.tokens is first.tokens
    assert len(first.tokens) == 4 * (50 + len(first.token_ids))
    assert first.tokens == bytes(first.lease.tokens)  # type: ignore[union-attr]
    driver.run()


def test_a_prompt_is_its_ids_and_its_breakpoints() -> None:
    ids = [5, 6, 7]
    one = Prompt(ids, np.array([2]))
    ids.append(8)
    assert (one.token_ids, one.num_tokens, one.breakpoints) == ([5, 6, 7], 3, (2,))
    assert one == Prompt(np.array([5, 6, 7]), (2,)) != Prompt([5, 6, 7])
    assert repr(one) == "Prompt(token_ids=[5, 6, 7], breakpoints=[2])"
    assert (one.ids.lowest, one.ids.highest) == (5, 7)
    assert Prompt([]).num_tokens == 0
