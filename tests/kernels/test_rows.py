"""Each kind of row that a step may have, for each kernel: ragged, mixed, chunked, padded and recycled.

Padding is full of NaN and infinity. It gives zero, and neither another row nor a byte of the arena shows that it was
there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybridkv.kernels import resident
from hybridkv.kernels.attention import attend, attend_visible
from hybridkv.kernels.conv import conv
from hybridkv.kernels.lightning import lightning
from hybridkv.kernels.mamba import mamba1, mamba2
from hybridkv.kernels.pages import PageNumbers
from hybridkv.kernels.segments import SegmentTable, StateNeed, make_segment_table
from hybridkv.kernels.spans import PADDED
from hybridkv.kernels.table import AttentionNeed
from hybridkv.kernels.tokens import gather_tokens, make_token_table, write_tokens
from hybridkv.memory import Uploader
from tests.devices import ON_GPU
from tests.kernels import test_conv, test_delta, test_lightning, test_mamba
from tests.kernels.arenas import LAYOUTS, Arena, Step, make_step, packed, random_contents, reference
from tests.kernels.states import CPU, Advance, StateStep, check_step, step_of

TABLES: list[Any] = [("cpu", False), ("cpu", True)]
if ON_GPU:
    TABLES.append(pytest.param(("cuda", True), marks=pytest.mark.cuda))


@pytest.fixture(params=TABLES, ids=lambda table: f"{table[0]}, {'padding in the table' if table[1] else 'left out'}")
def persistent(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether tables lie in buffers that stay, and so keep padding. All tensors of the test are on its device."""
    device, is_persistent = request.param
    with torch.device(device):
        yield is_persistent


# --- convolutions and scans -------------------------------------------------------------------------------------------

STATE_ROWS: dict[str, StateStep] = {
    "ragged": step_of([5, 17, 2, 33], srcs=["own", "null", "fresh", "own"]),
    "mixed": step_of([1, 20, 1, 1, 7], srcs=["own", "null", "shared", "shared", "own"]),
    "chunked": step_of([40, 9, 1], cuts=[[16, 32], [1, 3], []], srcs=["own", "fresh", "own"]),
    "padded": step_of(
        [1, 3, 1, 20, 2, 1, 9, 1, 40],
        cuts=[[], [1], [], [16], [], [], [], [], []],
        srcs=["own", "padded", "padded", "fresh", "padded", "null", "own", "padded", "padded"],
    ),
    "padded decode": step_of([1] * 5, srcs=["own", "shared", "null", "padded", "padded"]),
    "padded first": step_of([4, 12, 1], srcs=["padded", "own", "own"]),
    "padded in pages of several": step_of([1, 6, 1, 6], [[], [2], [], []], ["own", "own", "padded", "padded"], 3, 2),
    "only padding": step_of([1, 6], srcs=["padded", "padded"]),
}


class Kernel(NamedTuple):
    """A kernel with its weights."""

    shape: tuple[int, ...]
    """Of a state."""
    inputs: Callable[[int], tuple[Tensor, ...]]
    """One row a token each."""
    run: Callable[[tuple[Tensor, ...]], Callable[[Tensor, SegmentTable], Tensor]]
    advance: Callable[[tuple[Tensor, ...]], Advance]


def _conv() -> Kernel:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    return Kernel(
        (6, 3),
        lambda n: (torch.randn(n, 6),),
        lambda x: lambda states, table: conv(x[0], weight, bias, "silu", states, table),
        lambda x: test_conv.make_advance(x[0], weight, bias, "silu"),
    )


def _delta(channels: bool) -> Kernel:
    return Kernel(
        (test_delta.H, test_delta.DK, test_delta.DV),
        lambda n: test_delta.make_inputs(n, channels),
        lambda x: test_delta.run(test_delta.Inputs(*x)),
        lambda x: test_delta.make_advance(test_delta.Inputs(*x)),
    )


def _mamba2() -> Kernel:
    heads = test_mamba.H
    a, d, dt_bias = test_mamba.make_inputs(1).a, torch.randn(heads), torch.randn(heads)

    def inputs(n: int) -> tuple[Tensor, ...]:
        x, dt, _, b, c = test_mamba.make_inputs(n)
        return x, dt, b, c

    def whole(x: tuple[Tensor, ...]) -> test_mamba.Inputs:
        return test_mamba.Inputs(x[0], x[1], a, x[2], x[3])

    return Kernel(
        (heads, test_mamba.P, test_mamba.S),
        inputs,
        lambda x: lambda states, table: mamba2(*whole(x), states, table, d=d, dt_bias=dt_bias),
        lambda x: test_mamba.make_advance(whole(x), d, dt_bias),
    )


def _mamba1() -> Kernel:
    a = test_mamba.make_inputs1(1).a
    d, dt_bias = torch.randn(2, test_mamba.CHANNELS)

    def inputs(n: int) -> tuple[Tensor, ...]:
        x, dt, _, b, c = test_mamba.make_inputs1(n)
        return x, dt, b, c, torch.randn(n, test_mamba.CHANNELS)

    def whole(x: tuple[Tensor, ...]) -> test_mamba.Inputs:
        return test_mamba.Inputs(x[0], x[1], a, x[2], x[3])

    return Kernel(
        (test_mamba.CHANNELS, test_mamba.S),
        inputs,
        lambda x: lambda states, table: mamba1(*whole(x), states, table, d=d, dt_bias=dt_bias, z=x[4]),
        lambda x: test_mamba.make_advance1(whole(x), d, dt_bias, x[4]),
    )


def _lightning() -> Kernel:
    heads, dim = test_lightning.H, test_lightning.D
    slope = torch.rand(heads)
    return Kernel(
        (heads, dim, dim),
        lambda n: tuple(torch.randn(3, n, heads, dim)),
        lambda x: lambda states, table: lightning(x[0], x[1], x[2], slope, states, table),
        lambda x: test_lightning.make_advance(x[0], x[1], x[2], slope),
    )


KERNELS: dict[str, Callable[[], Kernel]] = {
    "conv": _conv,
    "gated_delta": lambda: _delta(False),
    "kimi_delta": lambda: _delta(True),
    "mamba2": _mamba2,
    "mamba1": _mamba1,
    "lightning": _lightning,
}

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_way = pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["one by one", "together"])


def poisoned(step: StateStep, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.index_fill(0, torch.tensor(step.padded_rows, dtype=torch.int64), math.nan) for x in inputs)


@each_way
@pytest.mark.parametrize("rows", STATE_ROWS)
@each_kernel
def test_states_are_right_and_no_other_byte_changes(
    kernel: str, rows: str, min_bytes: int, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", min_bytes)
    step, one = STATE_ROWS[rows]._replace(persistent=persistent), KERNELS[kernel]()
    inputs = poisoned(step, one.inputs(step.num_tokens))
    check_step(step, step.arena(*one.shape), one.run(inputs), one.advance(inputs), 2e-5)


@each_way
@pytest.mark.parametrize("rows", [name for name in STATE_ROWS if name.startswith("padded")])
@each_kernel
def test_padding_changes_no_state_and_no_row(
    kernel: str, rows: str, min_bytes: int, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", min_bytes)
    step, one = STATE_ROWS[rows]._replace(persistent=persistent), KERNELS[kernel]()
    inputs = poisoned(step, one.inputs(step.num_tokens))
    real = [row for row in range(step.num_tokens) if row not in step.padded_rows]
    padded_arena = step.arena(*one.shape)
    arena = padded_arena.clone()
    expected = one.run(tuple(x[real] for x in inputs))(arena[:, 1], step.without_padding.table)
    actual = one.run(inputs)(padded_arena[:, 1], step.table)
    torch.testing.assert_close(actual[real], expected, rtol=1e-6, atol=1e-6)
    assert not actual[step.padded_rows].any()
    torch.testing.assert_close(padded_arena, arena, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_padding_is_in_tables_that_stay() -> None:
    step = STATE_ROWS["padded"]._replace(persistent=True)
    assert step.table.ones is not None
    rows = [span.row for span in step.spans if span.length == 1]
    padded = [row in step.padded_rows for row in rows]
    for pages in (step.table.ones.src, step.table.ones.dst):
        assert (pages.on_device == PADDED).tolist() == padded
    for src in (step.table.schedule(8).src, step.table.edges(3).src):
        assert src.on_device.tolist().count(PADDED) == 3


def test_segment_tables_lie_where_they_lay_whatever_is_padded() -> None:
    uploader = Uploader(CPU, persistent=True)

    def places(*padded: int) -> dict[str, tuple[Any, ...]]:
        srcs = ["padded" if index in padded else "fresh" for index in range(6)]
        step = step_of([1, 20, 1, 5, 1, 2], srcs=srcs)
        uploader.begin()
        table = make_segment_table(step.spans, step.segments, uploader=uploader)
        table.prepare([StateNeed(3, 16)])
        assert table.ones is not None
        assert table.padded is not None
        assert table.padded.nonzero().flatten().tolist() == step.padded_rows
        schedule, edges = table.schedule(16), table.edges(3)
        found = {"padded": table.padded, "src": table.ones.src.on_device, "dst": table.ones.dst.on_device}
        found |= {f"schedule.{name}": value for name, value in tensors(schedule).items()}
        found |= {f"edges.{name}": value for name, value in tensors(edges).items()}
        return {name: (tensor.data_ptr(), tensor.shape) for name, tensor in found.items()}

    assert places(0, 3) == places(1, 2, 4) == places(5) == places(*range(6))


def tensors(record: Any) -> dict[str, Tensor]:
    """All there are at the top of it."""
    if isinstance(record, tuple):
        fields = record._asdict()  # type: ignore[attr-defined]
    else:
        fields = {one.name: getattr(record, one.name) for one in dataclasses.fields(record)}
    found = {name: value.on_device if isinstance(value, PageNumbers) else value for name, value in fields.items()}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def test_pages_written_together_leave_padding_out() -> None:
    """As on a GPU, where no row of a copy can be left out."""
    view = torch.zeros(5, 2, 3)
    pages = PageNumbers(torch.tensor([3, PADDED, 1, PADDED]), [3, PADDED, 1, PADDED])
    values = torch.full((4, 2, 3), math.nan)
    values[0], values[2] = 3, 1
    before = values.clone()
    pages.write_together(values, view)
    assert view[:, 0, 0].tolist() == [0, 1, 0, 3, 0]
    assert not view[0].any()
    assert torch.equal(values.isnan(), before.isnan())
    assert pages.read(view)[:, 0, 0].tolist() == [3, 0, 1, 0]


@each_way
@each_kernel
def test_a_recycled_page_starts_over(kernel: str, min_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New requests get the pages, and the rows, of those that were there before."""
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", min_bytes)
    one, before = KERNELS[kernel](), step_of([1, 30, 4, 1])
    arena = before.arena(*one.shape)
    one.run(one.inputs(before.num_tokens))(arena[:, 1], before.table)
    after = step_of([1, 30, 4, 1], srcs=["null"] * 4)
    owners = [parts[-1].dst for parts in before.segments]
    segments = [[parts[0]._replace(dst=dst)] for parts, dst in zip(after.segments, reversed(owners), strict=True)]
    after = after._replace(segments=segments, num_pages=before.num_pages)
    inputs = one.inputs(after.num_tokens)
    check_step(after, arena, one.run(inputs), one.advance(inputs), 2e-5)


# --- tokens and attention ---------------------------------------------------------------------------------------------

TOKEN_ROWS: dict[str, list[tuple[int, int]]] = {
    "ragged": [(0, 5), (7, 40), (30, 32), (0, 19)],
    "mixed": [(9, 10), (0, 20), (33, 34), (5, 6), (60, 67)],
    "chunked": [(16, 48), (3, 12), (48, 49)],
    "padded": [(9, 10), (0, 1), (0, 20), (0, 5), (33, 34), (0, 3), (4, 44), (0, 30)],
    "padded decode": [(9, 10), (33, 34), (50, 51), (0, 1), (0, 1)],
    "padded first": [(0, 1), (0, 20)],
    "only padding": [(0, 1), (0, 20)],
}
TOKEN_PADDING = {"padded": {1, 3, 5, 7}, "padded decode": {3, 4}, "padded first": {0}, "only padding": {0, 1}}
SIGHTS: dict[str, dict[str, Any]] = {"full": {}, "window": {"window": 7}, "chunk": {"chunk": 12}}


class Problem:
    """A step that writes its tokens and attends. `expected` is what the arena must hold, made without a table."""

    def __init__(self, step: Step, layout: str = "tokens", arena: Arena | None = None) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        self.step = step
        self.arena = Arena(step, layout, 2, (8, 8)) if arena is None else arena
        self.contents = [random_contents(step, 2, 8, generator) for _ in range(2)]
        self.query = torch.full((step.num_tokens, 4, 8), math.nan)
        self.query[step.real_rows] = torch.randn(len(step.real_rows), 4, 8, generator=generator)
        twin = Arena(step, layout, 2, (8, 8))
        for view, content in zip((self.arena.keys, self.arena.values), self.contents, strict=True):
            self.arena.put_past(view, content)
        twin.buffer.copy_(self.arena.buffer)
        for view, content in zip((twin.keys, twin.values), self.contents, strict=True):
            for index in step.real:
                for position in range(step.spans[index].start, step.spans[index].end):
                    view[step.slot(index, position)] = content[index][position]
        self.expected = twin.buffer

    def attend(self, gathers: bool) -> Tensor:
        table = self.step.table()
        for view, content in zip((self.arena.keys, self.arena.values), self.contents, strict=True):
            write_tokens(view, table, packed(self.step, content))
        if not gathers:
            return attend(self.query, self.arena.keys, self.arena.values, table, scale=0.3)
        key, value = (gather_tokens(view, table) for view in (self.arena.keys, self.arena.values))
        return attend_visible(self.query, key, value, table, scale=0.3)

    def check(self, gathers: bool) -> None:
        answer = reference(self.step, self.query, self.contents[0], self.contents[1], 0.3)
        torch.testing.assert_close(self.attend(gathers).double(), answer, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(self.arena.buffer, self.expected, rtol=0, atol=0, equal_nan=True)


each_source = pytest.mark.parametrize("gathers", [False, True], ids=["pages", "gathered"])


@each_source
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("rows", TOKEN_ROWS)
def test_attention_is_right_and_no_other_byte_changes(
    rows: str, sight: str, layout: str, gathers: bool, persistent: bool
) -> None:
    step = make_step(TOKEN_ROWS[rows], **SIGHTS[sight], padded=TOKEN_PADDING.get(rows, ()))
    Problem(replace(step, persistent=persistent), layout).check(gathers)


@each_source
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("rows", [rows for rows in TOKEN_PADDING if rows != "only padding"])
def test_padding_changes_no_token_and_no_row(rows: str, sight: str, gathers: bool, persistent: bool) -> None:
    step = make_step(TOKEN_ROWS[rows], **SIGHTS[sight], padded=TOKEN_PADDING[rows])
    step = replace(step, persistent=persistent)
    padded, plain = Problem(step), Problem(step.without_padding)
    plain.query = padded.query[step.real_rows]
    plain.contents = [[content[index] for index in step.real] for content in padded.contents]
    plain.arena.buffer.copy_(padded.arena.buffer)
    actual = padded.attend(gathers)
    torch.testing.assert_close(actual[step.real_rows], plain.attend(gathers), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded.arena.buffer, plain.arena.buffer, rtol=0, atol=0, equal_nan=True)
    is_real = torch.zeros(step.num_tokens, dtype=torch.bool)
    is_real[step.real_rows] = True
    assert not actual[~is_real].any()


@pytest.mark.parametrize("rows", TOKEN_PADDING)
def test_the_slots_of_padding_say_so(rows: str) -> None:
    step = make_step(TOKEN_ROWS[rows], padded=TOKEN_PADDING[rows])
    table = step.table()
    padded = sorted(set(range(step.num_tokens)) - set(step.real_rows))
    assert (table.pages == PADDED).nonzero().flatten().tolist() == padded
    assert (table.offsets == PADDED).nonzero().flatten().tolist() == padded


@each_source
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("sight", SIGHTS)
def test_token_tables_lie_where_they_lay_whatever_is_padded(sight: str, num_queries: int, gathers: bool) -> None:
    uploader = Uploader(CPU, persistent=True)
    pitches = (40,) if gathers else None

    def places(*padded: int) -> dict[str, tuple[Any, ...]]:
        ranges = [(start, start + num_queries) for start in (9, 20, 2, 13)]
        step = make_step([*ranges, (3, 40)], **SIGHTS[sight], padded=padded)
        uploader.begin()
        table = make_token_table(step.spans, step.tables, block_tokens=4, uploader=uploader, sight=step.sight)
        table.prepare(AttentionNeed(torch.float32, 2, True, pitches))
        found = tensors(table)
        for bucket in table.buckets:
            found |= {f"bucket{bucket.at}.{name}": value for name, value in tensors(bucket).items()}
            found |= {f"mask{key}": mask for key, mask in bucket.masks.items() if mask is not None}
        found |= {f"grid{pitch}": rows for pitch, rows in table.grid_rows.items()}
        found |= {f"band{tile}": band for (_, tile), band in table.columns.items()}
        assert (table.pages == PADDED).any()
        assert any(name.startswith("mask") for name in found)
        assert any(name.startswith("band") for name in found)
        return {name: (tensor.data_ptr(), tensor.shape) for name, tensor in found.items()}

    places(0)  # the band grows
    assert places(0, 2) == places(1) == places(3, 1, 0) == places(4)


@each_source
@pytest.mark.parametrize("sight", SIGHTS)
def test_a_recycled_page_shows_nothing_of_its_past(sight: str, gathers: bool) -> None:
    """New requests get pages, and rows, of others that left NaN in every slot."""
    old = make_step([(0, 21), (0, 1), (0, 40)], **SIGHTS[sight])
    before = Problem(old)
    before.contents = [[torch.full_like(x, math.nan) for x in content] for content in before.contents]
    before.attend(gathers)
    new = make_step([(0, 1), (0, 18), (0, 5)], **SIGHTS[sight])
    assert {page for table in new.tables for page in table} <= {page for table in old.tables for page in table}
    Problem(replace(new, num_pages=old.num_pages), arena=before.arena).check(gathers)
