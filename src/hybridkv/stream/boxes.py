"""Boxes: bytes that lie at regular distances both in pages and in a stored row, so that one strided copy moves them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple


class Box(NamedTuple):
    """Pieces of `nbytes` a token. A page has the tokens of one block, a row those of many blocks."""

    shape: tuple[int, ...]
    """Number of pieces along each axis, tokens excluded."""
    page_offset: int
    page_strides: tuple[int, ...]
    row_offset: int
    row_strides: tuple[int, ...]
    token_stride: int
    """Distance of two tokens in the page. In the row they are `nbytes` apart."""
    nbytes: int

    def moved(self, row_bytes: int) -> Box:
        """The same box further on in the row."""
        return self._replace(row_offset=self.row_offset + row_bytes)

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 8, that divides all offsets, distances and lengths."""
        sizes = (self.page_offset, self.row_offset, self.token_stride, self.nbytes)
        return gcd(8, *sizes, *self.page_strides, *self.row_strides)


def stack(boxes: Sequence[Box]) -> list[Box]:
    """One box with another axis in front, if the boxes differ only in their offsets and lie at equal distances."""
    first = boxes[0]
    if len(boxes) == 1:
        return [first]
    steps = {(b.page_offset - a.page_offset, b.row_offset - a.row_offset) for a, b in pairwise(boxes)}
    same = {box._replace(page_offset=0, row_offset=0) for box in boxes}
    if len(steps) > 1 or len(same) > 1:
        return list(boxes)
    ((page_step, row_step),) = steps
    return [
        first._replace(
            shape=(len(boxes), *first.shape),
            page_strides=(page_step, *first.page_strides),
            row_strides=(row_step, *first.row_strides),
        )
    ]
