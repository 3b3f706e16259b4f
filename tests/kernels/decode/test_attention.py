"""Attention of decoding steps equals attention spelled out, whatever is in the slots that no row sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hybridkv.kernels.decode.attention import attend, write_tokens
from hybridkv.kernels.decode.launch import Launch
from hybridkv.kernels.decode.tables import DecodeTokens
from hybridkv.sight import EVERYTHING, Sight
from tests.devices import DEVICE, ON_GPU, needs_gpu, uses_device
from tests.kernels.decode.rows import (
    FLOATS,
    ORDERS,
    PADDING,
    attention,
    fill,
    make_arena,
    make_query,
    make_rows,
    tolerance,
)

pytestmark = uses_device
SMALL = Launch(block_tokens=16, block_heads=16, splits=1, min_share=16, num_warps=4, num_stages=2)
LONG = [3000, 0, PADDING, 777, 16] if ON_GPU else [50, 0, PADDING, 33]
FP8 = torch.float8_e4m3fn


def check(
    positions: list[int],
    *,
    sight: Sight = EVERYTHING,
    block_tokens: int = 4,
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: Any = torch.float32,
    arena_dtype: Any = None,
    order: tuple[int, ...] = (0, 1, 2),
    spare: int = 0,
    sinks: bool = False,
    softcap: float | None = None,
    launch: Launch | None = SMALL,
) -> None:
    rows = make_rows(positions, block_tokens, sight)
    arena, value_arena = (make_arena(rows, heads[0], dim, arena_dtype or dtype, order, spare) for dim in dims)
    keys, values = fill(rows, arena), fill(rows, value_arena)
    query = make_query(rows, heads[0] * heads[1], dims[0], dtype)
    extras: dict[str, Any] = {"scale": dims[0] ** -0.5, "softcap": softcap}
    extras["sinks"] = torch.randn(heads[0] * heads[1], device=DEVICE).to(dtype) if sinks else None
    output = attend(query, arena, value_arena, rows.table(), **extras, launch=launch)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), attention(query, keys, values, **extras), **tolerance(dtype))


@settings(max_examples=200 if ON_GPU else 12)
@given(
    positions=st.lists(st.integers(PADDING, 60), min_size=1, max_size=3),
    sight=st.sampled_from([Sight(), Sight(window=1), Sight(window=21), Sight(chunk=8), Sight(chunk=37)]),
    block_tokens=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 17)]),
    dims=st.sampled_from([(16, 16), (8, 24), (40, 16)]),
    order=st.sampled_from(ORDERS),
    spare=st.sampled_from([0, 1, 8]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    splits=st.sampled_from([1, 2, 5]),
)
def test_random_steps(splits: int, **step: Any) -> None:
    check(launch=SMALL._replace(splits=splits), **step)


@pytest.mark.parametrize("splits", [1, 3, 64 if ON_GPU else 7])
@pytest.mark.parametrize("sight", [Sight(), Sight(window=20), Sight(chunk=32)], ids=["all", "window", "chunk"])
def test_splits(splits: int, sight: Sight) -> None:
    """Rows with fewer blocks than splits, rows of one token, and padding."""
    check(LONG, sight=sight, sinks=True, launch=SMALL._replace(splits=splits))


def test_the_shares_of_splits_have_a_minimum() -> None:
    check(LONG, launch=SMALL._replace(splits=8, min_share=32))


@pytest.mark.parametrize("dim", [64, 72, 80, 128, 192, 256, 576])
def test_head_dims(dim: int) -> None:
    check([40, 3], dims=(dim, min(dim, 256)), launch=None)
    check([40, 3], dims=(min(dim, 80), dim), launch=None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dims", [(192, 128), (512, 512)])
def test_dims_of_models(dims: tuple[int, int], dtype: Any) -> None:
    """Keys larger than values, and the largest heads."""
    check(LONG, dims=dims, heads=(2, 8), dtype=dtype, sinks=True, launch=None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arena_dtype", [None, FP8, torch.float32])
def test_dtypes(dtype: Any, arena_dtype: Any) -> None:
    check(LONG, dtype=dtype, arena_dtype=arena_dtype, dims=(64, 64), launch=None)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (2, 20), (1, 70)])
def test_query_heads(heads: tuple[int, int]) -> None:
    check([20, PADDING], heads=heads, dtype=torch.float16, sinks=True, softcap=3.0, launch=None)


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_arenas(order: tuple[int, ...]) -> None:
    check([37, 5], order=order, dims=(32, 16), spare=3)


def test_large_scores_and_sinks_do_not_overflow() -> None:
    rows = make_rows([30])
    arena, value_arena = make_arena(rows, 1, 16), make_arena(rows, 1, 16)
    keys, values = fill(rows, arena), fill(rows, value_arena)
    query, sinks = make_query(rows, 2, 16), torch.tensor([300.0, -300.0], device=DEVICE)
    for splits in (1, 2):
        launch = SMALL._replace(splits=splits)
        for scale in (100.0, 0.25):
            output = attend(query, arena, value_arena, rows.table(), scale=scale, sinks=sinks, launch=launch)
            wanted = attention(query, keys, values, scale, sinks)
            torch.testing.assert_close(output.double(), wanted, rtol=1e-3, atol=1e-4)


def test_a_query_may_have_any_strides() -> None:
    rows = make_rows([9, 2])
    arena, value_arena = make_arena(rows, 2, 16), make_arena(rows, 2, 16)
    keys, values = fill(rows, arena), fill(rows, value_arena)
    query = torch.randn(16, 4, 2, device=DEVICE).permute(2, 1, 0)
    output = attend(query, arena, value_arena, rows.table(), scale=0.3)
    torch.testing.assert_close(output.double(), attention(query, keys, values, 0.3), **tolerance(torch.float32))


@pytest.mark.parametrize("arena_dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize(("heads", "dims"), [(1, (512, 64)), (3, (16, 24)), (70, (80, 64))])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_tokens_are_written_and_nothing_else(
    arena_dtype: Any, heads: int, dims: tuple[int, int], order: tuple[int, ...]
) -> None:
    rows = make_rows([0, 9, PADDING, 30])
    arenas = [make_arena(rows, heads, dim, arena_dtype, order, spare=1) for dim in dims]
    step = [torch.randn(dim, heads, 4, device=DEVICE).permute(2, 1, 0) for dim in dims]
    if not ON_GPU:  # the interpreter does not round as devices do
        step = [vectors.to(arena_dtype).float() for vectors in step]
    wanted = [arena.float() for arena in arenas]
    write_tokens(arenas[0], arenas[1], rows.table(), step[0], step[1])
    for arena, vectors, plain in zip(arenas, step, wanted, strict=True):
        for row in (0, 1, 3):
            pages, offsets = rows.slots(row)
            plain[pages[-1], offsets[-1]] = vectors[row].to(arena_dtype).float()
        torch.testing.assert_close(arena.float(), plain, rtol=0, atol=0, equal_nan=True)


@needs_gpu
def test_a_captured_graph_follows_its_tables() -> None:
    """The same launch serves other positions, pages and widths."""
    steps = [make_rows([400, PADDING, 7], 16), make_rows([3, 1000, 1001], 16)]
    num_pages = max(rows.num_pages for rows in steps)
    arena, value_arena = torch.randn(2, num_pages, 16, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    query = torch.randn(3, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    new = torch.randn(3, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    tables = [rows.table() for rows in steps]
    pages = torch.zeros(max(table.pages.numel() for table in tables), dtype=torch.int32, device=DEVICE)
    shared = DecodeTokens(tables[0].positions.clone(), pages, tables[0].shape.clone(), 16, EVERYTHING)

    def put(table: DecodeTokens) -> None:
        shared.positions.copy_(table.positions)
        shared.pages[: table.pages.numel()] = table.pages
        shared.shape.copy_(table.shape)

    def run() -> torch.Tensor:
        write_tokens(arena, value_arena, shared, new, new)
        return attend(query, arena, value_arena, shared, scale=0.125)

    put(tables[0])
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for rows, table in zip(steps, tables, strict=True):
        put(table)
        graph.replay()
        keys, values = ([view[rows.slots(row)].double() for row in range(3)] for view in (arena, value_arena))
        wanted = attention(query, keys, values, 0.125)
        torch.testing.assert_close(output.double(), wanted, **tolerance(torch.bfloat16))
