"""Kernels of linear layers for decoding steps against their torch forms: outputs, states, and all other bytes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hybridkv.kernels.decode.conv import conv
from hybridkv.kernels.decode.mamba import mamba2
from hybridkv.kernels.decode.tiles import MAX_WARPS, Tile, choose
from tests.devices import DEVICE, ON_GPU, uses_device
from tests.kernels.decode.state_cases import MAKES, Case, Rows, make_delta, normal, rows_of

pytestmark = uses_device

KINDS = ["own", "fresh", "shared", "null", "padded"]
MIXED = ["own", "padded", "shared", "fresh", "null", "shared", "padded"]
DTYPES = [torch.float32, torch.bfloat16]
KERNELS = ["gdn", "conv", "mamba2", "mamba1", "lightning"]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """To a share of the largest entry: small ones are differences of large ones."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


def check(case: Case, rows: Rows, state_dtype: torch.dtype, tile: Tile | None = None) -> None:
    """Outputs and states written are those of the torch form; every other byte of the arena is as it was."""
    arena = rows.arena(case.shape, state_dtype)
    before, expected_arena = arena.clone(), arena.clone()
    plain = [x.contiguous() if isinstance(x, Tensor) else x for x in case.args]
    expected = case.theirs(*plain, expected_arena[:, 2], rows.segments, **case.options)
    actual = case.ours(*case.args, arena[:, 2], rows.table, **case.options, tile=tile)
    tolerance = 1e-2 if torch.bfloat16 in (state_dtype, case.args[0].dtype) else 1e-5
    assert_near(actual, expected, tolerance)
    assert not actual[rows.padded].any()
    assert_near(arena[rows.written, 2], expected_arena[rows.written, 2], tolerance)
    before[rows.written, 2] = arena[rows.written, 2]
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[state_dtype]
    assert torch.equal(arena.view(bits), before.view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_equals_the_torch_form(name: str, dtype: torch.dtype) -> None:
    for seed in range(8 if ON_GPU else 2):
        rng = random.Random(seed)
        kinds = MIXED if seed == 0 else rng.choices(KINDS, k=rng.randint(1, 70 if ON_GPU else 5))
        check(MAKES[name](len(kinds), rng, dtype), rows_of(kinds, rng), dtype)


@pytest.mark.parametrize("name", ["gdn", "mamba2", "lightning"])
def test_states_may_be_wider_than_inputs(name: str) -> None:
    rng = random.Random(0)
    check(MAKES[name](len(MIXED), rng, torch.bfloat16), rows_of(MIXED, rng), torch.float32)


@pytest.mark.parametrize("name", KERNELS)
def test_padding_alone_changes_nothing(name: str) -> None:
    rng = random.Random(0)
    check(MAKES[name](3, rng, torch.float32), rows_of(["padded"] * 3, rng), torch.float32)


@pytest.mark.parametrize("block", [2, 4, 64])
@pytest.mark.parametrize("name", KERNELS)
def test_any_tile_gives_the_same(name: str, block: int) -> None:
    rng = random.Random(block)
    case = MAKES[name](len(MIXED), rng, torch.float32)
    check(case, rows_of(MIXED, rng), torch.float32, Tile(block, 2, policy="" if block == 4 else "evict_first"))


@pytest.mark.parametrize("is_kimi", [False, True], ids=["gdn", "kda"])
def test_value_heads_may_share_queries_and_keys(is_kimi: bool) -> None:
    rng = random.Random(0)
    case = make_delta(is_kimi, l2norm=True)(len(MIXED), rng, torch.float32)
    heads, dk, dv = case.shape
    v = normal(len(MIXED), 3 * heads, dv)
    g = -torch.rand(len(MIXED), 3 * heads, *([dk] if is_kimi else []), device=DEVICE)
    beta = torch.rand(len(MIXED), 3 * heads, device=DEVICE)

    def theirs(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
        out: Tensor = case.theirs(q.repeat_interleave(3, dim=1), k.repeat_interleave(3, dim=1), *rest, **options)
        return out

    args = (*case.args[:2], v, g, beta)
    check(case._replace(theirs=theirs, args=args, shape=(3 * heads, dk, dv)), rows_of(MIXED, rng), torch.float32)


def test_states_may_have_any_strides() -> None:
    """Tokens of a convolution's state outside its channels, keys inside values."""
    rng = random.Random(0)
    rows = rows_of(["own", "fresh", "padded"], rng)
    for name in ("gdn", "conv", "mamba2"):
        case = MAKES[name](3, rng, torch.float32)
        states = rows.arena(case.shape, torch.float32)[:, 2]
        turned = states.transpose(-1, -2).contiguous().transpose(-1, -2)
        expected = case.ours(*case.args, states, rows.table, **case.options)
        actual = case.ours(*case.args, turned, rows.table, **case.options)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(turned, states, equal_nan=True)


def test_small_steps_grow_where_softplus_is_tiny() -> None:
    """log(1 + e) of a small e has no digits left in float32."""
    rows = rows_of(["null"], random.Random(0))
    states = rows.arena((1, 2, 2), torch.float32)[:, 2]
    ones = torch.ones(1, 1, 2, device=DEVICE)
    for dt in (-18.0, -5.0, -3.4, 0.0, 19.9, 30.0):
        step = torch.full((1, 1), dt, device=DEVICE)
        mamba2(ones, step, -ones[0, 0, :1], ones, ones, states, rows.table)
        expected = torch.nn.functional.softplus(step).expand(2, 2)
        torch.testing.assert_close(states[rows.dst[0], 0], expected, rtol=5e-6, atol=0)


def test_an_unknown_activation_is_refused() -> None:
    x = normal(1, 4)
    with pytest.raises(ValueError, match="'gelu': know silu"):
        conv(x, normal(4, 3), None, "gelu", normal(2, 4, 2), rows_of(["null"], random.Random(0)).table)


def test_tiles_fit_in_registers() -> None:
    for states, whole, cut in itertools.product([1, 32, 2048, 8192], [4, 16, 96, 128, 256], [3, 64, 80, 128, 8192]):
        tile = choose(states, whole, cut, least=8)
        assert tile.block & (tile.block - 1) == 0
        assert 1 <= tile.num_warps <= MAX_WARPS
        assert whole * tile.block <= 64 * 32 * tile.num_warps
