"""Rows of decoding steps with states in pages, and inputs for each kernel of linear layers and its torch form."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv.cache import Segment
from hybridkv.kernels import conv as torch_conv
from hybridkv.kernels import delta as torch_delta
from hybridkv.kernels import lightning as torch_lightning
from hybridkv.kernels import mamba as torch_mamba
from hybridkv.kernels.decode.conv import conv
from hybridkv.kernels.decode.delta import gated_delta, kimi_delta
from hybridkv.kernels.decode.lightning import lightning
from hybridkv.kernels.decode.mamba import mamba1, mamba2
from hybridkv.kernels.decode.tables import DecodeStates
from hybridkv.kernels.segments import SegmentTable, make_segment_table
from hybridkv.kernels.spans import PADDED, Span
from hybridkv.memory import Uploader
from tests.devices import DEVICE, ON_GPU

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
        return make_segment_table(spans, segments, uploader=Uploader(torch.device(DEVICE), persistent=ON_GPU))

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
    return rng.choice(large) if ON_GPU else rng.randint(2, most)


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
