"""Runs: which bytes to copy from one engine's arena to another's for one request. No bytes are touched here.

A `Cutter` is made once for two engines. For each request it lays templates over the page tables of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridkv.cache import NULL_PAGE, Role
from hybridkv.errors import InputError
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.geometry import Geometry
from hybridkv.link.matching import match
from hybridkv.link.parcels import PARCEL_BYTES, Parcel, Placed, cut
from hybridkv.link.templates import Ints, Template, make_templates

_ORDER = {Role.STATE: 0, Role.LOCAL: 1, Role.FULL: 2, Role.TAP: 3}


@dataclass(frozen=True, slots=True)
class PageTables:
    """The pages of one request on one side. Plain data, which may come from another process."""

    tables: Mapping[str, Sequence[int]]
    """By token group of the cache: the page of each block, from block 0 on. The null page: none, or not wanted."""
    states: Mapping[str, Sequence[int]]
    """By state group of the cache: the pages of the state at the end. Empty or missing: not wanted."""


class Cutter:
    """From page tables to runs of bytes. Raises `LinkMismatch` if the engines cannot be connected.

    Only what the target wants and the source has to send is cut: if shares of tensor parallelism differ, the target
    gets the rest from other ranks of the source. A block is sent whole, also if `end` lies inside it: the tokens behind
    it are old ones of the same type.
    """

    def __init__(self, source: Geometry, target: Geometry) -> None:
        self.source = source
        self.target = target
        self._matches = match(source, target)

    @property
    def pieces(self) -> dict[str, range]:
        """By stored group: the heads or slices that the source sends, as the whole model numbers them."""
        return {name: one.pieces for name, one in self._matches.items()}

    def parcels(
        self,
        source: PageTables,
        target: PageTables,
        start: int,
        end: int,
        *,
        parcel_bytes: int = PARCEL_BYTES,
        by_layer: bool = False,
    ) -> list[Parcel]:
        """All bytes of tokens [start, end) and of the state at `end` for which the target has pages.

        `by_layer`: a parcel has bytes of one row of the source's pages only, and parcels are in the order of layers.
        Raises `LinkMismatch` if the target wants something that the source does not have.
        """
        if not 0 <= start <= end or parcel_bytes < 1:
            raise InputError(f"tokens [{start}, {end}) in parcels of {parcel_bytes} bytes: pass 0 <= start <= end")
        self._check_names(target, start, end)
        found: list[Parcel] = []
        for template in self._by_row if by_layer else self._by_table:
            if template.group.role is Role.STATE:
                placed = self._state(template, source, target)
            else:
                placed = self._tokens(template, source, target, start, end)
            if placed is not None and len(placed.nbytes):
                self._check_inside(placed)
                found += cut(template, placed, start, parcel_bytes)
        return found

    # --- templates ----------------------------------------------------------------------------------------------------

    @cached_property
    def _by_table(self) -> list[Template]:
        found = make_templates(self.source, self.target, self._matches.values(), by_layer=False)
        return sorted(found, key=lambda one: _ORDER[one.group.role])

    @cached_property
    def _by_row(self) -> list[Template]:
        found = make_templates(self.source, self.target, self._matches.values(), by_layer=True)
        return sorted(found, key=lambda one: (one.last_layer, _ORDER[one.group.role]))

    # --- pages of a request -------------------------------------------------------------------------------------------

    def _tokens(
        self, template: Template, source: PageTables, target: PageTables, start: int, end: int
    ) -> Placed | None:
        wanted = self._wanted(target, template.target_table, start, end)
        blocks = np.flatnonzero(wanted)
        if not len(blocks):
            return None
        tokens, period = self.target.block_tokens, template.period_tokens
        first, last = int(blocks[0]) * tokens // period, -(-(int(blocks[-1]) + 1) * tokens // period)
        pages = _by_period(wanted, first, last, period // tokens)
        had = _page_array(self.source, template.source_table, source.tables.get(template.source_table, ()))
        sources = _by_period(had, first, last, period // self.source.block_tokens)
        self._check_had(template, sources, pages, first, end)
        return self._placed(template, sources, pages, first)

    def _state(self, template: Template, source: PageTables, target: PageTables) -> Placed | None:
        wanted = _page_array(self.target, template.target_table, target.states.get(template.target_table, ()))
        if not wanted.any():
            return None
        had = _page_array(self.source, template.source_table, source.states.get(template.source_table, ()))
        for side, table, pages, geometry in (
            ("source", template.source_table, had, self.source),
            ("target", template.target_table, wanted, self.target),
        ):
            count = geometry.tables[table].pages_per_item
            if len(pages) != count or not pages.all():
                raise LinkMismatch(
                    f"group {table!r}: the {side} has pages {pages.tolist()} of a state that takes {count}; send none, "
                    f"or a state that both sides hold"
                )
        return self._placed(template, had[None], wanted[None], 0)

    def _placed(self, template: Template, sources: Ints, targets: Ints, first_period: int) -> Placed:
        """The runs of all periods for which both sides have pages. `sources`, `targets`: [periods, blocks]."""
        runs = template.runs
        has_both = (sources[:, runs.source_block] != NULL_PAGE) & (targets[:, runs.target_block] != NULL_PAGE)
        source = self._begins(self.source, template.source_table, sources)[:, runs.source_block] + runs.source
        target = self._begins(self.target, template.target_table, targets)[:, runs.target_block] + runs.target
        nbytes = np.broadcast_to(runs.nbytes, has_both.shape)
        periods = np.arange(first_period, first_period + len(sources), dtype=np.int64)[:, None] * template.period_tokens
        begins = np.maximum(runs.source_block * self.source.block_tokens, runs.target_block * self.target.block_tokens)
        columns = (source, target, nbytes, periods + begins)
        if has_both.all():
            return Placed(*(column.ravel() for column in columns))
        return Placed(*(column[has_both] for column in columns))

    @staticmethod
    def _begins(geometry: Geometry, table: str, pages: Ints) -> Ints:
        grid = geometry.tables[table].grid
        if grid.pages_per_slab * grid.stride_bytes == grid.slab_bytes:
            return pages * grid.stride_bytes
        slabs, numbers = np.divmod(pages, grid.pages_per_slab)
        begins: Ints = slabs * grid.slab_bytes + numbers * grid.stride_bytes
        return begins

    def _wanted(self, target: PageTables, table: str, start: int, end: int) -> Ints:
        """Pages of the target's blocks; the null page for those without a token of [start, end)."""
        tokens = self.target.block_tokens
        wanted = _page_array(self.target, table, target.tables.get(table, ()))[: -(-end // tokens)].copy()
        wanted[: start // tokens if start < end else None] = NULL_PAGE
        return wanted

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_names(self, target: PageTables, start: int, end: int) -> None:
        """The target's tables exist, and the source has those tapped layers that it wants."""
        for table in (*target.tables, *target.states):
            if table not in self.target.tables:
                raise LinkMismatch(f"group {table!r} is not one of the target's: {', '.join(self.target.tables)}")
        for name, group in self.target.groups.items():
            if name not in self.source.groups and self._wanted(target, group.rows[0].table, start, end).any():
                raise LinkMismatch(
                    f"group {name!r}: the source does not keep it; start both engines with the same taps"
                )

    def _check_had(self, template: Template, sources: Ints, targets: Ints, first_period: int, end: int) -> None:
        """The source has all tokens of wanted blocks, but for those behind `end` and those that `end` does not see."""
        segments = template.segments
        lacks = (sources[:, segments.source_block] == NULL_PAGE) & (targets[:, segments.target_block] != NULL_PAGE)
        if not lacks.any():
            return
        begins = np.arange(first_period, first_period + len(sources))[:, None] * template.period_tokens
        visible = template.group.sight.first_visible(end)
        lacks &= (begins + segments.last > visible) & (begins + segments.first < end)
        if lacks.any():
            period, segment = np.argwhere(lacks)[0]
            token = int(begins[period, 0] + segments.first[segment])
            raise LinkMismatch(
                f"group {template.target_table!r}, block {token // self.target.block_tokens} of the target: the source "
                f"has no page for block {token // self.source.block_tokens} of its {template.source_table!r}; ask for "
                f"fewer tokens than {max(token, 0)}, or compute them"
            )

    def _check_inside(self, placed: Placed) -> None:
        for side, offsets, geometry in (("source", placed.source, self.source), ("target", placed.target, self.target)):
            first, last = int(offsets.min()), int((offsets + placed.nbytes).max())
            if first < 0 or last > geometry.arena_bytes:
                raise LinkMismatch(f"bytes [{first}, {last}) are outside the {side}'s arena of {geometry.arena_bytes}")


def _page_array(geometry: Geometry, table: str, pages: Sequence[int]) -> Ints:
    try:
        found = np.asarray(pages, dtype=np.int64).reshape(len(pages))
    except (OverflowError, TypeError, ValueError) as error:
        raise LinkMismatch(f"group {table!r}: its pages are not a list of page numbers: {error}") from None
    if len(found) and not (found.min() >= 0 and found.max() < geometry.num_pages(table)):
        raise LinkMismatch(
            f"group {table!r}: pages {found.min()} to {found.max()} are not all in an arena of "
            f"{geometry.num_pages(table)} pages"
        )
    return found


def _by_period(pages: Ints, first: int, last: int, blocks: int) -> Ints:
    """[periods, blocks of a period], filled up with null pages."""
    found = np.zeros((last - first) * blocks, np.int64)
    some = pages[first * blocks : last * blocks]
    found[: len(some)] = some
    return found.reshape(-1, blocks)
