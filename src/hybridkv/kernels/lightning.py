"""Lightning attention over a packed step: a constant decay a head. Math in float32.

S <- exp(-slope) S + k^T v;  o = q S                       S: [D, D]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.chunks import Schedule, chunk_tokens, write_states
from hybridkv.kernels.decay import head_decay
from hybridkv.kernels.resident import resident
from hybridkv.kernels.segments import Ones, SegmentTable


def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, states: Tensor, table: SegmentTable) -> Tensor:
    """q, k, v: [N, H, D], slope: [H], states: [pages, H, D, D] -> [N, H, D] in q.dtype"""
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    g = -slope.float().reshape(-1)
    if table.has_long:
        _long(q, k, v, g, states, table.schedule(chunk_tokens(q.device)), out)
    if table.ones is not None:
        _one_token(q, k, v, g, states, table.ones, out)
    return table.blank(out)


def _one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, ones: Ones, out: Tensor) -> None:
    q, k, v = (ones.take(x).float() for x in (q, k, v))
    n, heads, dim = k.shape
    y = torch.empty(n * heads, 1, dim, dtype=torch.float32, device=q.device)
    decay = g.exp().view(heads, 1, 1)
    q, k, v = q.view(-1, 1, dim), k.view(-1, dim, 1), v.view(-1, 1, dim)
    for here, state in resident(states, ones):
        of = slice(here.start * heads, here.stop * heads)
        state = state.mul_(decay).view(-1, dim, dim).baddbmm_(k[of], v[of])
        torch.bmm(q[of], state, out=y[of])
    ones.put(y.view(n, heads, dim), out)


def _long(q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, schedule: Schedule, out: Tensor) -> None:
    heads, dim = k.shape[1:]
    c = schedule.chunk_tokens
    state = schedule.src.read(states).float()  # [spans, H, D, D]
    for rounds in schedule.blocks(c * heads * dim * 4):
        first, last = rounds[0].first, rounds[-1].last
        m = last - first
        q_, k_, v_ = (schedule.take(x, first, last).transpose(1, 2).float().reshape(-1, c, dim) for x in (q, k, v))
        mask = schedule.mask[first:last].unsqueeze(1)
        pair, since, until = head_decay((g.view(1, -1, 1) * mask).view(m * heads, c))
        scores = torch.bmm(q_, k_.transpose(1, 2)).mul_(pair)
        y = torch.bmm(scores, v_)
        since = since.exp()
        readers = q_ * since
        writers = (k_ * until.exp()).view(m, heads, c, dim).mul_(mask.unsqueeze(-1)).view(-1, c, dim)
        for scan_round in rounds:
            here = slice((scan_round.first - first) * heads, (scan_round.last - first) * heads)
            now = state[: scan_round.num_states].view(-1, dim, dim)
            y[here].baddbmm_(readers[here], now)
            now.mul_(since[here, -1:]).baddbmm_(writers[here].transpose(1, 2), v_[here])
            write_states(state, states, scan_round)
        schedule.put(y.view(m, heads, c, dim).transpose(1, 2), out, first, last)
