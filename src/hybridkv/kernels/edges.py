"""Where spans of more than one token begin and segments end, for convolutions.

A convolution of the whole packed row is right but for the first `reach` tokens of each span, which see kept inputs
instead of the span before. Those tokens are `near`: they, and segments that end among them, are worked on apart, each
span with its kept inputs and its first tokens side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.longs import LongSpan, upload
from hybridkv.kernels.pages import Pages


class Edges(NamedTuple):
    """For a convolution that reaches `reach` tokens back."""

    src: Tensor
    """[spans]: pages of the inputs before them."""
    first_rows: Tensor
    """[spans * reach]: their first tokens; beyond their end, the last."""
    near_rows: Tensor
    """[M]: the near tokens in the packed row."""
    near_places: Tensor
    """[M]: the same in spans * reach."""
    near_windows: Tensor
    """[segments that end near * reach]: their last inputs, in spans * (2 * reach)"""
    near_dst: Pages
    far_windows: Tensor
    """[other segments * reach]: their last inputs, in the packed row."""
    far_dst: Pages


def make_edges(longs: list[LongSpan], reach: int, device: torch.device) -> Edges:
    ahead = np.arange(reach)
    first_rows, near_rows, near_places = [], [], []
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    for i, (span, segments) in enumerate(longs):
        is_there = ahead < span.length
        first_rows.append(span.row + np.minimum(ahead, span.length - 1))
        near_rows.append(span.row + ahead[is_there])
        near_places.append(i * reach + ahead[is_there])
        for _, end, _, dst in segments:
            tokens = end - span.row
            if tokens < reach:
                near.append((2 * reach * i + tokens, dst))
            else:
                far.append((end - reach, dst))
    near_dst, far_dst = ([dst for _, dst in ends] for ends in (near, far))
    windows = [_windows((first for first, _ in ends), ahead) for ends in (near, far)]
    rows = [np.concatenate(arrays) for arrays in (first_rows, near_rows, near_places)]
    src = [long.segments[0][2] for long in longs]
    columns = upload([src, *rows, *windows, near_dst, far_dst], device)
    return Edges(
        src=columns[0],
        first_rows=columns[1],
        near_rows=columns[2],
        near_places=columns[3],
        near_windows=columns[4],
        near_dst=Pages(columns[6], near_dst),
        far_windows=columns[5],
        far_dst=Pages(columns[7], far_dst),
    )


def _windows(firsts: Iterable[int], ahead: np.ndarray) -> np.ndarray:
    starts = np.array(list(firsts), dtype=np.int64)
    return np.asarray(starts[:, None] + ahead).ravel()
