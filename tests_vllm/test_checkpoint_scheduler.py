"""Our scheduler inside vLLM: prefill chunks end where states are worth saving, and no token differs.

The store that it leaves is then read by an embedded engine: the two share what they store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import FAMILIES, Family
from engines import Engine, file_url, tokens, transfer_config
from oracle import Oracle
from shelves import forget
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

import hybridkv
from hybridkv.engine import SamplingParams
from hybridkv.integrations.vllm.checkpoint_scheduler import breakpoints_of, cut
from hybridkv.store import Store, open_store

SCHEDULER = "hybridkv.integrations.vllm.checkpoint_scheduler.CheckpointScheduler"
QWEN = FAMILIES["qwen3_next"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", params=["qwen3_next"])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def oracle(start: Callable[..., Engine]) -> Iterator[Oracle]:
    engine = start(QWEN, enable_prefix_caching=False, max_num_batched_tokens=2048)
    yield Oracle(engine)
    engine.close()


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], directory: Path) -> Iterator[Engine]:
    config = transfer_config([file_url(directory)])
    engine = start(QWEN, kv_transfer_config=config, scheduler_cls=SCHEDULER, max_num_batched_tokens=2048)
    yield engine
    engine.close()


def test_a_repeated_prompt_is_found_up_to_its_last_block(engine: Engine, oracle: Oracle, directory: Path) -> None:
    first = engine.ask(tokens(700, seed=1))
    forget(engine, directory)
    again = engine.ask(tokens(700, seed=1))
    assert (first.cached, again.cached) == (0, 688)
    oracle.check(first)
    oracle.check(again)


def test_siblings_share_a_prefix_that_ends_inside_a_block(engine: Engine, oracle: Oracle, directory: Path) -> None:
    siblings = []
    for seed in range(10, 14):
        siblings.append(engine.ask(tokens(560, seed=2) + tokens(400, seed)))
        forget(engine, directory)
    assert [one.cached for one in siblings] == [0, 512, 512, 512]
    for one in siblings:
        oracle.check(one)


def test_where_chunks_are_cut() -> None:
    assert cut(0, 1500, 1500, 512, []) == 512
    assert cut(512, 988, 1500, 512, []) == 512
    assert cut(1024, 476, 1500, 512, []) == 1488 - 1024
    assert cut(1488, 12, 1500, 512, []) == 12
    assert cut(0, 1500, 1500, 0, []) == 1488, "no grid"
    assert cut(0, 1500, 1500, 0, [845, 1500, -3, 10**9]) == 832, "a breakpoint, rounded down to a block"
    assert cut(480, 1020, 1500, 512, []) == 1024 - 480, "a chunk of 32 tokens is not worth a state"
    assert cut(512, 448, 960, 512, [560]) == 48, "but a breakpoint is wanted"
    assert cut(1500, 1, 1500, 512, []) == 1, "decoding"


def test_breakpoints_that_are_none_are_left_out() -> None:
    for params, expected in (
        (None, []),
        ({}, []),
        ({"breakpoints": [5, "x", None, 7.5, 20]}, [5, 20]),
        ({"breakpoints": "none"}, []),
    ):
        assert breakpoints_of(SimpleNamespace(kv_transfer_params=params)) == expected


def test_vllms_anthropic_endpoint_passes_breakpoints_by_kv_transfer_params_alone() -> None:
    """It drops cache_control. If this fails, breakpoints can be taken from there."""
    block = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    asked = AnthropicMessagesRequest.model_validate(
        {
            "model": "x",
            "max_tokens": 1,
            "system": [block],
            "messages": [{"role": "user", "content": [block]}],
            "kv_transfer_params": {"breakpoints": [32]},
        }
    )
    chat = AnthropicServingMessages.to_chat_completion_request(asked)
    args = chat.to_sampling_params(1, {}).extra_args
    assert breakpoints_of(SimpleNamespace(kv_transfer_params=args["kv_transfer_params"])) == [32]
    assert "cache_control" not in str(chat.messages)


def test_an_embedded_engine_finds_what_vllm_stored_and_would_have_stored_the_same(
    engine: Engine, directory: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Names are equal, and values but for rounding: heads, parts, and the orientation of states agree."""
    prompt = tokens(700, seed=3)
    engine.ask(prompt)
    forget(engine, directory)
    model, greedy = checkpoints[QWEN.name], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    options = {"memory": "256MiB", "device": "cpu", "dtype": QWEN.dtype, "state_dtype": QWEN.dtype}
    with hybridkv.Engine(model, **options, store=file_url(directory)) as embedded:
        (found,) = embedded.generate([prompt], greedy)
    assert found.cached_tokens == 688
    with hybridkv.Engine(model, **options, store=file_url(tmp_path)) as embedded:
        embedded.generate([prompt], greedy)
        embedded.flush_store()
    with open_store(file_url(directory)) as theirs, open_store(file_url(tmp_path)) as ours:
        names = {one.name for one in theirs.objects()} & {one.name for one in ours.objects()}
        assert {name.group for name in names} == {"full", "state"}
        for name in names:
            for one, other in zip(rows_of(theirs, name), rows_of(ours, name), strict=True):
                together = torch.stack([one, other])
                assert torch.corrcoef(together)[0, 1] > 0.95, name  # rounding; transposed values have none


def rows_of(store: Store, name: object) -> list[torch.Tensor]:
    with store.open(name) as reader:
        rows = [bytearray(row.nbytes) for row in reader.header.rows]
        for number, row in enumerate(rows):
            reader.read(number, [memoryview(row)])
    return [torch.frombuffer(row, dtype=torch.bfloat16).float() for row in rows]
