"""Spans of more than one token with room for the inputs before them, for convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.longs import LongSpan, upload


@dataclass(slots=True)
class Edges:
    """The longer spans with room for the `reach` inputs before each: how a convolution sees them."""

    num_slots: int
    src: Tensor
    """[spans]: the states they begin with."""
    src_slots: Tensor
    """[spans * reach]: where those are laid down, oldest first."""
    tokens: Tensor | None
    """[M]: tokens in the packed row; None: all of it, in order."""
    token_slots: Tensor
    """[M]: where each of them is laid down."""
    dst: Tensor
    """[segments]"""
    dst_slots: Tensor
    """[segments * reach]: the last inputs of each segment, oldest first."""


def make_edges(longs: list[LongSpan], reach: int, is_all: bool, device: torch.device) -> Edges:
    back = np.arange(-reach, 0)
    slot = 0
    src: list[int] = []
    dst: list[int] = []
    src_slots: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    token_slots: list[np.ndarray] = []
    dst_slots: list[np.ndarray] = []
    for span, segments in longs:
        slot += reach
        shift = slot - span.row
        src.append(segments[0][2])
        src_slots.append(slot + back)
        tokens.append(np.arange(span.row, span.row + span.length))
        token_slots.append(tokens[-1] + shift)
        for _, end, _, page in segments:
            dst.append(page)
            dst_slots.append(end + shift + back)
        slot += span.length
    joined = [np.concatenate(parts) for parts in (src_slots, tokens, token_slots, dst_slots)]
    at_src, at_tokens, at_token_slots, at_dst, src_pages, dst_pages = upload([*joined, src, dst], device)
    return Edges(slot, src_pages, at_src, None if is_all else at_tokens, at_token_slots, dst_pages, at_dst)
