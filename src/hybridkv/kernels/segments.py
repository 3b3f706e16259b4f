"""A step's segments as index tensors: what convolutions and scans need to know of a step, built once for all layers.

Spans of one token (decoding) and longer ones are kept apart: the first take one batched update, the others a chunked
scan. Knows pages by number only, and nothing of what a state means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hybridkv.cache import Segment
from hybridkv.kernels.chunks import Schedule, make_schedule
from hybridkv.kernels.edges import Edges, make_edges
from hybridkv.kernels.longs import LongSpan, RowSegment
from hybridkv.kernels.pages import PageNumbers, blank
from hybridkv.kernels.spans import PADDED, Span
from hybridkv.memory import Column, Uploader


class Ones(NamedTuple):
    """The spans of one token."""

    rows: Tensor | None
    """[n]: their tokens in the packed row; None: the whole row, in order."""
    src: PageNumbers
    dst: PageNumbers

    def take(self, x: Tensor) -> Tensor:
        """Their tokens. x: [N, ...] -> [n, ...]"""
        return x if self.rows is None else x.index_select(0, self.rows)

    def put(self, y: Tensor, out: Tensor) -> None:
        """The same way back. y: [n, ...], out: [N, ...]"""
        if self.rows is None:
            out.copy_(y)
        else:
            out.index_copy_(0, self.rows, y.to(out.dtype))


class StateNeed(NamedTuple):
    """What the kernels of a layer ask of its table."""

    reach: int | None
    """Tokens that its convolution looks back."""
    chunk_tokens: int | None
    """The longest chunk of its scan."""


class SegmentTable:
    """One state group's segments in a step (of one of the pages a state may be cut into)."""

    def __init__(
        self, ones: Ones | None, longs: list[LongSpan], padded: Tensor | None, uploader: Uploader, name: str
    ) -> None:
        self.ones = ones
        self.padded = padded
        """[N]: whether each row of the packed step is padding, if any is."""
        self._longs = longs
        self._uploader = uploader
        self._name = name
        self._schedules: dict[int, Schedule] = {}
        self._edges: dict[int, Edges] = {}

    def prepare(self, needs: Iterable[StateNeed]) -> None:
        """Make all that kernels will ask for, so that they make nothing while the model runs."""
        if not self.has_long:
            return
        for need in needs:
            if need.reach is not None:
                self.edges(need.reach)
            if need.chunk_tokens is not None:
                self.schedule(need.chunk_tokens)

    @property
    def has_long(self) -> bool:
        return bool(self._longs)

    def schedule(self, chunk_tokens: int) -> Schedule:
        """The longer spans in chunks of at most `chunk_tokens`, a power of two; less if no segment fills one."""
        if chunk_tokens not in self._schedules:
            name = f"{self._name}.chunks{chunk_tokens}"
            self._schedules[chunk_tokens] = make_schedule(self._longs, chunk_tokens, self._uploader, name)
        return self._schedules[chunk_tokens]

    def edges(self, reach: int) -> Edges:
        """The longer spans as a convolution sees them that reaches `reach` tokens back."""
        if reach not in self._edges:
            self._edges[reach] = make_edges(self._longs, reach, self._uploader, f"{self._name}.edges{reach}")
        return self._edges[reach]

    def blank(self, out: Tensor) -> Tensor:
        """Padding comes out as zero. out: [N, ...]"""
        return out if self.padded is None else blank(out, self.padded)


def make_segment_table(
    spans: Sequence[Span],
    segments: Sequence[Sequence[Segment]],
    *,
    page: int = 0,
    uploader: Uploader,
    name: str = "segments",
) -> SegmentTable:
    """segments[i] covers span i; `page` says which of the pages of a state, where it is cut into several.

    Spans whose pages are `PADDED` are padding: kernels pass over them. Where buffers persist they stay in the table
    with `PADDED` as src and dst, so that its sizes depend on the lengths of spans only. Elsewhere, on a CPU, nothing
    needs fixed sizes, and they are left out here: kernels that compute them in vain would cost time.
    """
    one_rows: list[int] = []
    src_pages: list[int] = []
    dst_pages: list[int] = []
    is_padding: list[bool] = []
    longs: list[LongSpan] = []
    for span, parts in zip(spans, segments, strict=True):
        _check(span, parts)
        is_padding.append(parts[-1].dst[page] == PADDED)
        if is_padding[-1] and not uploader.is_persistent:
            continue
        if span.length == 1:
            one_rows.append(span.row)
            src_pages.append(parts[0].src[page])
            dst_pages.append(parts[0].dst[page])
        else:
            shift = span.row - span.start
            rows = [RowSegment(one.start + shift, one.end + shift, one.src[page], one.dst[page]) for one in parts]
            longs.append(LongSpan(span, rows))
    is_padded = any(is_padding)
    flags: Column = np.repeat(is_padding, [span.length for span in spans]) if is_padded else []
    sent = uploader.send(name, rows=one_rows, src=src_pages, dst=dst_pages, padded=flags)
    ones = None
    if one_rows:
        is_whole_row = len(one_rows) == len(spans)
        rows_there = None if is_whole_row else sent["rows"]
        ones = Ones(rows_there, PageNumbers(sent["src"], src_pages), PageNumbers(sent["dst"], dst_pages))
    padded = uploader.flags(f"{name}.padded", sent["padded"]) if is_padded else None
    return SegmentTable(ones, longs, padded, uploader, name)


def _check(span: Span, parts: Sequence[Segment]) -> None:
    ends = [span.start, *(part.end for part in parts)]
    starts = [*(part.start for part in parts), span.end]
    if ends != starts or any(part.end <= part.start for part in parts):
        raise ValueError(f"segments {list(parts)} do not cover positions {span.start} to {span.end} in order")
