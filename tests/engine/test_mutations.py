"""The correctness suite would notice: each test breaks one thing on purpose and sees the comparison fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hybridkv.engine.runner
import hybridkv.engine.seams.stand_in
import hybridkv.engine.tables
from hybridkv.cache import CopyPage, Segment, StepTables
from hybridkv.kernels import registry
from hybridkv.sight import Sight
from tests.engine.drive import Driver
from tests.engine.zoo import FAMILIES, build, prompt

runner_module: Any = hybridkv.engine.runner
tables_module: Any = hybridkv.engine.tables
stand_in: Any = hybridkv.engine.seams.stand_in

RECURRENT = [name for name, family in FAMILIES.items() if family.recurrent]
CONV = [name for name, family in FAMILIES.items() if family.conv]
LOCAL = [name for name, family in FAMILIES.items() if family.window or family.chunk]
ATTENTION = [name for name, family in FAMILIES.items() if family.attention]


def live(family: str) -> None:
    """Chunked prefill beside decodes, a checkpoint inside a prefill, a turn resumed inside a block, a sibling."""
    driver = Driver(build(family), max_num_batched_tokens=48)
    driver.add("a", prompt(100, 1), breakpoints=[32])
    driver.add("b", prompt(70, 2))
    first = driver.run()["a"]
    driver.add("turn", first.prompt_token_ids + first.token_ids + prompt(20, 3))
    driver.add("sibling", prompt(100, 1)[:40] + prompt(30, 4))
    results = driver.run()
    assert results["turn"].cached_tokens == 107
    assert results["sibling"].cached_tokens == 32


@contextmanager
def noticed() -> Iterator[None]:
    with pytest.raises(AssertionError, match="from the stock model"):
        yield


def change_segments(patch: pytest.MonkeyPatch, change: Callable[[list[list[Segment]]], list[list[Segment]]]) -> None:
    make = tables_module.make_segment_table

    def changed(spans: Any, segments: Sequence[Sequence[Segment]], **options: Any) -> Any:
        return make(spans, change([list(one) for one in segments]), **options)

    patch.setattr(tables_module, "make_segment_table", changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_noticed_when_nothing_is_broken(family: str) -> None:
    live(family)


@pytest.mark.parametrize("family", [*RECURRENT, "lfm2"])
def test_states_dropped_between_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    null = (0,)
    change_segments(
        monkeypatch, lambda all_: [[one._replace(src=null * len(one.src)) for one in request] for request in all_]
    )
    with noticed():
        live(family)


@pytest.mark.parametrize("family", [*RECURRENT, "lfm2"])
def test_a_state_read_from_another_request_s_page(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(all_: list[list[Segment]]) -> list[list[Segment]]:
        if len(all_) > 1 and all_[0][0].start and all_[1][0].start:
            src = all_[1][0].src
            all_[0][0] = all_[0][0]._replace(src=src)
        return all_

    change_segments(monkeypatch, swap)
    with noticed():
        live(family)


@pytest.mark.parametrize("family", [*RECURRENT, "lfm2"])
def test_a_checkpoint_inside_a_prefill_taken_too_late(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary at 32 is moved to 33: the page kept for 32 holds the state after one token more."""

    def late(all_: list[list[Segment]]) -> list[list[Segment]]:
        for request in all_:
            for index in range(len(request) - 1):
                request[index] = request[index]._replace(end=request[index].end + 1)
                request[index + 1] = request[index + 1]._replace(start=request[index + 1].start + 1)
        return all_

    change_segments(monkeypatch, late)
    with noticed():
        live(family)


@pytest.mark.parametrize("family", CONV)
def test_convolution_inputs_forgotten(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = registry.KERNELS["conv"]

    def forgetful(x: Any, weight: Any, bias: Any, activation: Any, states: Any, table: Any) -> Any:
        return stock(x, weight, bias, activation, torch.zeros_like(states), table)

    monkeypatch.setitem(registry.KERNELS, "conv", forgetful)
    with noticed():
        live(family)


@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("family", LOCAL)
def test_a_window_off_by_one(family: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tables_module.make_token_table

    def wrong(*args: Any, sight: Sight, **options: Any) -> Any:
        window = sight.window + offset if sight.window else None
        chunk = sight.chunk + offset if sight.chunk else None
        return make(*args, sight=Sight(window, chunk), **options)

    monkeypatch.setattr(tables_module, "make_token_table", wrong)
    with noticed():
        live(family)


@pytest.mark.parametrize("family", ATTENTION)
def test_a_tail_that_was_not_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn resumes inside a block: without the copy it reads what the fresh page held before."""
    from hybridkv.memory import Memory

    run = Memory.run
    monkeypatch.setattr(Memory, "run", lambda self, ops: run(self, [op for op in ops if not isinstance(op, CopyPage)]))
    with noticed():
        live(family)


@pytest.mark.parametrize("family", ATTENTION)
def test_tokens_written_one_slot_off(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = registry.KERNELS["write_tokens"]

    def wrong(first: Any, second: Any, table: Any, key: Any, value: Any) -> None:
        write(first, second, table, key.roll(1, 0), value.roll(1, 0))

    monkeypatch.setitem(registry.KERNELS, "write_tokens", wrong)
    with noticed():
        live(family)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.rotary])
def test_positions_that_count_the_packed_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runner_module.Runner._forward

    def wrong(self: Any, frame: Any, *inputs: Any) -> Any:
        frame.positions = torch.arange(len(frame.positions), device=frame.positions.device)
        return forward(self, frame, *inputs)

    monkeypatch.setattr(runner_module.Runner, "_forward", wrong)
    with noticed():
        live(family)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_page_of_another_request(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tables_module.make_token_table

    def wrong(spans: Any, tables: Any, **options: Any) -> Any:
        if len(tables) > 1:
            tables = [tables[0], type(tables[1])("i", [tables[0][0], *tables[1][1:]]), *tables[2:]]
        return make(spans, tables, **options)

    monkeypatch.setattr(tables_module, "make_token_table", wrong)
    with noticed():
        live(family)


def test_llama4_scales_by_the_position_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.PagedCache, "get_seq_length", lambda self, layer_idx=None: 0)
    with noticed():
        live("llama4")


def test_tables_are_explicit_about_positions() -> None:
    """What the mutations above rely on: nothing is inferred from shapes."""
    assert StepTables._fields[:3] == ("start", "end", "block_tokens")
