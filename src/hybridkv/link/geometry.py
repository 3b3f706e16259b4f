"""Geometry: where cached data lies in one engine's arena, as plain data that another process can use.

Groups, layers and fields are those of `stream.Catalogue`; no requests, no page numbers and no bytes here. A geometry
may come from another process, so it checks itself: every field of every page lies inside the arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridkv.cache import Role
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.places import (
    LARGEST,
    FieldPlace,
    GroupGeometry,
    LayerPlace,
    PartKind,
    RowPlace,
    Table,
    check,
    check_group,
    check_table,
)
from hybridkv.link.places_json import Reader, group_json, read_group, read_table, table_json
from hybridkv.plan.plan import MOST_BLOCK_TOKENS
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.form import Chunk, Field, StoredGroup, StoredLayer

FORMAT = 1


@dataclass(frozen=True)
class Geometry:
    """One engine's arena. Raises `LinkMismatch` for fields that do not lie inside it."""

    model_type: str
    identity: str
    """Digest of weights and configuration: engines with different ones do not share pages."""
    block_tokens: int
    arena_bytes: int
    tables: Mapping[str, Table]
    """By name of the cache group; `tap3` is the hidden state that enters layer 3."""
    groups: Mapping[str, GroupGeometry]
    """By name of the stored group, tapped layers included."""

    @classmethod
    def of(cls, catalogue: Catalogue, *, arena_bytes: int, identity: str) -> Geometry:
        """The geometry of an engine's own arena, in which every table has one page grid."""
        stored = [*catalogue.groups, *catalogue.tap_groups.values()]
        pages = [(chunk.table, chunk.row.page + 1) for group in stored for chunk in group.chunks]
        return cls(
            catalogue.description["type"],
            identity,
            catalogue.block_tokens,
            arena_bytes,
            {
                chunk.table: Table(
                    chunk.grid, group.role, max(number for table, number in pages if table == chunk.table)
                )
                for group in stored
                for chunk in group.chunks
            },
            {group.name: _group_geometry(group) for group in stored},
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON types."""
        return {
            "format": FORMAT,
            "model_type": self.model_type,
            "identity": self.identity,
            "block_tokens": self.block_tokens,
            "arena_bytes": self.arena_bytes,
            "tables": {name: table_json(table) for name, table in self.tables.items()},
            "groups": {name: group_json(group) for name, group in self.groups.items()},
        }

    @classmethod
    def from_json(cls, value: object) -> Geometry:
        """The geometry that `to_json` wrote. Raises `LinkMismatch` for anything else."""
        whole = Reader(value, "geometry")
        written = whole.integer("format")
        if written != FORMAT:
            raise LinkMismatch(
                f"geometry of format {written}, this version of hybridkv reads {FORMAT}: run the same version on both "
                f"sides"
            )
        return cls(
            whole.text("model_type"),
            whole.text("identity"),
            whole.integer("block_tokens"),
            whole.integer("arena_bytes"),
            {name: read_table(one) for name, one in whole.entries("tables")},
            {name: read_group(name, one) for name, one in whole.entries("groups")},
        )

    def __post_init__(self) -> None:
        check(1 <= self.block_tokens <= MOST_BLOCK_TOKENS, "block_tokens", self.block_tokens)
        check(1 <= self.arena_bytes <= LARGEST, "arena_bytes", self.arena_bytes)
        for name, table in self.tables.items():
            check_table(name, table, self.arena_bytes)
        for name, group in self.groups.items():
            check(name == group.name, "the name of a group", group.name)
            check_group(group, self.tables, self.block_tokens)

    def num_pages(self, table: str) -> int:
        """Pages that the arena has room for; page 0 is the null page."""
        grid = self.tables[table].grid
        return self.arena_bytes // grid.slab_bytes * grid.pages_per_slab

    def rows_in(self, table: str) -> Iterator[tuple[GroupGeometry, RowPlace]]:
        """All rows of a table's pages, of all groups that lie in them."""
        for group in self.groups.values():
            for row in group.rows:
                if row.table == table:
                    yield group, row

    def tokens_in(self, group: GroupGeometry) -> int:
        """Tokens of one page; 1 for states."""
        return 1 if group.role is Role.STATE else self.block_tokens

    def full_attention_bytes(self, num_tokens: int) -> int:
        """Bytes of `num_tokens` tokens if every layer were treated as full attention, as with one page size for all.

        Windows and chunks keep all blocks. A state counts once for as many tokens as an attention layer keeps in the
        bytes of a layer's state: that is the block size which one page size forces. Tapped layers are not counted.
        """
        whole = -(-num_tokens // self.block_tokens) * self.block_tokens
        num_states = -(-num_tokens // self._uniform_tokens)
        counts = {Role.STATE: num_states, Role.TAP: 0}
        return sum(group.item_bytes * counts.get(group.role, whole) for group in self.groups.values())

    @property
    def _uniform_tokens(self) -> int:
        """Tokens in a block if one page size has room for a state of a layer and for a block of a layer."""
        per_layer = {Role.STATE: 0, Role.FULL: 0, Role.LOCAL: 0, Role.TAP: 0}
        for group in self.groups.values():
            per_layer[group.role] = max(per_layer[group.role], group.item_bytes // len(group.layers))
        token_bytes = max(per_layer[Role.FULL], per_layer[Role.LOCAL])
        return max(self.block_tokens, -(-per_layer[Role.STATE] // token_bytes) if token_bytes else 1)


# --- from a catalogue -------------------------------------------------------------------------------------------------


def _group_geometry(group: StoredGroup) -> GroupGeometry:
    rows = tuple(_row_place(chunk) for chunk in group.chunks)
    return GroupGeometry(group.name, group.role, group.sight, group.slices, group.share, group.is_writer, rows)


def _row_place(chunk: Chunk) -> RowPlace:
    layers = tuple(_layer_place(layer, chunk.table) for layer in chunk.layers)
    return RowPlace(chunk.table, chunk.row.page, chunk.row.offset_bytes, chunk.row.nbytes, layers)


def _layer_place(layer: StoredLayer, table: str) -> LayerPlace:
    parts = tuple(PartKind(part.name, part.dtype, run.total, part.inner) for part, run in layer.parts)
    return LayerPlace(layer.layer, layer.num_pieces, parts, tuple(_field_place(one, table) for one in layer.fields))


def _field_place(field: Field, table: str) -> FieldPlace:
    if len(field.token_axes) != 1 or field.inner or field.page_stride is not None:
        raise LinkMismatch(
            f"table {table!r} has a field that is not contiguous ({field}): only pages of hybridkv's own arena can be "
            f"linked"
        )
    return FieldPlace(field.page_offset, field.piece_stride, field.token_axes[0].stride, field.nbytes)
