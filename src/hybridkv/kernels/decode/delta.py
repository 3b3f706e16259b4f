# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gated delta rule for one token a row: one decay a head (GDN) or one a key channel (KDA). Math in float32.

    S <- exp(g) S;  delta = beta (v - k S);  S <- S + k^T delta;  o = q S           S: [Dk, Dv]

The output is q (exp(g) S) + (q . k) delta, so that k and q read the state at once. No row may write a page that another
row reads: programs run in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kernels.decode.tables import DecodeStates
from hybridkv.kernels.decode.tiles import Tile, choose, num_blocks, pow2


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: DecodeStates,
    *,
    l2norm: bool,
    tile: Tile | None = None,
) -> Tensor:
    """q, k: [B, Hk, Dk], v: [B, H, Dv], g (log decay), beta: [B, H], states: [pages, H, Dk, Dv] -> [B, H, Dv]

    H is a multiple of Hk: value heads that follow one another share a head of q and k.
    """
    return _delta(q, k, v, g.unsqueeze(-1), beta, states, table, l2norm, tile)


def kimi_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: DecodeStates,
    *,
    l2norm: bool,
    tile: Tile | None = None,
) -> Tensor:
    """As `gated_delta`, with one decay a key channel. g: [B, H, Dk]"""
    return _delta(q, k, v, g, beta, states, table, l2norm, tile)


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: DecodeStates,
    l2norm: bool,
    tile: Tile | None,
) -> Tensor:
    """g: [B, H, 1] or [B, H, Dk]"""
    rows, heads, dv = v.shape
    shared_heads, dk = k.shape[1:]
    tile = tile or choose(rows * heads, dk, dv, least=8)
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    _delta_kernel[(num_blocks(dv, tile.block), heads, rows)](
        *(q, k, v, g, beta, states, table.src, table.dst, out),
        *(*q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(), *states.stride()),
        dk**-0.5,
        sharing=heads // shared_heads,
        dk=dk,
        dv=dv,
        block_k=pow2(dk),
        block_v=tile.block,
        has_channels=g.shape[-1] == dk,
        l2norm=l2norm,
        policy=tile.policy,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _delta_kernel(
    q, k, v, g, beta, states, src, dst, out,
    q_row, q_head, q_dim,
    k_row, k_head, k_dim,
    v_row, v_head, v_dim,
    g_row, g_head, g_dim,
    beta_row, beta_head,
    state_page, state_head, state_k, state_v,
    scale,
    sharing: tl.constexpr,  # value heads of one head of q and k
    dk: tl.constexpr,
    dv: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    has_channels: tl.constexpr,
    l2norm: tl.constexpr,
    policy: tl.constexpr,
):  # fmt: skip
    """One program: a block of Dv of one head of one row."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    key = tl.arange(0, block_k)
    value = tl.program_id(0) * block_v + tl.arange(0, block_v)
    is_key = key < dk
    is_value = value < dv
    out += (row * tl.num_programs(1) + head) * dv + value
    read_page = tl.load(src + row).to(tl.int64)
    write_page = tl.load(dst + row).to(tl.int64)
    if write_page < 0:
        tl.store(out, tl.zeros([block_v], out.dtype.element_ty), mask=is_value)
        return

    # The state first: all else is computed while it comes.
    is_tile = is_key[:, None] & is_value[None, :]
    tile = head * state_head + key[:, None] * state_k + value[None, :] * state_v
    state = tl.load(states + read_page * state_page + tile, mask=is_tile, other=0.0, eviction_policy=policy)
    shared = head // sharing
    q_ = tl.load(q + row * q_row + shared * q_head + key * q_dim, mask=is_key, other=0.0).to(tl.float32)
    k_ = tl.load(k + row * k_row + shared * k_head + key * k_dim, mask=is_key, other=0.0).to(tl.float32)
    v_ = tl.load(v + row * v_row + head * v_head + value * v_dim, mask=is_value, other=0.0).to(tl.float32)
    beta_ = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    g += row * g_row + head * g_head
    if l2norm:
        q_ = _unit(q_)
        k_ = _unit(k_)
    q_ *= scale
    own = tl.sum(q_ * k_, axis=0)

    if has_channels:
        decay = tl.exp(tl.load(g + key * g_dim, mask=is_key, other=0.0).to(tl.float32))
        state = state.to(tl.float32) * decay[:, None]
    else:
        state = state.to(tl.float32) * tl.exp(tl.load(g).to(tl.float32))
    delta = beta_ * (v_ - tl.sum(state * k_[:, None], axis=0))
    read = tl.sum(state * q_[:, None], axis=0)
    state += k_[:, None] * delta[None, :]
    written = state.to(states.dtype.element_ty)
    tl.store(states + write_page * state_page + tile, written, mask=is_tile, eviction_policy=policy)
    tl.store(out, (read + own * delta).to(out.dtype.element_ty), mask=is_value)
