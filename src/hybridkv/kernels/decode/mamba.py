# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Selective scans for one token a row: Mamba-2 (one decay a head) and Mamba-1 (one for each entry of the state).

S <- exp(dt a) S + dt x B^T;  y = S C + d x                Math in float32.

No row may write a page that another row reads: programs run in any order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kernels.decode.tables import DecodeStates
from hybridkv.kernels.decode.tiles import Tile, choose, num_blocks, pow2


def mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    table: DecodeStates,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    tile: Tile | None = None,
) -> Tensor:
    """x: [B, H, P], dt: [B, H], a (negative): [H], b, c: [B, G, S], d: [H] or [H, P], states: [pages, H, P, S]
    -> [B, H, P], float32 like the models' own function
    """
    rows, heads, p = x.shape
    groups, s = b.shape[1:]
    tile = tile or choose(rows * heads, s, p)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _mamba2_kernel[(num_blocks(p, tile.block), heads, rows)](
        *(x, dt, a, b, c, d, dt_bias, states, table.src, table.dst, out),
        *(*x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride()),
        *(*_strides(d, 2), *_strides(dt_bias, 1), *states.stride()),
        *dt_limit,
        sharing=heads // groups,
        p=p,
        s=s,
        block_p=tile.block,
        block_s=pow2(s),
        softplus=dt_softplus,
        policy=tile.policy,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def mamba1(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    table: DecodeStates,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """x, dt, z: [B, Ch], a: [Ch, S], b, c: [B, S], d: [Ch], states: [pages, Ch, S] -> [B, Ch] in x.dtype"""
    rows, channels = x.shape
    s = b.shape[1]
    tile = tile or choose(rows, s, channels)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _mamba1_kernel[(num_blocks(channels, tile.block), rows)](
        *(x, dt, a, b, c, d, z, dt_bias, states, table.src, table.dst, out),
        *(*x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride()),
        *(*_strides(d, 1), *_strides(z, 2), *_strides(dt_bias, 1), *states.stride()),
        channels,
        s=s,
        block_c=tile.block,
        block_s=pow2(s),
        softplus=dt_softplus,
        policy=tile.policy,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """Of `dims` axes: what is missing is the same all along an axis that it lacks."""
    own = () if x is None else x.stride()
    return (*own, *[0] * (dims - len(own)))


@triton.jit
def _step_size(dt, bias, softplus: tl.constexpr):
    """Bias and softplus, each rounded to the dtype of dt, as torch does it. -> float32"""
    size = dt.to(tl.float32)
    if bias is not None:
        size = (size + bias.to(dt.dtype).to(tl.float32)).to(dt.dtype).to(tl.float32)
    if softplus:
        e = tl.exp(tl.minimum(size, 20.0))
        # 1 + e has lost the digits of a small e: a series is exact there.
        small = e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)))
        soft = tl.where(e < 0.03, small, tl.log(1.0 + e))
        size = tl.where(size > 20.0, size, soft).to(dt.dtype).to(tl.float32)
    return size


@triton.jit
def _mamba2_kernel(
    x, dt, a, b, c, d, dt_bias, states, src, dst, out,
    x_row, x_head, x_dim,
    dt_row, dt_head,
    a_head,
    b_row, b_group, b_dim,
    c_row, c_group, c_dim,
    d_head, d_dim,
    bias_head,
    state_page, state_head, state_p, state_s,
    low, high,
    sharing: tl.constexpr,  # heads of one group
    p: tl.constexpr,
    s: tl.constexpr,
    block_p: tl.constexpr,
    block_s: tl.constexpr,
    softplus: tl.constexpr,
    policy: tl.constexpr,
):  # fmt: skip
    """One program: a block of P of one head of one row."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    dim = tl.program_id(0) * block_p + tl.arange(0, block_p)
    entry = tl.arange(0, block_s)
    is_dim = dim < p
    is_entry = entry < s
    out += (row * tl.num_programs(1) + head) * p + dim
    read_page = tl.load(src + row).to(tl.int64)
    write_page = tl.load(dst + row).to(tl.int64)
    if write_page < 0:
        tl.store(out, tl.zeros([block_p], out.dtype.element_ty), mask=is_dim)
        return

    # The state first: all else is computed while it comes.
    is_tile = is_dim[:, None] & is_entry[None, :]
    tile = head * state_head + dim[:, None] * state_p + entry[None, :] * state_s
    state = tl.load(states + read_page * state_page + tile, mask=is_tile, other=0.0, eviction_policy=policy)
    group = head // sharing
    x_ = tl.load(x + row * x_row + head * x_head + dim * x_dim, mask=is_dim, other=0.0).to(tl.float32)
    b_ = tl.load(b + row * b_row + group * b_group + entry * b_dim, mask=is_entry, other=0.0).to(tl.float32)
    c_ = tl.load(c + row * c_row + group * c_group + entry * c_dim, mask=is_entry, other=0.0).to(tl.float32)
    bias = None
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * bias_head)
    size = _step_size(tl.load(dt + row * dt_row + head * dt_head), bias, softplus)
    size = tl.minimum(tl.maximum(size, low), high)
    decay = tl.exp(size * tl.load(a + head * a_head).to(tl.float32))

    state = state.to(tl.float32) * decay + (x_ * size)[:, None] * b_[None, :]
    written = state.to(states.dtype.element_ty)
    tl.store(states + write_page * state_page + tile, written, mask=is_tile, eviction_policy=policy)
    y = tl.sum(state * c_[None, :], axis=1)
    if d is not None:
        y += x_ * tl.load(d + head * d_head + dim * d_dim, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out, y, mask=is_dim)


@triton.jit
def _mamba1_kernel(
    x, dt, a, b, c, d, z, dt_bias, states, src, dst, out,
    x_row, x_channel,
    dt_row, dt_channel,
    a_channel, a_dim,
    b_row, b_dim,
    c_row, c_dim,
    d_channel,
    z_row, z_channel,
    bias_channel,
    state_page, state_channel, state_s,
    channels,
    s: tl.constexpr,
    block_c: tl.constexpr,
    block_s: tl.constexpr,
    softplus: tl.constexpr,
    policy: tl.constexpr,
):  # fmt: skip
    """One program: a block of channels of one row."""
    row = tl.program_id(1)
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    entry = tl.arange(0, block_s)
    is_channel = channel < channels
    is_entry = entry < s
    out += row * channels + channel
    read_page = tl.load(src + row).to(tl.int64)
    write_page = tl.load(dst + row).to(tl.int64)
    if write_page < 0:
        tl.store(out, tl.zeros([block_c], out.dtype.element_ty), mask=is_channel)
        return

    is_tile = is_channel[:, None] & is_entry[None, :]
    tile = channel[:, None] * state_channel + entry[None, :] * state_s
    state = tl.load(states + read_page * state_page + tile, mask=is_tile, other=0.0, eviction_policy=policy)
    rate = tl.load(a + channel[:, None] * a_channel + entry[None, :] * a_dim, mask=is_tile, other=0.0)
    x_ = tl.load(x + row * x_row + channel * x_channel, mask=is_channel, other=0.0).to(tl.float32)
    b_ = tl.load(b + row * b_row + entry * b_dim, mask=is_entry, other=0.0).to(tl.float32)
    c_ = tl.load(c + row * c_row + entry * c_dim, mask=is_entry, other=0.0).to(tl.float32)
    bias = None
    if dt_bias is not None:
        bias = tl.load(dt_bias + channel * bias_channel, mask=is_channel, other=0.0)
    size = tl.load(dt + row * dt_row + channel * dt_channel, mask=is_channel, other=0.0)
    size = _step_size(size, bias, softplus)

    state = state.to(tl.float32) * tl.exp(size[:, None] * rate.to(tl.float32)) + (x_ * size)[:, None] * b_[None, :]
    written = state.to(states.dtype.element_ty)
    tl.store(states + write_page * state_page + tile, written, mask=is_tile, eviction_policy=policy)
    y = tl.sum(state * c_[None, :], axis=1)
    if d is not None:
        y += x_ * tl.load(d + channel * d_channel, mask=is_channel, other=0.0).to(tl.float32)
    if z is not None:
        gate = tl.load(z + row * z_row + channel * z_channel, mask=is_channel, other=0.0).to(tl.float32)
        y *= gate * tl.sigmoid(gate)
    tl.store(out, y.to(out.dtype.element_ty), mask=is_channel)
