"""A step's segments as index tensors: what convolutions and scans need to know of a step, built once for all layers.

Spans of one token (decoding) and longer ones are kept apart: the first take one batched update, the others a chunked
scan. Knows pages by number only, and nothing of what a state means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.cache import Segment
from hybridkv.kernels.chunks import Schedule, make_schedule
from hybridkv.kernels.edges import Edges, make_edges
from hybridkv.kernels.longs import LongSpan, upload
from hybridkv.kernels.pages import Pages
from hybridkv.kernels.spans import Span


class Ones(NamedTuple):
    """The spans of one token."""

    rows: Tensor | None
    """[n]: their tokens in the packed row; None: the whole row, in order."""
    src: Pages
    dst: Pages

    def take(self, x: Tensor) -> Tensor:
        """Their tokens. x: [N, ...] -> [n, ...]"""
        return x if self.rows is None else x.index_select(0, self.rows)

    def put(self, y: Tensor, out: Tensor) -> None:
        """The same way back. y: [n, ...], out: [N, ...]"""
        if self.rows is None:
            out.copy_(y)
        else:
            out.index_copy_(0, self.rows, y.to(out.dtype))


class SegmentTable:
    """One state group's segments in a step (of one of the pages a state may be cut into)."""

    def __init__(self, ones: Ones | None, longs: list[LongSpan], num_tokens: int, device: torch.device) -> None:
        self.ones = ones
        self.num_tokens = num_tokens
        self.device = device
        self._longs = longs
        self._schedules: dict[int, Schedule] = {}
        self._edges: dict[int, Edges] = {}

    @property
    def has_long(self) -> bool:
        return bool(self._longs)

    def schedule(self, chunk_tokens: int) -> Schedule:
        """The longer spans in chunks of at most `chunk_tokens`, a power of two; less if no segment fills one."""
        if chunk_tokens not in self._schedules:
            self._schedules[chunk_tokens] = make_schedule(self._longs, chunk_tokens, self.device)
        return self._schedules[chunk_tokens]

    def edges(self, reach: int) -> Edges:
        """The longer spans as a convolution sees them that reaches `reach` tokens back."""
        if reach not in self._edges:
            self._edges[reach] = make_edges(self._longs, reach, self.device)
        return self._edges[reach]


def make_segment_table(
    spans: Sequence[Span], segments: Sequence[Sequence[Segment]], *, page: int = 0, device: torch.device
) -> SegmentTable:
    """segments[i] covers span i; `page` says which of the pages of a state, where it is cut into several."""
    one_rows: list[int] = []
    src_pages: list[int] = []
    dst_pages: list[int] = []
    longs: list[LongSpan] = []
    for span, parts in zip(spans, segments, strict=True):
        _check(span, parts)
        if span.length == 1:
            one_rows.append(span.row)
            src_pages.append(parts[0].src[page])
            dst_pages.append(parts[0].dst[page])
        else:
            shift = span.row - span.start
            rows = [(part.start + shift, part.end + shift, part.src[page], part.dst[page]) for part in parts]
            longs.append(LongSpan(span, rows))
    ones = None
    if one_rows:
        rows, src, dst = upload([one_rows, src_pages, dst_pages], device)
        ones = Ones(rows if longs else None, Pages(src, src_pages), Pages(dst, dst_pages))
    return SegmentTable(ones, longs, sum(span.length for span in spans), device)


def _check(span: Span, parts: Sequence[Segment]) -> None:
    ends = [span.start, *(part.end for part in parts)]
    starts = [*(part.start for part in parts), span.end]
    if ends != starts or any(part.end <= part.start for part in parts):
        raise ValueError(f"segments {list(parts)} do not cover positions {span.start} to {span.end} in order")
