# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Lightning attention for one token a row: a constant decay a head. Math in float32.

S <- exp(-slope) S + k^T v;  o = q S                       S: [D, D]

No row may write a page that another row reads: programs run in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kernels.decode.tables import DecodeStates
from hybridkv.kernels.decode.tiles import Tile, choose, num_blocks, pow2


def lightning(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, states: Tensor, table: DecodeStates, *, tile: Tile | None = None
) -> Tensor:
    """q, k, v: [B, H, D], slope: [H], states: [pages, H, D, D] -> [B, H, D] in q.dtype"""
    rows, heads, dim = v.shape
    slope = slope.reshape(-1)
    tile = tile or choose(rows * heads, dim, dim, least=8)
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    _lightning_kernel[(num_blocks(dim, tile.block), heads, rows)](
        *(q, k, v, slope, states, table.src, table.dst, out),
        *(*q.stride(), *k.stride(), *v.stride(), *slope.stride(), *states.stride()),
        dim=dim,
        block_k=pow2(dim),
        block_v=tile.block,
        policy=tile.policy,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def _lightning_kernel(
    q, k, v, slope, states, src, dst, out,
    q_row, q_head, q_dim,
    k_row, k_head, k_dim,
    v_row, v_head, v_dim,
    slope_head,
    state_page, state_head, state_k, state_v,
    dim: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    policy: tl.constexpr,
):  # fmt: skip
    """One program: a block of value channels of one head of one row."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    key = tl.arange(0, block_k)
    value = tl.program_id(0) * block_v + tl.arange(0, block_v)
    is_key = key < dim
    is_value = value < dim
    out += (row * tl.num_programs(1) + head) * dim + value
    read_page = tl.load(src + row).to(tl.int64)
    write_page = tl.load(dst + row).to(tl.int64)
    if write_page < 0:
        tl.store(out, tl.zeros([block_v], out.dtype.element_ty), mask=is_value)
        return

    is_tile = is_key[:, None] & is_value[None, :]
    tile = head * state_head + key[:, None] * state_k + value[None, :] * state_v
    state = tl.load(states + read_page * state_page + tile, mask=is_tile, other=0.0, eviction_policy=policy)
    q_ = tl.load(q + row * q_row + head * q_head + key * q_dim, mask=is_key, other=0.0).to(tl.float32)
    k_ = tl.load(k + row * k_row + head * k_head + key * k_dim, mask=is_key, other=0.0).to(tl.float32)
    v_ = tl.load(v + row * v_row + head * v_head + value * v_dim, mask=is_value, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.load(slope + head * slope_head).to(tl.float32))

    state = state.to(tl.float32) * decay + k_[:, None] * v_[None, :]
    written = state.to(states.dtype.element_ty)
    tl.store(states + write_page * state_page + tile, written, mask=is_tile, eviction_policy=policy)
    read = tl.sum(state * q_[:, None], axis=0)
    tl.store(out, read.to(out.dtype.element_ty), mask=is_value)
