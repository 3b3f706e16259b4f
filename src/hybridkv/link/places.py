"""Places: where the fields of one group lie in pages, and what they hold. Plain data, parts of a geometry.

Places may come from another process. `check_table` and `check_group` refuse those that leave their pages or the arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.link.errors import LinkMismatch
from hybridkv.sight import Sight
from hybridkv.spec import DType
from hybridkv.stream.boxes import PageGrid
from hybridkv.stream.form import Share

LARGEST = 2**50
"""No size, offset or distance is larger."""


class PartKind(NamedTuple):
    """What a field holds, of the whole model: as in the description of a store's layout."""

    name: str
    dtype: DType
    length: int
    inner: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return prod(self.inner) * self.dtype.nbytes


class FieldPlace(NamedTuple):
    """Where a field lies in a page: piece p of token t at `offset_bytes + p * piece_stride + t * token_stride`."""

    offset_bytes: int
    piece_stride: int
    token_stride: int
    nbytes: int
    """Bytes of one piece, for one token."""

    def end_bytes(self, num_pieces: int, num_tokens: int) -> int:
        last_piece, last_token = (num_pieces - 1) * self.piece_stride, (num_tokens - 1) * self.token_stride
        return self.offset_bytes + last_piece + last_token + self.nbytes


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """One layer of a group. `num_pieces`: the heads or slices that this engine holds."""

    layer: int
    num_pieces: int
    parts: tuple[PartKind, ...]
    fields: tuple[FieldPlace, ...]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Layers of a group that lie in one row of the pages of `table`."""

    table: str
    page: int
    """Which page of a state has the row; 0 for tokens."""
    offset_bytes: int
    nbytes: int
    layers: tuple[LayerPlace, ...]


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """A stored group: what it holds, which share of it this engine holds, and where."""

    name: str
    role: Role
    sight: Sight
    slices: int
    share: Share
    is_writer: bool
    """Whether this engine sends its share. If several ranks hold the same, the first does."""
    rows: tuple[RowPlace, ...]

    @property
    def layers(self) -> dict[int, tuple[RowPlace, LayerPlace]]:
        return {layer.layer: (row, layer) for row in self.rows for layer in row.layers}

    @property
    def num_pieces(self) -> int:
        """Heads or slices of each layer that this engine holds."""
        return self.rows[0].layers[0].num_pieces

    @property
    def pieces(self) -> range:
        """Heads or slices that this engine holds, as the whole model numbers them."""
        return range(self.share.number * self.num_pieces, (self.share.number + 1) * self.num_pieces)

    @property
    def item_bytes(self) -> int:
        """Bytes of one token in all layers, or of one state."""
        layers = [layer for row in self.rows for layer in row.layers]
        return sum(layer.num_pieces * field.nbytes for layer in layers for field in layer.fields)


class Table(NamedTuple):
    """A cache group: one page table of a request."""

    grid: PageGrid
    role: Role
    pages_per_item: int
    """Pages of one block (1) or of one state."""


# --- checks -----------------------------------------------------------------------------------------------------------


def check(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise LinkMismatch(f"geometry: {what} cannot be {value}; run the same version of hybridkv on both sides")


def check_table(name: str, table: Table, arena_bytes: int) -> None:
    grid, what = table.grid, f"table {name!r}"
    check(min(grid) >= 1 and grid.slab_bytes <= arena_bytes, f"{what} in an arena of {arena_bytes} bytes", grid)
    check(grid.pages_per_slab * grid.stride_bytes <= grid.slab_bytes, what, grid)
    check(table.pages_per_item == 1 or table.role is Role.STATE, what, table)
    check(1 <= table.pages_per_item <= 1 << 16, what, table)


def check_group(group: GroupGeometry, tables: Mapping[str, Table], block_tokens: int) -> None:
    what, share = f"group {group.name!r}", group.share
    check(bool(group.rows) and all(row.layers for row in group.rows), what, "without layers")
    check(0 <= share.number < share.total <= LARGEST, f"the share of {what}", share)
    check(1 <= group.slices <= LARGEST and group.slices % share.total == 0, f"the slices of {what}", group.slices)
    check(group.sight.is_local == (group.role is Role.LOCAL), f"the sight of {what}", group.sight)
    check(len(group.layers) == sum(len(row.layers) for row in group.rows), what, "a group with a layer twice")
    for row in group.rows:
        table = tables.get(row.table)
        if table is None or table.role is not group.role:
            raise LinkMismatch(f"geometry: {what} lies in table {row.table!r}, which has no pages of role {group.role}")
        inside = row.offset_bytes >= 0 and row.nbytes >= 1
        inside = inside and row.offset_bytes + row.nbytes <= table.grid.stride_bytes
        check(inside and 0 <= row.page < table.pages_per_item, f"a row of {what}", row)
        for layer in row.layers:
            _check_layer(group, row, layer, block_tokens)


def _check_layer(group: GroupGeometry, row: RowPlace, layer: LayerPlace, block_tokens: int) -> None:
    is_state, what = group.role is Role.STATE, f"layer {layer.layer} of group {group.name!r}"
    check(bool(layer.fields) and len(layer.parts) == len(layer.fields), f"the fields of {what}", layer.fields)
    check(layer.num_pieces == group.num_pieces >= 1, f"the pieces of {what}", layer.num_pieces)
    for part, field in zip(layer.parts, layer.fields, strict=True):
        pieces = group.slices if is_state else part.length
        check(pieces == layer.num_pieces * group.share.total, f"part {part.name!r} of {what}", part)
        check(part.length % pieces == 0, f"part {part.name!r} of {what}", part)
        check(field.nbytes == part.element_bytes * (part.length // pieces) >= 1, f"a field of {what}", field)
        end = field.end_bytes(layer.num_pieces, 1 if is_state else block_tokens)
        inside = min(field) >= 0 and field.offset_bytes >= row.offset_bytes and end <= row.offset_bytes + row.nbytes
        check(inside, f"a field of {what} in a row at {row.offset_bytes} of {row.nbytes} bytes", field)
