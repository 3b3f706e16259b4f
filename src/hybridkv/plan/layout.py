"""How a page is laid out: rows, and where in them each part of each layer lies.

A page holds one block (or one state) of all layers of a group. It is cut into rows, each the run of a few consecutive
layers; inside a row of a token group the order of heads, layers, K/V and tokens is a choice:

    row order "hlkt":   head 0 [ layer 3 [ K [ token 0 .. 15 ] V [ .. ] ]  layer 7 [ .. ] ]  head 1 [ .. ]

With heads outermost, what a tensor-parallel rank keeps of a row is one contiguous run of the unsplit row. Whatever the
order, every part is an affine view: an offset and one stride for each axis, both derived from the sizes, never assumed.
No slabs and no memory sizes here: this layout is canonical for a model, so stored rows outlive a change of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, permutations
from math import prod

from hybridkv.errors import PlanError
from hybridkv.spec import DType, HiddenTap, LayerSpec, LinearState, Part

ROW_ORDERS = tuple("".join(order) for order in permutations("hlkt"))
"""h: heads, l: layers, k: K/V (parts), t: tokens; outermost first. The elements of one head come last."""

PART_ALIGN_BYTES = 64
"""Parts of a state, and rows, begin on a cache line."""


@dataclass(frozen=True, slots=True)
class PartView:
    """Where one part of one layer lies in a page: `[tokens, heads, dim]` for token groups, its own shape for states."""

    layer: int
    part: str
    dtype: DType
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A contiguous run of a page that belongs to a few consecutive layers: the unit of layerwise load and dump."""

    layers: tuple[int, ...]
    page: int
    """Which page of its item holds the row: 0, except for states cut into several pages."""
    offset_bytes: int
    nbytes: int
    views: tuple[PartView, ...]

    @property
    def first_layer(self) -> int:
        return self.layers[0]

    @property
    def last_layer(self) -> int:
        return self.layers[-1]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The rows of one item of a group: a block of all its layers, a state, or one tapped layer of a block."""

    rows: tuple[Row, ...]
    pages: int
    """Equal pages an item takes."""

    @property
    def page_bytes(self) -> int:
        return max(row.offset_bytes + row.nbytes for row in self.rows)

    @property
    def item_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


def lay_out(
    specs: Sequence[LayerSpec], block_tokens: int, row_layers: int, row_order: str, pages: int = 1
) -> PageLayout:
    """The layout of a group's item, cut into `pages` pages at row boundaries."""
    if isinstance(specs[0], HiddenTap):
        return PageLayout((_tap_row(specs, block_tokens),), pages=1)
    runs = _row_runs(specs, row_layers)
    rows: list[Row] = []
    for page in range(pages):
        offset = 0
        for run in runs[page * len(runs) // pages : (page + 1) * len(runs) // pages]:
            if isinstance(run[0], LinearState):
                views, nbytes = _state_views(run, offset)
            else:
                views, nbytes = _token_views(run, offset, block_tokens, row_order)
            rows.append(Row(tuple(spec.layer for spec in run), page, offset, nbytes, views))
            offset += nbytes
    return PageLayout(tuple(rows), pages)


def most_pages(specs: Sequence[LayerSpec], row_layers: int) -> int:
    """How many pages an item can be cut into: states at each row boundary, everything else not at all."""
    return len(_row_runs(specs, row_layers)) if isinstance(specs[0], LinearState) else 1


def check_row_order(row_order: str) -> str:
    if row_order not in ROW_ORDERS:
        raise PlanError(
            f"row order {row_order!r} is not an order of h, l, k and t (heads, layers, K/V, tokens): "
            f"write each once, such as {ROW_ORDERS[0]}"
        )
    return row_order


def _row_runs(specs: Sequence[LayerSpec], row_layers: int) -> list[list[LayerSpec]]:
    """Rows of at most `row_layers` layers, as equal as can be, of layers that keep the same shapes."""
    num_rows = -(-len(specs) // row_layers)
    bounds = [i * len(specs) // num_rows for i in range(num_rows + 1)]
    return [
        list(same)
        for start, stop in pairwise(bounds)
        for _, same in groupby(specs[start:stop], key=lambda spec: spec.parts)
    ]


def _token_views(
    run: Sequence[LayerSpec], row_offset: int, block_tokens: int, row_order: str
) -> tuple[tuple[PartView, ...], int]:
    parts = run[0].parts
    counts = {"h": parts[0].shape[0], "l": len(run), "t": block_tokens}
    head_bytes = {part.name: prod(part.inner) * part.dtype.nbytes for part in parts}

    def extent(axes: str, part: Part) -> int:
        """Bytes below the given inner axes: of `part` alone, or of all parts if the parts lie among those axes."""
        per_head = sum(head_bytes.values()) if "k" in axes else head_bytes[part.name]
        return per_head * prod(counts[axis] for axis in axes if axis != "k")

    views = []
    before_k = row_order.index("k")
    for index, spec in enumerate(run):
        part_offset = 0
        for part in parts:
            stride = {axis: extent(row_order[i + 1 :], part) for i, axis in enumerate(row_order)}
            views.append(
                PartView(
                    layer=spec.layer,
                    part=part.name,
                    dtype=part.dtype,
                    offset_bytes=row_offset + index * stride["l"] + part_offset,
                    shape=(block_tokens, counts["h"], prod(part.inner)),
                    strides_bytes=(stride["t"], stride["h"], part.dtype.nbytes),
                )
            )
            part_offset += extent(row_order[before_k + 1 :], part)
    return tuple(views), _align(extent(row_order, parts[0]))


def _state_views(run: Sequence[LayerSpec], row_offset: int) -> tuple[tuple[PartView, ...], int]:
    """Layer after layer, part after part, each contiguous."""
    views, offset = [], 0
    for spec in run:
        for part in spec.parts:
            views.append(
                PartView(spec.layer, part.name, part.dtype, row_offset + offset, part.shape, _contiguous(part))
            )
            offset = _align(offset + part.nbytes)
    return tuple(views), offset


def _tap_row(specs: Sequence[LayerSpec], block_tokens: int) -> Row:
    """A tap's page holds one block of *one* layer, so that a request pays only for the layers it asks for."""
    views = []
    for spec in specs:
        (part,) = spec.parts
        views.append(
            PartView(
                spec.layer, part.name, part.dtype, 0, (block_tokens, *part.shape), (part.nbytes, *_contiguous(part))
            )
        )
    return Row(tuple(spec.layer for spec in specs), 0, 0, _align(block_tokens * specs[0].nbytes), tuple(views))


def _contiguous(part: Part) -> tuple[int, ...]:
    return tuple(prod(part.shape[i + 1 :]) * part.dtype.nbytes for i in range(len(part.shape)))


def _align(nbytes: int) -> int:
    return -(-nbytes // PART_ALIGN_BYTES) * PART_ALIGN_BYTES
