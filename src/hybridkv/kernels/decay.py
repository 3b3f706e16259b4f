"""Decay between tokens of a chunk, without overflow and without cancellation. g: log decay of each token, <= 0."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class HeadDecay(NamedTuple):
    """Of a chunk with one decay for all channels."""

    pair: Tensor
    """[B, c, c]: exp of the sum of g_l over j < l <= i; 0 where j > i."""
    since: Tensor
    """[B, c, 1]: log decay from the chunk's start to after each token."""
    until: Tensor
    """[B, c, 1]: log decay from after each token to the chunk's end."""


def head_decay(g: Tensor) -> HeadDecay:
    """g: [B, c]. Sums in float64: a difference of two long ones would lose the little that lies between their ends."""
    since = g.double().cumsum(-1)
    pair = (since.unsqueeze(-1) - since.unsqueeze(-2)).float()
    is_later = torch.full(pair.shape[1:], -math.inf, device=g.device).triu_(1)
    pair.add_(is_later).exp_()
    until = since[:, -1:] - since
    return HeadDecay(pair, since.float().unsqueeze(-1), until.float().unsqueeze(-1))


class ChannelDecay(NamedTuple):
    """Of a chunk with a decay for each channel."""

    scores: Tensor
    """[B, R, c, c]: sum over d of rows_id keys_jd exp(sum of g_ld over j < l <= i); 0 where j > i."""
    since: Tensor
    """[B, c, D]: log decay from the chunk's start to after each token."""
    until: Tensor
    """[B, c, D]: log decay from after each token to the chunk's end."""


def channel_decay(rows: Tensor, keys: Tensor, g: Tensor) -> ChannelDecay:
    """rows: [B, R, c, D], keys, g: [B, c, D], c a power of two

    The decay of later tokens against earlier ones factors at any point between them, and there both factors are at
    most 1. So: pairs of neighbours first, then squares of two by two beside them, and so on; the sums grow alike.
    """
    size, num_rows, c, dim = rows.shape
    scores = rows.new_zeros(size, num_rows, c, c)
    torch.linalg.vecdot(rows, keys.unsqueeze(1), out=scores.diagonal(dim1=-2, dim2=-1))
    since, until = g.clone(), torch.zeros_like(g)
    side = 1
    while side < c:
        # Blocks of two sides: later tokens against earlier ones.
        num_blocks = c // (2 * side)
        blocks = (num_blocks, 2, side)
        since_, until_, keys_ = (x.unflatten(1, blocks) for x in (since, until, keys))
        rows_ = rows.unflatten(2, blocks)[:, :, :, 1].transpose(1, 2)  # [B, blocks, R, side, D]
        later = rows.new_empty(rows_.shape)
        torch.mul(rows_, since_[:, :, None, 1].exp(), out=later)
        earlier = (keys_[:, :, 0] * until_[:, :, 0].exp()).view(-1, side, dim)
        square = torch.bmm(later.view(-1, num_rows * side, dim), earlier.transpose(1, 2)).view(
            size, num_blocks, num_rows, side, side
        )
        corner = scores.unflatten(3, blocks).unflatten(2, blocks)[:, :, :, 1, :, :, 0]
        corner.diagonal(dim1=2, dim2=4).copy_(square.permute(0, 2, 3, 4, 1))
        until_[:, :, 0] += since_[:, :, 1, -1:]
        since_[:, :, 1] += since_[:, :, 0, -1:]
        side *= 2
    return ChannelDecay(scores, since, until)
