"""Kernels of linear layers for decoding steps against their torch forms: outputs, states, and all other bytes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybridkv.cache import Segment
from hybridkv.kernels import conv as torch_conv
from hybridkv.kernels import delta as torch_delta
from hybridkv.kernels import lightning as torch_lightning
from hybridkv.kernels import mamba as torch_mamba
from hybridkv.kernels.decode.tables import DecodeStates
from hybridkv.kernels.segments import SegmentTable, make_segment_table
from hybridkv.kernels.spans import PADDED, Span
from hybridkv.memory import Uploader

pytest.importorskip("triton")

from hybridkv.kernels.decode.conv import conv
from hybridkv.kernels.decode.delta import gated_delta, kimi_delta
from hybridkv.kernels.decode.lightning import lightning
from hybridkv.kernels.decode.mamba import mamba1, mamba2
from hybridkv.kernels.decode.tiles import MAX_WARPS, Tile, choose

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
KINDS = ["own", "fresh", "shared", "null", "padded"]
MIXED = ["own", "padded", "shared", "fresh", "null", "shared", "padded"]
DTYPES = [torch.float32, torch.bfloat16]
GAP = 5
"""Places of an arena's pages: states lie in one of them."""


class Rows(NamedTuple):
    """One token a row: the pages that its state is read from and written to."""

    src: list[int]
    dst: list[int]
    num_pages: int

    @property
    def table(self) -> DecodeStates:
        src, dst = (torch.tensor(pages, dtype=torch.int32, device=DEVICE) for pages in (self.src, self.dst))
        return DecodeStates(src, dst)

    @property
    def segments(self) -> SegmentTable:
        spans = [Span(row, 0, 1) for row in range(len(self.src))]
        segments = [[Segment(0, 1, (src,), (dst,))] for src, dst in zip(self.src, self.dst, strict=True)]
        return make_segment_table(spans, segments, uploader=Uploader(DEVICE, persistent=IS_CUDA))

    @property
    def written(self) -> list[int]:
        return sorted({*self.dst} - {PADDED})

    @property
    def padded(self) -> list[int]:
        return [row for row, dst in enumerate(self.dst) if dst == PADDED]

    def arena(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """[pages, GAP, *shape]: states in one place of each page, NaN wherever nothing may be read."""
        arena = torch.full((self.num_pages, GAP, *shape), math.nan, dtype=dtype, device=DEVICE)
        for page in {*self.src} - {PADDED}:
            arena[page, 2] = torch.randn(shape, device=DEVICE)
        arena[0] = 0
        return arena


def rows_of(kinds: list[str], rng: random.Random) -> Rows:
    """Each row begins with a "null", "own", "shared" or "fresh" state, or is "padded". Pages lie in any order."""
    free = list(range(1, 2 * len(kinds) + 4))
    num_pages = len(free) + 1
    rng.shuffle(free)
    shared = free.pop()
    src, dst = [], []
    for kind in kinds:
        src.append({"null": 0, "padded": PADDED, "shared": shared}.get(kind) or 0)
        if kind in ("own", "fresh"):
            src[-1] = free.pop()
        dst.append({"padded": PADDED, "own": src[-1]}.get(kind) or free.pop())
    return Rows(src, dst, num_pages)


class Case(NamedTuple):
    """A kernel with inputs for it."""

    theirs: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    """Of a state."""
    options: dict[str, Any]


Make = Callable[[int, random.Random, torch.dtype], Case]
"""(rows, sizes at random, dtype of inputs)"""


def size(rng: random.Random, large: list[int], most: int = 12) -> int:
    """One of the large ones on a GPU. The interpreter is slow: at most `most` there."""
    return rng.choice(large) if IS_CUDA else rng.randint(2, most)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make_delta(is_kimi: bool, l2norm: bool) -> Make:
    def make(rows: int, rng: random.Random, dtype: torch.dtype) -> Case:
        heads, dk, dv = size(rng, [1, 6, 32], most=2), size(rng, [64, 96, 128, 256]), size(rng, [64, 80, 128, 256])
        # Slices of one projection, as in models.
        q, k, v = normal(rows, heads, 2 * dk + dv + 1, dtype=dtype)[..., 1:].split([dk, dk, dv], dim=-1)
        k = k if l2norm else k / dk**0.5
        g = -torch.rand((rows, heads, dk) if is_kimi else (rows, heads), device=DEVICE)
        beta = normal(heads, rows, dtype=dtype).sigmoid().t()
        forms = (torch_delta.kimi_delta, kimi_delta) if is_kimi else (torch_delta.gated_delta, gated_delta)
        return Case(*forms, (q, k, v, g, beta), (heads, dk, dv), {"l2norm": l2norm})

    return make


def make_conv(has_bias: bool, activation: str | None) -> Make:
    def make(rows: int, rng: random.Random, dtype: torch.dtype) -> Case:
        channels, width = size(rng, [100, 2048, 8192]), rng.choice([2, 3, 4, 5])
        x = normal(rows, channels, dtype=dtype)
        if rng.random() < 0.5:
            x = normal(channels, 2 * rows, dtype=dtype)[:, ::2].t()
        bias = normal(channels, dtype=dtype) if has_bias else None
        args = (x, normal(channels, width, dtype=dtype), bias, activation)
        return Case(torch_conv.conv, conv, args, (channels, width - 1), {})

    return make


def make_mamba2(d_dims: int, dt_limit: tuple[float, float], softplus: bool = True) -> Make:
    def make(rows: int, rng: random.Random, dtype: torch.dtype) -> Case:
        groups, shared = rng.choice([1, 2]), rng.choice([1, 3])
        heads, p, s = groups * shared, size(rng, [48, 64, 80]), size(rng, [16, 96, 128, 256])
        x = normal(rows, heads, p, dtype=dtype)
        b, c = normal(rows, groups, 2 * s, dtype=dtype).split(s, dim=-1)
        dt = normal(rows, heads, dtype=dtype) * 4 if softplus else torch.rand(rows, heads, device=DEVICE).to(dtype)
        d = {0: None, 1: normal(heads), 2: normal(heads, p)}[d_dims]
        options: dict[str, Any] = {"d": d, "dt_softplus": softplus, "dt_limit": dt_limit}
        options["dt_bias"] = normal(heads) if softplus else None
        args = (x, dt, -torch.rand(heads, device=DEVICE), b, c)
        return Case(torch_mamba.mamba2, mamba2, args, (heads, p, s), options)

    return make


def make_mamba1(has_all: bool) -> Make:
    def make(rows: int, rng: random.Random, dtype: torch.dtype) -> Case:
        channels, s = size(rng, [100, 4096]), size(rng, [12, 16, 64])
        x, dt = normal(channels, rows, dtype=dtype).t(), normal(channels, rows, dtype=dtype).t()
        b, c = normal(2 * s, rows, dtype=dtype).t().split(s, dim=-1)
        options: dict[str, Any] = {"dt_softplus": True}
        if has_all:
            options |= {"d": normal(channels), "dt_bias": normal(channels), "z": normal(rows, channels, dtype=dtype)}
        args = (x, dt, -torch.rand(channels, s, device=DEVICE), b, c)
        return Case(torch_mamba.mamba1, mamba1, args, (channels, s), options)

    return make


def make_lightning(rows: int, rng: random.Random, dtype: torch.dtype) -> Case:
    heads, dim = size(rng, [2, 16], most=3), size(rng, [64, 96, 128])
    q, k, v = normal(rows, heads, 3 * dim, dtype=dtype).split(dim, dim=-1)
    slope = torch.rand(heads, device=DEVICE)
    return Case(torch_lightning.lightning, lightning, (q, k, v, slope), (heads, dim, dim), {})


MAKES: dict[str, Make] = {
    "gdn": make_delta(is_kimi=False, l2norm=True),
    "gdn without norm": make_delta(is_kimi=False, l2norm=False),
    "kda": make_delta(is_kimi=True, l2norm=True),
    "kda without norm": make_delta(is_kimi=True, l2norm=False),
    "conv": make_conv(has_bias=False, activation="silu"),
    "conv with bias": make_conv(has_bias=True, activation="swish"),
    "conv without activation": make_conv(has_bias=True, activation=None),
    "mamba2": make_mamba2(1, (0.0, math.inf)),
    "mamba2 with limits": make_mamba2(2, (0.01, 0.5)),
    "mamba2 without extras": make_mamba2(0, (0.0, math.inf), softplus=False),
    "mamba1": make_mamba1(has_all=True),
    "mamba1 without extras": make_mamba1(has_all=False),
    "lightning": make_lightning,
}


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
    for seed in range(8 if IS_CUDA else 2):
        rng = random.Random(seed)
        kinds = MIXED if seed == 0 else rng.choices(KINDS, k=rng.randint(1, 70 if IS_CUDA else 5))
        check(MAKES[name](len(kinds), rng, dtype), rows_of(kinds, rng), dtype)


@pytest.mark.parametrize("name", ["gdn", "mamba2", "lightning"])
def test_states_may_be_wider_than_inputs(name: str) -> None:
    rng = random.Random(0)
    check(MAKES[name](len(MIXED), rng, torch.bfloat16), rows_of(MIXED, rng), torch.float32)


@pytest.mark.parametrize("name", MAKES)
def test_padding_alone_changes_nothing(name: str) -> None:
    rng = random.Random(0)
    check(MAKES[name](3, rng, torch.float32), rows_of(["padded"] * 3, rng), torch.float32)


@pytest.mark.parametrize("block", [2, 4, 64])
@pytest.mark.parametrize("name", ["gdn", "conv", "mamba2", "mamba1", "lightning"])
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
