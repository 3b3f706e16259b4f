"""What people pass by mistake: each is refused with one line, and the engine goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridkv import Engine, Prompt, SamplingParams
from hybridkv.errors import RequestError
from tests.engine.checkpoints import save_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("qwen3_next", directory)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(checkpoint, memory="32MiB", device="cpu") as engine:
        yield engine


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "a"}, "prompts of type dict: pass a text"),
        ({"a", "b"}, "prompts of type set"),
        (b"abc", "prompts of type bytes"),
        ([{"role": "user", "content": "a"}], "a prompt of type dict: .*render_chat"),
        ([["x"]], "token ids must be integers"),
        ([[5, 6], [5, 99999]], "prompt 2 of 2: token id 99999"),
        ([[5, 6], None], "prompt 2 of 2: a prompt of type NoneType"),
    ],
)
def test_prompts_that_are_none_say_which_and_why(engine: Engine, bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(bad, GREEDY, progress=False)


@pytest.mark.parametrize("bad", [{"max_tokens": 3}, 3, "x", [{"max_tokens": 3}], iter([GREEDY])])
def test_params_that_are_none_are_refused(engine: Engine, bad: Any) -> None:
    async def stream() -> None:
        async for _ in engine.stream([5, 6], bad):
            pass

    with pytest.raises(RequestError, match=r"params of type .*: pass SamplingParams"):
        engine.generate([[5, 6]], bad, progress=False)
    with pytest.raises(RequestError, match=r"params of type .*: pass SamplingParams"):
        asyncio.run(stream())


@pytest.mark.parametrize("bad", ["a", -1, 1.5, None, True])
def test_a_breakpoint_that_is_no_position_is_refused_and_the_engine_lives(engine: Engine, bad: Any) -> None:
    with pytest.raises(RequestError, match=r"breakpoint .*: pass a number of tokens"):
        engine.generate(Prompt([5, 6], [bad]), GREEDY, progress=False)
    assert len(engine.generate(Prompt([5, 6], [1, 99]), GREEDY, progress=False)) == 1


def test_tensors_and_arrays_are_prompts(engine: Engine) -> None:
    rows = [[5, 6, 7], [8, 9, 10]]
    expected = [result.token_ids for result in engine.generate(rows, GREEDY, progress=False)]
    for prompts in (torch.tensor(rows), np.array(rows), list(torch.tensor(rows))):
        assert [result.token_ids for result in engine.generate(prompts, GREEDY, progress=False)] == expected
    assert engine.generate(torch.tensor(rows[0]), GREEDY, progress=False)[0].token_ids == expected[0]


@pytest.mark.parametrize("bad", ["hello", ["hello"], {"role": "user", "content": "a"}])
def test_messages_that_are_none_are_refused(engine: Engine, bad: Any) -> None:
    with pytest.raises(RequestError, match="a chat is a list of messages"):
        engine.render_chat(bad)
