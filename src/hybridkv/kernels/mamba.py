"""Selective scans over a packed step: Mamba-2 (one decay a head) and Mamba-1 (one for each entry of the state).

S <- exp(dt a) S + dt x B^T;  y = S C + d x                Math in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from hybridkv.kernels.chunks import Schedule, block_bytes, chunk_tokens, write_states
from hybridkv.kernels.decay import head_decay
from hybridkv.kernels.resident import resident
from hybridkv.kernels.segments import Ones, SegmentTable


def mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    table: SegmentTable,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """x: [N, H, P], dt: [N, H], a (negative): [H], b, c: [N, G, S], d: [H] or [H, P], states: [pages, H, P, S]
    -> [N, H, P], float32 like the models' own function
    """
    dt = _step_size(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
    g = dt * a.float()
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if table.has_long:
        _long(x, dt, g, b, c, states, table.schedule(chunk_tokens(x.device)), y)
    if table.ones is not None:
        _one_token(x, dt, g, b, c, states, table.ones, y)
    if d is not None:
        y.addcmul_(x.float(), d.float() if d.dim() == 2 else d.float().unsqueeze(-1))
    return table.blank(y)


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def _one_token(x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor, states: Tensor, ones: Ones, out: Tensor) -> None:
    x, dt, g, b, c = (ones.take(t) for t in (x, dt, g, b, c))
    n, heads, p = x.shape
    groups, s = b.shape[1:]
    rows = heads // groups * p  # of the states of one group's heads, one after another
    decay = g.exp().view(n, heads, 1, 1)
    writers = (x * dt.unsqueeze(-1)).view(n * groups, rows, 1)
    b, c = b.float().reshape(n * groups, 1, s), c.float().reshape(n * groups, s, 1)
    y = torch.empty(n * groups, rows, 1, dtype=torch.float32, device=x.device)
    for here, state in resident(states, ones):
        of = slice(here.start * groups, here.stop * groups)
        state.mul_(decay[here])
        state = state.view(-1, rows, s).baddbmm_(writers[of], b[of])
        torch.bmm(state, c[of], out=y[of])
    ones.put(y.view(n, heads, p), out)


def _long(
    x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor, states: Tensor, schedule: Schedule, out: Tensor
) -> None:
    heads, p = x.shape[1:]
    groups, s = b.shape[1:]
    state = schedule.src.read(states).float()  # [spans, H, P, S]
    tokens = schedule.chunk_tokens
    for rounds in schedule.blocks(tokens * heads * p * 4):
        first, last = rounds[0].first, rounds[-1].last
        m = last - first
        x_, dt_, g_, b_, c_ = (schedule.take(t, first, last) for t in (x, dt, g, b, c))
        mask = schedule.mask[first:last].unsqueeze(-1)
        # Of each head: [m * H, tokens, ...]; of each group: [m * G, tokens, ...].
        pair, since, until = head_decay((g_ * mask).transpose(1, 2).reshape(m * heads, tokens))
        b_, c_ = (t.transpose(1, 2).float().reshape(m * groups, tokens, s) for t in (b_, c_))
        scores = torch.bmm(c_, b_.transpose(1, 2)).view(m, groups, 1, tokens, tokens)
        scores = scores * pair.view(m, groups, -1, tokens, tokens)
        values = (x_ * (dt_ * mask).unsqueeze(-1)).transpose(1, 2).reshape(m * heads, tokens, p)
        y = torch.bmm(scores.view(m * heads, tokens, tokens), values).view(m, heads, tokens, p)
        per_group = (m, groups, heads // groups, tokens, -1)
        writers = (values * until.exp()).view(per_group).transpose(2, 3).reshape(m * groups, tokens, -1)
        since = since.exp()
        for scan_round in rounds:
            here = slice(scan_round.first - first, scan_round.last - first)
            of = slice(here.start * groups, here.stop * groups)
            now = state[: scan_round.num_states]
            rows = now.view(scan_round.num_states * groups, -1, s)  # states of one group's heads, one after another
            read = torch.bmm(c_[of], rows.transpose(1, 2)).view(scan_round.num_states, groups, tokens, -1, p)
            read = read.transpose(2, 3).reshape(scan_round.num_states, heads, tokens, p)
            y[here].addcmul_(read, since.view(m, heads, tokens, 1)[here])
            now.mul_(since.view(m, heads, tokens, 1)[here, :, -1:])
            rows.baddbmm_(writers[of].transpose(1, 2), b_[of])
            write_states(state, states, scan_round)
        schedule.put(y.transpose(1, 2), out, first, last)


MAMBA1_CHUNK_TOKENS = 16


def mamba1(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    table: SegmentTable,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
) -> Tensor:
    """x, dt, z: [N, Ch], a: [Ch, S], b, c: [N, S], d: [Ch], states: [pages, Ch, S] -> [N, Ch] in x.dtype"""
    dt = _step_size(dt, dt_bias, dt_softplus).float()
    a, b, c = a.float(), b.float(), c.float()
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if table.has_long:
        _long1(x, dt, a, b, c, states, table.schedule(MAMBA1_CHUNK_TOKENS), y)
    if table.ones is not None:
        _one_token1(x, dt, a, b, c, states, table.ones, y)
    if d is not None:
        y.addcmul_(x.float(), d.float())
    if z is not None:
        y *= functional.silu(z.float())
    return table.blank(y).to(x.dtype)


def _one_token1(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, ones: Ones, out: Tensor
) -> None:
    x, dt, b, c = (ones.take(t) for t in (x, dt, b, c))
    y = torch.empty(*x.shape, 1, dtype=torch.float32, device=x.device)
    writers, b, c = (dt * x).unsqueeze(-1), b.unsqueeze(1), c.unsqueeze(-1)
    for here, state in resident(states, ones):
        state.mul_((dt[here].unsqueeze(-1) * a).exp_()).baddbmm_(writers[here], b[here])
        torch.bmm(state, c[here], out=y[here])
    ones.put(y.squeeze(-1), out)


def _long1(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, schedule: Schedule, out: Tensor
) -> None:
    """No decay is shared by two entries of the state, so there are no products of matrices to gain: token by token."""
    state = schedule.src.read(states).float()  # [spans, Ch, S]
    tokens = schedule.chunk_tokens
    max_spans = max(1, block_bytes(x.device) // (a.numel() * tokens * 4))
    # Made once: fresh memory of this size is dear on a CPU.
    decays, afters = state.new_empty(2, min(max_spans, len(state)), tokens, *a.shape)
    for scan_round in schedule.rounds:
        for first in range(0, scan_round.num_states, max_spans):
            before = state[first : min(first + max_spans, scan_round.num_states)]
            chunks = (scan_round.first + first, scan_round.first + first + len(before))
            x_, dt_, b_, c_ = (schedule.take(t, *chunks) for t in (x, dt, b, c))
            dt_ = dt_ * schedule.mask[slice(*chunks)].unsqueeze(-1)
            decay, after = decays[: len(before)], afters[: len(before)]  # [spans, tokens, Ch, S]
            torch.mul(dt_.unsqueeze(-1), a, out=decay).exp_()
            torch.mul((dt_ * x_).unsqueeze(-1), b_.unsqueeze(2), out=after)
            last = before
            for now, factor in zip(after.unbind(1), decay.unbind(1), strict=True):
                last = now.addcmul_(last, factor)
            before.copy_(last)
            schedule.put(torch.matmul(after, c_.unsqueeze(-1)).squeeze(-1), out, *chunks)
        write_states(state, states, scan_round)
