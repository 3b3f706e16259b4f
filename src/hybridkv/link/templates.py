"""Templates: the runs of bytes of one period of blocks, which repeat over all pages of a request.

A period is as many tokens as both sides have whole blocks for. Its runs are relative to pages:

    source blocks of 16    │ 0       │ 1       │ 2       │      period of 48 tokens
    target blocks of 24    │ 0            │ 1            │      segments: 0-0, 1-0, 1-1, 2-1

A state is one period, whose "blocks" are the pages that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.cache import Role
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.geometry import Geometry
from hybridkv.link.matching import Match
from hybridkv.link.places import FieldPlace, GroupGeometry, LayerPlace, RowPlace
from hybridkv.plan.layout import PART_ALIGN_BYTES
from hybridkv.plan.slabs import PADDING_LIMIT

Ints = npt.NDArray[np.int64]
_MOST_RUNS = 1 << 23
"""Runs of a template before they are merged. More than that comes from block sizes without a common divisor."""


class Segments(NamedTuple):
    """Runs of tokens of a period that lie in one block on each side."""

    source_block: Ints
    target_block: Ints
    first: Ints
    last: Ints


class Runs(NamedTuple):
    """Runs of bytes of a period. Offsets count from the start of a page."""

    source_block: Ints
    target_block: Ints
    source: Ints
    target: Ints
    nbytes: Ints

    def taken(self, index: npt.NDArray[np.intp]) -> Runs:
        return Runs(*(column[index] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """What passes from the pages of one table to those of another."""

    source_table: str
    target_table: str
    group: GroupGeometry
    """A group in the target's table: all of them have the same role and the same sight."""
    last_layer: int
    period_tokens: int
    segments: Segments
    runs: Runs
    page_gap: int
    """Padding between two pages that may be sent with them, so that pages in a row are one run."""


class _Pair(NamedTuple):
    """A layer on both sides, and the pieces to send."""

    source: tuple[RowPlace, LayerPlace]
    target: tuple[RowPlace, LayerPlace]
    match: Match


def make_templates(source: Geometry, target: Geometry, matches: Iterable[Match], by_layer: bool) -> list[Template]:
    """One for each pair of tables that share layers; if `by_layer`, one for each row of the source's pages."""
    found: dict[tuple[str, str, tuple[int, int]], list[_Pair]] = {}
    for match in matches:
        theirs = match.target.layers
        for number, place in match.source.layers.items():
            row, other = place[0], theirs[number]
            part = (row.page, row.offset_bytes) if by_layer else (0, 0)
            found.setdefault((row.table, other[0].table, part), []).append(_Pair(place, other, match))
    return [_template(source, target, pairs) for pairs in found.values()]


def _template(source: Geometry, target: Geometry, pairs: Sequence[_Pair]) -> Template:
    (row, _), (other, _), match = pairs[0]
    is_state = match.target.role is Role.STATE
    segments = _state_pages() if is_state else _segments(source.block_tokens, target.block_tokens)
    elements = [one for pair in pairs for one in _elements(pair, segments, source, target)]
    runs = _merged(Runs(*(np.concatenate(column) for column in zip(*elements, strict=True))), target, other.table)
    return Template(
        row.table,
        other.table,
        match.target,
        max(layer.layer for (_, layer), _, _ in pairs),
        1 if is_state else lcm(source.block_tokens, target.block_tokens),
        segments,
        runs,
        _page_gap(source, target, row.table, other.table, runs),
    )


def _segments(source_tokens: int, target_tokens: int) -> Segments:
    period = lcm(source_tokens, target_tokens)
    if period // source_tokens + period // target_tokens > _MOST_RUNS >> 3:
        raise LinkMismatch(
            f"blocks of {source_tokens} tokens at the source and of {target_tokens} at the target have too little in "
            f"common: choose block sizes of which one divides the other"
        )
    first = np.union1d(np.arange(0, period, source_tokens), np.arange(0, period, target_tokens)).astype(np.int64)
    return Segments(first // source_tokens, first // target_tokens, first, np.append(first[1:], period))


def _state_pages() -> Segments:
    """One token; the pages are those of each row."""
    zero = np.zeros(1, np.int64)
    return Segments(zero, zero, zero, zero + 1)


def _elements(pair: _Pair, segments: Segments, source: Geometry, target: Geometry) -> Iterable[Runs]:
    """The runs of one layer, a run for each piece of each token, or for the tokens of a segment that lie together."""
    (row, layer), (other_row, other_layer), (ours, theirs, sent) = pair
    length, number = segments.last - segments.first, np.arange(len(segments.first))
    for field, other in zip(layer.fields, other_layer.fields, strict=True):
        together = field.token_stride == other.token_stride == field.nbytes
        num_runs = (len(number) if together else int(length.sum())) * len(sent)
        if num_runs > _MOST_RUNS:
            raise LinkMismatch(
                f"layer {layer.layer} of group {ours.name!r} would be sent in {num_runs} runs a period: choose block "
                f"sizes of which one divides the other"
            )
        index = number if together else np.repeat(number, length)
        first = segments.first if together else np.arange(len(index), dtype=np.int64)
        nbytes = field.nbytes * length if together else np.full(len(index), field.nbytes, np.int64)
        pieces = np.arange(sent.start, sent.stop, dtype=np.int64)
        yield Runs(
            np.repeat(segments.source_block[index] + row.page, len(sent)),
            np.repeat(segments.target_block[index] + other_row.page, len(sent)),
            _offsets(field, first % source.tokens_in(ours), pieces - ours.pieces.start),
            _offsets(other, first % target.tokens_in(theirs), pieces - theirs.pieces.start),
            np.repeat(nbytes, len(sent)),
        )


def _offsets(field: FieldPlace, tokens: Ints, pieces: Ints) -> Ints:
    offsets: Ints = field.offset_bytes + tokens[:, None] * field.token_stride + pieces * field.piece_stride
    return offsets.ravel()


# --- merging ----------------------------------------------------------------------------------------------------------


def _merged(runs: Runs, target: Geometry, table: str) -> Runs:
    """In the order of the target; runs that adjoin on both sides are one, also if only padding is between them."""
    runs = runs.taken(np.lexsort((runs.target, runs.source_block, runs.target_block)))
    for most_padding in (0, max(PART_ALIGN_BYTES, int(PADDING_LIMIT * target.tables[table].grid.stride_bytes))):
        gap = runs.target[1:] - runs.target[:-1] - runs.nbytes[:-1]
        joins = gap == runs.source[1:] - runs.source[:-1] - runs.nbytes[:-1]
        joins &= (runs.source_block[1:] == runs.source_block[:-1]) & (runs.target_block[1:] == runs.target_block[:-1])
        joins &= (gap >= 0) & (gap <= most_padding)
        if most_padding and joins.any():
            joins &= _is_padding(target, table, runs, gap)
        starts = np.flatnonzero(np.concatenate(([True], ~joins)))
        last = np.append(starts[1:], len(runs.nbytes)) - 1
        nbytes = runs.target[last] + runs.nbytes[last] - runs.target[starts]
        runs = runs.taken(starts)._replace(nbytes=nbytes)
    return runs


def _is_padding(target: Geometry, table: str, runs: Runs, gap: Ints) -> npt.NDArray[np.bool_]:
    """Whether no field of any group lies in the gap between each run and the next."""
    found = np.zeros(len(gap), np.bool_)
    # Blocks of tokens are all alike; of states, each page has its own fields.
    is_state = target.tables[table].role is Role.STATE
    for page in np.unique(runs.target_block) if is_state else (0,):
        starts, ends = _used(target, table, int(page))
        first = runs.target[:-1] + runs.nbytes[:-1]
        after = np.searchsorted(ends, first, side="right")
        free = np.append(starts, np.iinfo(np.int64).max)[after] >= first + gap
        found |= free & (runs.target_block[:-1] == page) if is_state else free
    return found


def _used(geometry: Geometry, table: str, page: int) -> tuple[Ints, Ints]:
    """First and last byte of all fields in a page of a table, in order."""
    starts, ends = [], []
    for group, row in geometry.rows_in(table):
        tokens = np.arange(geometry.tokens_in(group), dtype=np.int64)
        for layer in row.layers if row.page == page else ():
            pieces = np.arange(layer.num_pieces, dtype=np.int64)
            for field in layer.fields:
                starts.append(_offsets(field, tokens, pieces))
                ends.append(starts[-1] + field.nbytes)
    return np.sort(np.concatenate(starts)), np.sort(np.concatenate(ends))


def _page_gap(source: Geometry, target: Geometry, source_table: str, target_table: str, runs: Runs) -> int:
    """0, unless a page is one run with all that the target's page has, and the next page is little further on."""
    stride = target.tables[target_table].grid.stride_bytes
    nbytes, start = int(runs.nbytes[0]), int(runs.target[0])
    if len(runs.nbytes) > 1 or source.tables[source_table].grid.stride_bytes != stride:
        return 0
    starts, ends = _used(target, target_table, int(runs.target_block[0]))
    is_all = starts[0] >= start and ends[-1] <= start + nbytes
    return stride - nbytes if is_all and stride - nbytes <= PADDING_LIMIT * stride else 0
