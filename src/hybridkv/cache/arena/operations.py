"""What the memory layer is asked to do between steps."""

from __future__ import annotations

from typing import NamedTuple


class CopyPage(NamedTuple):
    """Copy one page onto another of the same pool."""

    pool: str
    src: int
    dst: int


class ZeroSlab(NamedTuple):
    """Clear a slab that has changed pools: bytes of one kind are nonsense, even NaN, to another."""

    pool: str
    slab: int


class ZeroPage(NamedTuple):
    """Clear a page whose content turned out wrong."""

    pool: str
    page: int


Operation = CopyPage | ZeroSlab | ZeroPage


class OperationBatch(NamedTuple):
    """Operations to run in order, and the id to acknowledge them by."""

    id: int
    operations: tuple[Operation, ...]
