"""Spans of more than one token, by rows of the packed step."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.kernels.spans import Span


class RowSegment(NamedTuple):
    """Rows [row, end) of the packed step, with the pages their state is read from and written to."""

    row: int
    end: int
    src: int
    dst: int

    @property
    def length(self) -> int:
        return self.end - self.row


class LongSpan(NamedTuple):
    """One request's segments."""

    span: Span
    segments: list[RowSegment]
