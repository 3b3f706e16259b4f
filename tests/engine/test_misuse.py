"""What people pass by mistake: each is refused with one line, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridkv import Engine, Prompt, SamplingParams
from hybridkv.errors import ConfigError, HybridKVError, RequestError
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
    assert len(engine.generate(Prompt([5, 6], [1, 2]), GREEDY, progress=False)) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "breakpoints of type NoneType: pass a list of positions"),
        (1, "breakpoints of type int: pass a list"),
        ("1", "breakpoints of type str: pass a list"),
        (iter([1]), "breakpoints of type list_iterator: pass a list"),
        ([1, 3], "breakpoint 3 of a prompt of 2 tokens: choose 0 to 2"),
        (np.array([1, 99]), r"breakpoint .*99.* of a prompt of 2 tokens"),
        (np.array([True]), "breakpoint .*True.*: pass a number of tokens"),
    ],
)
def test_breakpoints_that_are_none_or_beyond_the_prompt_are_refused(bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Prompt([5, 6], bad)
    assert caught.value.param == "breakpoints"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([5, True, 6], "token id True at position 1: a boolean is no id; pass whole numbers"),
        ((5, 6, False), "token id False at position 2: a boolean is no id"),
        (np.array([True, False]), "token id True at position 0: a boolean is no id"),
        (torch.tensor([False, True]), "token id False at position 0: a boolean is no id"),
        ([5, np.True_], "token ids must be integers"),
    ],
)
def test_booleans_are_no_token_ids(engine: Engine, bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate([bad], GREEDY, progress=False)
    ones = [1, 0] * 3
    assert engine.generate([ones], GREEDY, progress=False)[0].prompt_token_ids == ones


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 1, True], "token id True at position 2: a boolean is no id"),
        (torch.tensor([False, True]), "token id False at position 0: a boolean is no id"),
        (np.array([True]), "tokens of dtype bool"),
        (np.array([1.0]), "tokens of dtype float64"),
        (np.array([[1, 2]]), r"tokens of dtype int32 and shape \(1, 2\): pass one row"),
        (["x"], "token ids must be integers"),
        ([5, 2**31], "token ids must be integers that fit into 32 bits"),
        (np.array([5, 2**31]), "token ids must be integers that fit into 32 bits: 2147483648 does not"),
        (torch.tensor([-(2**40)]), "token ids must be integers that fit into 32 bits: -1099511627776 does not"),
        ("text", "a Prompt of type str: it has token ids; pass a list"),
        (7, "a Prompt of type int: it has token ids; pass a list"),
    ],
)
def test_a_prompt_refuses_what_are_no_ids_when_it_is_made(bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Prompt(bad)
    assert caught.value.param == "prompt"


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_model_len": 10.5}, r"max_model_len 10\.5: pass a whole number"),
        ({"max_model_len": "a"}, "max_model_len 'a'"),
        ({"max_num_batched_tokens": "a"}, "max_num_batched_tokens 'a'"),
        ({"max_num_seqs": 1.5}, r"max_num_seqs 1\.5"),
        ({"max_num_seqs": None}, "max_num_seqs None: pass a whole number$"),
        ({"block_size": "16"}, "block_size '16'"),
        ({"row_layers": True}, "row_layers True"),
        ({"attn_pack_size": 1.0}, r"attn_pack_size 1\.0"),
        ({"seed": "a"}, "seed 'a'"),
        ({"seed": 2**70}, "a seed of 71 bits"),
        ({"store": 5}, "a store of type int"),
        ({"store": [5]}, "a store of type list"),
        ({"policy": 3}, "no policy '3'"),
        ({"policy": "x", "block_size": 0}, "no policy 'x'"),
        ({"trust_remote_code": "no"}, "trust_remote_code 'no': pass True or False"),
        ({"graphs": None}, "graphs None: pass True or False"),
        ({"load_timeout_s": "a"}, "load_timeout_s 'a'"),
        ({"dtype": None}, "cannot compute in 'None'"),
        ({"dtype": torch.int8}, r"cannot compute in 'torch\.int8'"),
        ({"kv_cache_dtype": torch.int8}, r"kv_cache_dtype 'torch\.int8'"),
        ({"device": None}, "unknown device 'None'"),
        ({"tokenizer": 5}, "a tokenizer of type int"),
        ({"tokenizer": "/nowhere"}, "no directory '/nowhere'"),
        ({"memory": 1000}, "too little for .*: give it at least [0-9.]+ ?([KM]i)?B$"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(checkpoint: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(HybridKVError, match=message):
        Engine(checkpoint, **{"memory": "4MiB", "device": "cpu", **option})


@pytest.mark.parametrize("model", [None, 5, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="a model of type"):
        Engine(model)


def test_dtypes_and_devices_may_be_torchs(checkpoint: Path) -> None:
    with Engine(checkpoint, memory="4MiB", dtype=torch.bfloat16, device=torch.device("cpu")) as engine:
        assert engine._core.runner.model.dtype is torch.bfloat16


def broken(checkpoint: Path, directory: Path, name: str, text: bytes) -> Path:
    """The checkpoint with another content of one file."""
    shutil.copytree(checkpoint, directory)
    (directory / name).write_bytes(text)
    return directory


def test_a_broken_tokenizer_is_not_taken_for_none(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the tokenizer") as caught:
        Engine(broken(checkpoint, tmp_path / "broken", "tokenizer.json", b"{"), memory="4MiB", device="cpu")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_is_named(checkpoint: Path, tmp_path: Path) -> None:
    half = (checkpoint / "model.safetensors").read_bytes()[:50_000]
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off or damaged: .*; get it again"):
        Engine(broken(checkpoint, tmp_path / "cut", "model.safetensors", half), memory="4MiB", device="cpu")


def test_weights_that_do_not_fit_the_config_are_named(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["vocab_size"] += 16
    other = broken(checkpoint, tmp_path / "other", "config.json", json.dumps(config).encode())
    with pytest.raises(ConfigError, match=r"do not fit its config\.json, such as .*instead of \[336, .*"):
        Engine(other, memory="4MiB", device="cpu")
