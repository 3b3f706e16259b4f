"""Arrays of page numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Pages: TypeAlias = "array[int]"
"""Page numbers as C ints: copied without one Python object per page, and ready to become a tensor."""


def make_pages(numbers: Iterable[int] | None = None) -> Pages:
    return array("i") if numbers is None else array("i", numbers)


def as_numbers(pages: Pages) -> npt.NDArray[np.intc]:
    """The same memory as a numpy array. Drop it before the array grows or shrinks."""
    return np.frombuffer(pages, dtype=np.intc)


NULL_PAGE = 0
"""A page of the null slab: all zero, never written. It is the source of a state at position 0. In tables and nodes it
stands for blocks that have no page in a group: out of the window, or never tapped."""


MANY_PAGES = 256
"""Up to this many pages a Python loop is faster than numpy."""


def in_order(pages: Pages) -> Pages:
    """The same pages, sorted."""
    if len(pages) <= MANY_PAGES:
        return make_pages(sorted(pages))
    ordered = make_pages()
    ordered.frombytes(np.sort(as_numbers(pages)).tobytes())
    return ordered
