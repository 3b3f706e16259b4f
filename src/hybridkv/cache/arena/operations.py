"""Operations that the memory layer runs between steps."""

from __future__ import annotations

from typing import NamedTuple


class CopyPage(NamedTuple):
    """Copy one page onto another of the same pool."""

    pool: str
    src: int
    dst: int


class ZeroSlab(NamedTuple):
    """Zero a slab that has changed pools: the bytes of one pool are garbage, even NaN, to another."""

    pool: str
    slab: int


class ZeroPage(NamedTuple):
    """Zero a page whose content is invalid."""

    pool: str
    page: int


Operation = CopyPage | ZeroSlab | ZeroPage


class OperationBatch(NamedTuple):
    """Operations to run in order, and the id with which to acknowledge them."""

    id: int
    operations: tuple[Operation, ...]
