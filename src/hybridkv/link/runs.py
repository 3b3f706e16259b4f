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

_NO_PAGES: Ints = np.zeros(0, np.int64)
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
        had, wanted = _arrays(self.source, "source", source), _arrays(self.target, "target", target)
        wanted = {table: self._wanted(table, pages, start, end) for table, pages in wanted.items()}
        self._check_taps(wanted)
        found: list[Parcel] = []
        for template in self._by_row if by_layer else self._by_table:
            pages = wanted.get(template.target_table, _NO_PAGES)
            if not pages.any():
                continue
            ours = had.get(template.source_table, _NO_PAGES)
            if template.group.role is Role.STATE:
                placed = self._state(template, ours, pages)
            else:
                placed = self._tokens(template, ours, pages, end)
            if len(placed.nbytes):
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

    def _tokens(self, template: Template, had: Ints, wanted: Ints, end: int) -> Placed:
        """`had`, `wanted`: the pages of all blocks."""
        blocks = np.flatnonzero(wanted)
        tokens, period = self.target.block_tokens, template.period_tokens
        first, last = int(blocks[0]) * tokens // period, -(-(int(blocks[-1]) + 1) * tokens // period)
        targets = _by_period(wanted, first, last, period // tokens)
        sources = _by_period(had, first, last, period // self.source.block_tokens)
        self._check_had(template, sources, targets, first, end)
        return self._placed(template, sources, targets, first)

    def _state(self, template: Template, had: Ints, wanted: Ints) -> Placed:
        """`had`, `wanted`: the pages of the state."""
        for side, table, pages, geometry in (
            ("source", template.source_table, had, self.source),
            ("target", template.target_table, wanted, self.target),
        ):
            count = geometry.tables[table].pages_per_item
            if len(pages) != count or not pages.all():
                raise LinkMismatch(
                    f"group {table!r}: the {side} has pages {pages.tolist()} of a state that takes {count}; pass all "
                    f"pages on both sides, or none for the target"
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

    def _wanted(self, table: str, pages: Ints, start: int, end: int) -> Ints:
        """Pages of the target; the null page for blocks without a token of [start, end)."""
        if self.target.tables[table].role is Role.STATE:
            return pages
        tokens = self.target.block_tokens
        wanted = pages[: -(-end // tokens)].copy()
        wanted[: start // tokens if start < end else None] = NULL_PAGE
        return wanted

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_taps(self, wanted: Mapping[str, Ints]) -> None:
        """The source keeps those tapped layers that the target wants."""
        for name, group in self.target.groups.items():
            if name not in self.source.groups and wanted.get(group.rows[0].table, _NO_PAGES).any():
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


def _arrays(geometry: Geometry, side: str, pages: PageTables) -> dict[str, Ints]:
    """By table: its pages, all of which are in the arena."""
    found = {}
    for tables, is_state in ((pages.tables, False), (pages.states, True)):
        for name, numbers in tables.items():
            table = geometry.tables.get(name)
            if table is None or (table.role is Role.STATE) != is_state:
                kind = "state" if is_state else "token"
                raise LinkMismatch(
                    f"group {name!r} is not one of the {side}'s {kind} groups: all its groups are "
                    f"{', '.join(geometry.tables)}"
                )
            found[name] = _page_array(name, numbers, geometry.num_pages(name))
    return found


def _page_array(table: str, pages: Sequence[int], num_pages: int) -> Ints:
    try:
        found = np.asarray(pages, dtype=np.int64).reshape(len(pages))
    except (OverflowError, TypeError, ValueError) as error:
        raise LinkMismatch(f"group {table!r}: its pages are not a list of page numbers: {error}") from None
    if len(found) and not (found.min() >= 0 and found.max() < num_pages):
        raise LinkMismatch(
            f"group {table!r}: pages {found.min()} to {found.max()} are not all in an arena of {num_pages} pages"
        )
    return found


def _by_period(pages: Ints, first: int, last: int, blocks: int) -> Ints:
    """[periods, blocks of a period], filled up with null pages."""
    found = np.zeros((last - first) * blocks, np.int64)
    some = pages[first * blocks : last * blocks]
    found[: len(some)] = some
    return found.reshape(-1, blocks)
