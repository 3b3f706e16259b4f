"""Latent attention of decoding steps equals attention over expanded keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hybridkv.kernels.decode.attention import write_tokens
from hybridkv.kernels.decode.latent import attend_latents
from hybridkv.kernels.decode.launch import Launch
from hybridkv.sight import EVERYTHING, Sight
from tests.devices import DEVICE, ON_GPU, needs_gpu, uses_device
from tests.kernels.decode.rows import (
    FLOATS,
    ORDERS,
    PADDING,
    Rows,
    attention,
    fill,
    make_arena,
    make_query,
    make_rows,
    tolerance,
)

pytestmark = uses_device

SMALL = Launch(block_tokens=16, block_heads=16, splits=1, min_share=16, num_warps=4, num_stages=2)
POSITIONS = [2000, 0, PADDING, 700] if ON_GPU else [50, 0, PADDING, 33]


def expanded(
    latents: list[torch.Tensor], rotary: list[torch.Tensor], expand: torch.Tensor, heads: int, plain_dim: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys [plain, rotary] and values of all heads, by row, as models compute them."""
    keys, values = [], []
    for latent, turned in zip(latents, rotary, strict=True):
        both = (latent[:, 0] @ expand.double().T).unflatten(1, (heads, -1))
        keys.append(torch.cat([both[..., :plain_dim], turned.expand(-1, heads, -1)], -1))
        values.append(both[..., plain_dim:])
    return keys, values


def check(
    rows: Rows,
    *,
    heads: int = 4,
    rank: int = 32,
    dims: tuple[int, int, int] = (16, 16, 24),
    dtype: Any = torch.float32,
    arena_dtype: Any = None,
    order: tuple[int, ...] = (0, 1, 2),
    sinks: bool = False,
    softcap: float | None = None,
    launch: Launch | None = SMALL,
    limits: dict[str, float] | None = None,
) -> None:
    """dims: of keys without and with rotary embedding, and of values."""
    plain_dim, rotary_dim, value_dim = dims
    latents, rotary = (make_arena(rows, 1, dim, arena_dtype or dtype, order, spare=8) for dim in (rank, rotary_dim))
    contents = fill(rows, latents), fill(rows, rotary)
    query = make_query(rows, heads, plain_dim + rotary_dim, dtype)
    expand = (torch.randn(heads * (plain_dim + value_dim), rank, device=DEVICE) * rank**-0.5).to(dtype)
    extras: dict[str, Any] = {"scale": (plain_dim + rotary_dim) ** -0.5, "softcap": softcap}
    extras["sinks"] = torch.randn(heads, device=DEVICE) if sinks else None
    output = attend_latents(query, latents, rotary, rows.table(), expand, **extras, launch=launch)
    keys, values = expanded(*contents, expand, heads, plain_dim)
    wanted = attention(query, keys, values, **extras)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), wanted, **limits or tolerance(dtype))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("sight", [EVERYTHING, Sight(window=20), Sight(chunk=32)], ids=["all", "window", "chunk"])
def test_splits_and_sights(splits: int, sight: Sight) -> None:
    check(make_rows(POSITIONS, sight=sight), launch=SMALL._replace(splits=splits), sinks=True, softcap=2.0)


@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_heads(heads: int) -> None:
    check(make_rows([20, PADDING, 3]), heads=heads, sinks=True)
    check(make_rows([20, PADDING, 3]), heads=heads, dtype=torch.float16, launch=None)


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_arenas(order: tuple[int, ...]) -> None:
    check(make_rows([37, 5]), order=order)


@pytest.mark.parametrize(("rank", "rotary_dim"), [(512, 64), (48, 8), (80, 24)])
def test_ranks(rank: int, rotary_dim: int) -> None:
    check(make_rows([40, 3]), rank=rank, dims=(32, rotary_dim, 16), launch=None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arena_dtype", [None, torch.float8_e4m3fn])
def test_dtypes(dtype: Any, arena_dtype: Any) -> None:
    limits = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else None  # the folded query is rounded too
    check(make_rows(POSITIONS), dtype=dtype, arena_dtype=arena_dtype, limits=limits, launch=None)


def test_no_part_with_rotary_embedding() -> None:
    check(make_rows([40, 3]), dims=(16, 0, 24))


@needs_gpu
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shape_of_deepseek(heads: int, dtype: Any) -> None:
    limits = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    rows = make_rows([*POSITIONS, 63, 64], 16)
    check(rows, heads=heads, rank=512, dims=(128, 64, 128), dtype=dtype, launch=None, limits=limits)


def test_latents_are_written_as_tokens_are() -> None:
    rows = make_rows([6, PADDING])
    latents, rotary = make_arena(rows, 1, 32), make_arena(rows, 1, 8)
    step = torch.randn(2, 1, 40, device=DEVICE)
    write_tokens(latents, rotary, rows.table(), step[..., :32], step[..., 32:])
    pages, offsets = rows.slots(0)
    assert torch.equal(latents[pages[-1], offsets[-1]], step[0, :, :32])
    assert torch.equal(rotary[pages[-1], offsets[-1]], step[0, :, 32:])
    assert latents.isfinite().sum() == 32
    assert rotary.isfinite().sum() == 8
