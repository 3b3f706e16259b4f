# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Causal depthwise convolution for one token a row, with the last inputs of each request kept in pages.

Products are summed in float32 and rounded once. No row may write a page that another row reads: programs run in any
order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kernels.decode.tables import DecodeStates
from hybridkv.kernels.decode.tiles import Tile, choose, num_blocks, pow2


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    states: Tensor,
    table: DecodeStates,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """x: [B, C], weight: [C, W], bias: [C], states: [pages, C, W - 1], the last inputs, oldest first -> [B, C]"""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"convolution with activation {activation!r}: know silu, swish and none")
    rows, channels = x.shape
    width = weight.shape[1]
    tile = tile or choose(rows, width, channels, least=64, per_thread=8)
    out = torch.empty_like(x)
    _conv_kernel[(num_blocks(channels, tile.block), rows)](
        *(x, weight, bias, states, table.src, table.dst, out),
        *(*x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), *states.stride(), *out.stride()),
        channels,
        reach=width - 1,
        block_c=tile.block,
        block_w=pow2(width),
        has_activation=activation is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def _conv_kernel(
    x, weight, bias, states, src, dst, out,
    x_row, x_channel,
    weight_channel, weight_tap,
    bias_channel,
    state_page, state_channel, state_tap,
    out_row, out_channel,
    channels,
    reach: tl.constexpr,  # W - 1
    block_c: tl.constexpr,
    block_w: tl.constexpr,
    has_activation: tl.constexpr,
):  # fmt: skip
    """One program: a block of channels of one row."""
    row = tl.program_id(1)
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    tap = tl.arange(0, block_w)
    is_channel = channel < channels
    out += row * out_row + channel * out_channel
    read_page = tl.load(src + row).to(tl.int64)
    write_page = tl.load(dst + row).to(tl.int64)
    if write_page < 0:
        tl.store(out, tl.zeros([block_c], out.dtype.element_ty), mask=is_channel)
        return

    is_kept = is_channel[:, None] & (tap < reach)[None, :]
    place = channel[:, None] * state_channel + tap[None, :] * state_tap
    kept = tl.load(states + read_page * state_page + place, mask=is_kept, other=0.0)
    now = tl.load(x + row * x_row + channel * x_channel, mask=is_channel, other=0.0)
    weight += channel * weight_channel
    taps = tl.load(weight[:, None] + tap[None, :] * weight_tap, mask=is_kept, other=0.0).to(tl.float32)
    last = tl.load(weight + reach * weight_tap, mask=is_channel, other=0.0).to(tl.float32)

    y = tl.sum(kept.to(tl.float32) * taps, axis=1) + now.to(tl.float32) * last
    if bias is not None:
        y += tl.load(bias + channel * bias_channel, mask=is_channel, other=0.0).to(tl.float32)
    if has_activation:
        y = y * tl.sigmoid(y)
    tl.store(out, y.to(out.dtype.element_ty), mask=is_channel)
    if reach > 0:
        # In place, an input moves to where another thread may still read.
        tl.debug_barrier()
        states += write_page * state_page
        tl.store(states + place - state_tap, kept, mask=is_kept & (tap > 0)[None, :])
        newest = states + channel * state_channel + (reach - 1) * state_tap
        tl.store(newest, now.to(states.dtype.element_ty), mask=is_channel)
