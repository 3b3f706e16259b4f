"""Lattices: where the elements of an array lie in memory, if they lie at regular distances.

A strided array has one stride an axis. Kernels also use tiled layouts: tokens in groups of 16, or pairs of elements
side by side. There an index is written as a number with several digits, and each digit has a stride of its own:

    128 dims as 64 pairs, pairs 512 bytes apart, elements 2 bytes apart: (Axis(64, 512), Axis(2, 2))

This module knows numbers only: neither torch nor vLLM.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.stream.boxes import Axis


class Lattice(NamedTuple):
    """Byte offset of every element: `offset` plus, for every digit of every axis, its value times its stride."""

    offset: int
    axes: tuple[tuple[Axis, ...], ...]
    """The digits of each logical axis, outermost first. An axis of size 1 has none."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(digit.size for digit in digits) for digits in self.axes)

    def places(self) -> NDArray[np.int64]:
        """Byte offset of every element, in an array of `shape`."""
        digits = [digit for digits in self.axes for digit in digits]
        places = np.full([digit.size for digit in digits], self.offset, np.int64)
        for number, digit in enumerate(digits):
            steps = np.arange(digit.size, dtype=np.int64) * digit.stride
            places += steps.reshape(-1, *[1] * (len(digits) - number - 1))
        return places.reshape(self.shape)


def lattice(places: NDArray[np.int64]) -> Lattice | None:
    """The lattice whose elements lie at `places`, with as few digits as possible. None if there is none."""
    if not places.size:
        return None
    origin = int(places.flat[0])
    lines = [np.moveaxis(places, axis, -1)[(0,) * (places.ndim - 1)] for axis in range(places.ndim)]
    found = Lattice(origin, tuple(_digits(line - origin) for line in lines))
    # The lines have the elements with at most one index that is not zero. All others must follow from them.
    return found if found.shape == places.shape and np.array_equal(found.places(), places) else None


def _digits(line: NDArray[np.int64]) -> tuple[Axis, ...]:
    """The digits of one axis, outermost first, if it has any. `line` has the distances from its first element.

    The innermost digit ends where the distances stop being equal. Had it ended earlier, the next digit would continue
    its run, and both would be one digit.
    """
    digits: list[Axis] = []
    while line.size > 1:
        stride = line[1]
        wrong = np.flatnonzero(line != np.arange(line.size) * stride)
        size = int(wrong[0]) if wrong.size else line.size
        digits.append(Axis(size, int(stride)))
        line = line[::size]
    return tuple(reversed(digits))
