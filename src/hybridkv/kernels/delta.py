"""The gated delta rule over a packed step: one decay a head (GDN) or one a key channel (KDA). Math in float32.

    S <- exp(g) S;  delta = beta (v - k S);  S <- S + k^T delta;  o = q S           S: [Dk, Dv]

One token: [delta; q S] is one product with S. A chunk: with A_ij = beta_i (k_i . k_j) decay_ij below the diagonal, all
deltas are (I + A)^-1 beta (v - decayed k S), and the rest is products of matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.chunks import Schedule, chunk_tokens, write_states
from hybridkv.kernels.decay import channel_decay, head_decay
from hybridkv.kernels.resident import resident
from hybridkv.kernels.segments import Ones, SegmentTable

NORM_EPS = 1e-6


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, table: SegmentTable, *, l2norm: bool
) -> Tensor:
    """q, k: [N, H, Dk], v: [N, H, Dv], g (log decay), beta: [N, H], states: [pages, H, Dk, Dv] -> [N, H, Dv]"""
    return _delta(q, k, v, g.unsqueeze(-1), beta, states, table, l2norm)


def kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, table: SegmentTable, *, l2norm: bool
) -> Tensor:
    """As `gated_delta`, with one decay a key channel. g: [N, H, Dk]"""
    return _delta(q, k, v, g, beta, states, table, l2norm)


def _delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, table: SegmentTable, l2norm: bool
) -> Tensor:
    """g: [N, H, 1] or [N, H, Dk]"""
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if table.has_long:
        _long(q, k, v, g, beta, states, table.schedule(chunk_tokens(q.device)), l2norm, out)
    if table.ones is not None:
        _one_token(q, k, v, g, beta, states, table.ones, l2norm, out)
    return table.blank(out)


def _unit(x: Tensor, scale: float, l2norm: bool) -> Tensor:
    """x: [..., D] -> float32, scaled"""
    x = x.float()
    if l2norm:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square_().add_(NORM_EPS).rsqrt_().mul_(scale)
    return x * scale if scale != 1.0 else x


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, ones: Ones, l2norm: bool, out: Tensor
) -> None:
    q, k, v, g, beta = (ones.take(x) for x in (q, k, v, g, beta))
    n, heads, dk = k.shape
    dv = v.shape[-1]
    q, k = _unit(q, dk**-0.5, l2norm), _unit(k, 1.0, l2norm)
    decay = g.float().exp()  # [n, H, 1 or Dk]
    beta = beta.float().unsqueeze(-1)
    # [-beta k; q] decayed, times S, plus [beta v; 0]: delta, and what q reads of the state before it.
    readers = torch.stack([k * decay * -beta, q * decay], dim=2).flatten(0, 1)  # [n * H, 2, Dk]
    reads = torch.stack([v * beta, torch.zeros_like(v, dtype=torch.float32)], dim=2).flatten(0, 1)  # [n * H, 2, Dv]
    own = torch.linalg.vecdot(q, k).view(n, heads, 1)
    writers, decay = k.reshape(n * heads, dk, 1), decay.reshape(n * heads, -1, 1)
    for here, state in resident(states, ones):
        of = slice(here.start * heads, here.stop * heads)
        state = state.view(-1, dk, dv)
        read = reads[of].baddbmm_(readers[of], state)
        state.mul_(decay[of]).addcmul_(writers[of], read[:, :1])
    reads = reads.view(n, heads, 2, dv)
    ones.put(torch.addcmul(reads[:, :, 1], reads[:, :, 0], own), out)


class _Chunks(NamedTuple):
    """What is left to do with the states. Heads of all chunks together: B = chunks * H."""

    readers: Tensor
    """[B, 2c, Dk]: k, then q, decayed since the chunk began."""
    scores: Tensor
    """[B, c, c]: q k^T, decayed."""
    solve: Tensor
    """[B, c, c]: (I + A)^-1 beta"""
    v: Tensor
    """[chunks, H, c, Dv]"""
    writers: Tensor
    """[B, c, Dk]: k, decayed until the chunk ends."""
    decay: Tensor
    """[B, 1 or Dk, 1]: of the whole chunk."""


def _long(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    schedule: Schedule,
    l2norm: bool,
    out: Tensor,
) -> None:
    state = schedule.src.read(states).float()  # [spans, H, Dk, Dv]
    for rounds in schedule.blocks(schedule.chunk_tokens * k.shape[1] * k.shape[2] * 4):
        first, last = rounds[0].first, rounds[-1].last
        q_, k_, v_, g_, beta_ = (schedule.take(x, first, last).transpose(1, 2) for x in (q, k, v, g, beta))
        mask = schedule.mask[first:last, None]
        chunks = _prepare(q_, k_, v_, g_.float() * mask.unsqueeze(-1), beta_.float() * mask, l2norm)
        for scan_round in rounds:
            y = _advance(chunks, state[: scan_round.num_states], scan_round.first - first, scan_round.last - first)
            schedule.put(y.transpose(1, 2), out, scan_round.first, scan_round.last)
            write_states(state, states, scan_round)


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool) -> _Chunks:
    """q, k: [chunks, H, c, Dk], v: [chunks, H, c, Dv], g: [chunks, H, c, 1 or Dk], beta: [chunks, H, c]"""
    count, heads, c, dk = k.shape
    size = count * heads
    both = torch.empty(count, heads, 2, c, dk, dtype=torch.float32, device=k.device)
    both[:, :, 0].copy_(k)
    both[:, :, 1].copy_(q)
    if l2norm:
        norm = torch.linalg.vector_norm(both, dim=-1).square_().add_(NORM_EPS).rsqrt_()
        norm[:, :, 1] *= dk**-0.5
        both *= norm.unsqueeze(-1)
    else:
        both[:, :, 1] *= dk**-0.5
    both = both.view(size, 2 * c, dk)
    g = g.reshape(size, c, -1)
    beta = beta.reshape(size, c)
    if g.shape[-1] == 1:
        pair, since, until = head_decay(g.squeeze(-1))
        pairs = torch.bmm(both, both[:, :c].transpose(1, 2)).view(size, 2, c, c).mul_(pair.unsqueeze(1))
    else:
        pairs, since, until = channel_decay(both.view(size, 2, c, dk), both[:, :c], g)
    eye = torch.eye(c, dtype=torch.float32, device=k.device).expand(size, c, c)
    # Only what is below the diagonal is read.
    inverse = torch.linalg.solve_triangular(pairs[:, 0] * beta.unsqueeze(-1), eye, upper=False, unitriangular=True)
    writers = both[:, :c] * until.exp()
    since = since.exp()
    both.view(size, 2, c, dk).mul_(since.unsqueeze(1))
    return _Chunks(both, pairs[:, 1], inverse.mul_(beta.unsqueeze(1)), v, writers, since[:, -1].unsqueeze(-1))


def _advance(chunks: _Chunks, state: Tensor, first: int, last: int) -> Tensor:
    """Chunks first .. last, one of each span. state: [spans, H, Dk, Dv], updated -> [spans, H, c, Dv]"""
    spans, heads, dk, dv = state.shape
    here = slice(first * heads, last * heads)
    state = state.view(spans * heads, dk, dv)
    c = chunks.scores.shape[-1]
    reads = torch.bmm(chunks.readers[here], state)  # [B, 2c, Dv]
    rest = reads.view(spans, heads, 2 * c, dv)[:, :, :c]
    torch.sub(chunks.v[first:last], rest, out=rest)
    delta = torch.bmm(chunks.solve[here], reads[:, :c])
    y = reads[:, c:].baddbmm_(chunks.scores[here], delta)
    state.mul_(chunks.decay[here]).baddbmm_(chunks.writers[here].transpose(1, 2), delta)
    return y.unflatten(0, (spans, heads))
