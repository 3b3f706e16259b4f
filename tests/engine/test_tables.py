"""All tables of a step are there before the model runs, and may lie in the same buffers step after step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridkv.engine.seams import active
from hybridkv.kernels import segments, table
from hybridkv.memory import Uploader
from tests.engine.drive import GREEDY, Driver
from tests.engine.zoo import FAMILIES, build, prompt

MAKERS: list[tuple[Any, str]] = [
    (Uploader, "send"),
    (table.TokenTable, "_make_mask"),
    (table.TokenTable, "_make_band"),
    (segments, "make_schedule"),
    (segments, "make_edges"),
]
"""All that makes a part of a table."""


def live(driver: Driver) -> None:
    """Prefill in chunks beside decodes, a checkpoint inside a prefill, a turn that resumes, short and single spans."""
    driver.add("a", prompt(100, 1), breakpoints=[32])
    driver.add("b", prompt(7, 2), replace(GREEDY, max_tokens=20))
    first = driver.run()["a"]
    driver.add("turn", first.prompt_token_ids + first.token_ids + prompt(3, 3))
    driver.add("c", prompt(30, 4))
    driver.run()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_made_while_the_model_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def watch(owner: Any, name: str) -> None:
        make = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            made.append((name, active() is not None))
            return make(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in MAKERS:
        watch(owner, name)
    live(Driver(build(family), max_num_batched_tokens=48))
    assert {name for name, is_late in made if is_late} == set()
    kinds = FAMILIES[family]
    expected = {"send"} | ({"_make_mask", "_make_band"} if kinds.attention else set())
    expected |= ({"make_edges"} if kinds.conv else set()) | ({"make_schedule"} if kinds.recurrent else set())
    assert {name for name, _ in made} == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "jamba", "kimi_linear", "deepseek_v3"])
def test_tables_in_buffers_that_stay(family: str) -> None:
    """As on a GPU: every logit is compared."""
    driver = Driver(build(family), max_num_batched_tokens=48)
    driver.runner.uploader.is_persistent = driver.memory._uploader.is_persistent = True
    live(driver)
    assert driver.runner.uploader._buffers


def test_steps_of_the_same_shape_have_tables_at_the_same_addresses() -> None:
    driver = Driver(build("qwen3_next"))
    driver.runner.uploader.is_persistent = True
    seen: list[dict[str, int]] = []

    class Addresses:
        def before_layer(self, layer: int, frame: Any) -> None:
            if layer == 0:
                [tokens] = frame.tables.tokens.values()
                states = next(iter(frame.tables.segments.values()))
                if len(frame.positions) == 2 and states.ones is not None:
                    tensors = {"positions": frame.positions, "pages": tokens.pages, "src": states.ones.src.on_device}
                    seen.append({name: tensor.data_ptr() for name, tensor in tensors.items()})

        def after_layer(self, layer: int, frame: Any, hidden: torch.Tensor) -> None: ...

    driver.runner.observe(Addresses())
    driver.add("a", prompt(20, 1))
    driver.add("b", prompt(30, 2))
    driver.run()
    assert len(seen) > 3
    assert all(addresses == seen[0] for addresses in seen)


def test_llama4_is_told_positions_from_the_step_s_own_record() -> None:
    """Nothing is made for it while the model runs."""
    driver = Driver(build("llama4"))
    seen = 0

    class Asks:
        def before_layer(self, layer: int, frame: Any) -> None:
            nonlocal seen
            shifts = driver.runner._cache.get_seq_length(layer)
            assert shifts.untyped_storage().data_ptr() == frame.positions.untyped_storage().data_ptr()
            assert torch.equal(shifts + torch.arange(len(shifts)), frame.positions)
            seen = max(seen, len(set(shifts.tolist())))

        def after_layer(self, layer: int, frame: Any, hidden: torch.Tensor) -> None: ...

    driver.runner.observe(Asks())
    driver.add("a", prompt(20, 1))
    driver.add("b", prompt(3, 2))
    driver.run()
    assert seen == 2
