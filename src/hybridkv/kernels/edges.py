"""Where spans of more than one token begin and segments end, for convolutions.

A convolution of the whole packed row is right but for the first `reach` tokens of each span, which see kept inputs
instead of the span before. Those tokens are `near`: they, and segments that end among them, are worked on apart, each
span with its kept inputs and its first tokens side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hybridkv.kernels.longs import LongSpan
from hybridkv.kernels.pages import PageNumbers
from hybridkv.memory import Uploader


class Edges(NamedTuple):
    """For a convolution that reaches `reach` tokens back."""

    src: PageNumbers
    """[spans]: pages of the inputs before them."""
    first_rows: Tensor
    """[spans * reach]: their first tokens; beyond their end, the last."""
    near_rows: Tensor
    """[M]: the near tokens in the packed row."""
    near_places: Tensor
    """[M]: the same in spans * reach."""
    near_windows: Tensor
    """[segments that end near * reach]: their last inputs, in spans * (2 * reach)"""
    near_dst: PageNumbers
    far_windows: Tensor
    """[other segments * reach]: their last inputs, in the packed row."""
    far_dst: PageNumbers


class _End(NamedTuple):
    """Where a segment ends: the first of its last inputs, and the page they are kept in."""

    first: int
    dst: int


def make_edges(longs: list[LongSpan], reach: int, uploader: Uploader, name: str) -> Edges:
    ahead = np.arange(reach)
    first_rows, near_rows, near_places = [], [], []
    near: list[_End] = []
    far: list[_End] = []
    for i, (span, segments) in enumerate(longs):
        is_there = ahead < span.length
        first_rows.append(span.row + np.minimum(ahead, span.length - 1))
        near_rows.append(span.row + ahead[is_there])
        near_places.append(i * reach + ahead[is_there])
        for segment in segments:
            tokens = segment.end - span.row
            if tokens < reach:
                near.append(_End(2 * reach * i + tokens, segment.dst))
            else:
                far.append(_End(segment.end - reach, segment.dst))
    src = [long.segments[0].src for long in longs]
    near_dst, far_dst = [end.dst for end in near], [end.dst for end in far]
    sent = uploader.send(
        name,
        src=src,
        first_rows=np.concatenate(first_rows),
        near_rows=np.concatenate(near_rows),
        near_places=np.concatenate(near_places),
        near_windows=_windows(near, ahead),
        near_dst=near_dst,
        far_windows=_windows(far, ahead),
        far_dst=far_dst,
    )
    return Edges(
        src=PageNumbers(sent["src"], src),
        first_rows=sent["first_rows"],
        near_rows=sent["near_rows"],
        near_places=sent["near_places"],
        near_windows=sent["near_windows"],
        near_dst=PageNumbers(sent["near_dst"], near_dst),
        far_windows=sent["far_windows"],
        far_dst=PageNumbers(sent["far_dst"], far_dst),
    )


def _windows(ends: Iterable[_End], ahead: np.ndarray) -> np.ndarray:
    starts = np.array([end.first for end in ends], dtype=np.int64)
    return np.asarray(starts[:, None] + ahead).ravel()
