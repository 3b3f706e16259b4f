"""Slicing: from a plan to stored groups. Which layers are stored together, and how they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from hybridkv.cache import CacheGroup, CacheLayout
from hybridkv.errors import ParallelismError
from hybridkv.plan import GroupPlan, Plan, Row
from hybridkv.spec import HiddenTap, LayerSpec, LinearState, ModelSpec, Split
from hybridkv.stream.boxes import Axis, PageGrid
from hybridkv.stream.form import Chunk, Field, Share, StoredGroup, StoredLayer

MOST_SLICES = 16


def stored_groups(plan: Plan, layout: CacheLayout) -> list[StoredGroup]:
    """All layers of a plan, tapped layers excluded."""
    cached = {group.name: group for group in layout.groups}
    found: dict[str, list[_Placed]] = {}
    for group in plan.groups:
        specs = {spec.layer: spec for spec in group.specs if not isinstance(spec, HiddenTap)}
        for row in group.rows if specs else ():
            for layer in row.layers:
                runs = [(number, i) for number, part in enumerate(specs[layer].parts) for i in range(len(part.runs))]
                placed = _Placed(group, cached[group.name], row, specs[layer], runs)
                found.setdefault(specs[layer].group, []).append(placed)
    groups = []
    for name, all_placed in found.items():
        by_slices = _by_slices(all_placed)
        for slices, together in sorted(by_slices.items()):
            own = name if len(by_slices) == 1 else f"{name}-{slices}"
            groups.append(_stored_group(own, slices, together, plan.model))
    return groups


def tap_groups(plan: Plan, layout: CacheLayout) -> dict[str, StoredGroup]:
    """A stored group for each tapped layer, by the name of its cache group. The plan has one group for all."""
    planned = next((group for group in plan.groups if isinstance(group.specs[0], HiddenTap)), None)
    if planned is None:
        return {}
    placed = [
        _Placed(planned, cached, planned.rows[0], spec, [(0, 0)])
        for cached, spec in zip(layout.tap_groups, planned.specs, strict=True)
    ]
    return {one.cached.name: _stored_group(one.cached.name, 1, [one], plan.model) for one in placed}


class _Placed(NamedTuple):
    """Runs of a layer, by part and number, and the row that has the layer."""

    plan: GroupPlan
    cached: CacheGroup
    row: Row
    spec: LayerSpec
    runs: list[tuple[int, int]]

    @property
    def splits(self) -> list[Split]:
        return [self.spec.parts[part].runs[index] for part, index in self.runs]


def _by_slices(placed: Sequence[_Placed]) -> dict[int, list[_Placed]]:
    """The runs of layers of one kind, by the number of slices that each is cut into.

    Runs that no two ranks share are cut alike. Others, such as the inputs that all heads of a group share, are cut into
    no more slices than they have units.
    """
    alone = gcd(MOST_SLICES, *(run.num_units for one in placed for run in one.splits if not run.repeats))
    found: dict[int, list[_Placed]] = {}
    for one in placed:
        by_slices: dict[int, list[tuple[int, int]]] = {}
        for place, run in zip(one.runs, one.splits, strict=True):
            slices = gcd(MOST_SLICES, run.num_units) if run.repeats else alone
            by_slices.setdefault(slices, []).append(place)
        for slices, runs in by_slices.items():
            found.setdefault(slices, []).append(one._replace(runs=runs))
    return found


def _stored_group(name: str, slices: int, placed: Sequence[_Placed], model: ModelSpec) -> StoredGroup:
    placed = sorted(placed, key=lambda one: one.spec.layer)
    share = _share_of(name, slices, placed, model)
    layers = [_stored_layer(one, slices // share.total) for one in placed]
    chunks: list[Chunk] = []
    for number, (one, layer) in enumerate(zip(placed, layers, strict=True)):
        last, table = chunks[-1] if chunks else None, one.cached.name
        if last is not None and last.table == table and last.row is one.row:
            chunks[-1] = Chunk(last.grid, table, last.row, last.first, (*last.layers, layer))
        else:
            grid = PageGrid(one.plan.slab_bytes, one.plan.pages_per_slab, one.plan.stride_bytes)
            chunks.append(Chunk(grid, table, one.row, number, (layer,)))
    cached, is_writer = placed[0].cached, model.rank % (model.tp // share.total) == 0
    return StoredGroup(name, cached.role, cached.sight, slices, share, is_writer, tuple(layers), tuple(chunks))


def _share_of(name: str, slices: int, placed: Sequence[_Placed], model: ModelSpec) -> Share:
    """What a rank holds: the same of every layer."""
    splits = [split for one in placed for split in one.splits]
    shares = {Share(split.start // split.count, split.total // split.count) for split in splits}
    share = min(shares)
    if len(shares) > 1 or slices % share.total or model.tp % share.total:
        raise ParallelismError(
            f"a store for {model.name} at TP {model.tp}: its {name} layers are stored in {slices} slices, which "
            f"{model.tp} ranks cannot share equally; use a TP that divides {slices}, or no store"
        )
    return share


def _stored_layer(placed: _Placed, num_slices: int) -> StoredLayer:
    """`num_slices`: held by this rank."""
    spec, views = placed.spec, {view.part: view for view in placed.row.views if view.layer == placed.spec.layer}
    fields, parts, pieces = [], [], set()
    for number, index in placed.runs:
        part = spec.parts[number]
        run, view = part.runs[index], views[part.name]
        before = sum(one.count for one in part.runs[:index])
        if isinstance(spec, LinearState):
            per_piece, token_stride, stride = run.count // num_slices, 0, view.strides_bytes[0]
        else:
            per_piece, (token_stride, stride) = 1, view.strides_bytes[:2]
        pieces.add(run.count // per_piece)
        fields.append(
            Field(
                view.offset_bytes + before * stride,
                per_piece * stride,
                (Axis(1, token_stride),),
                per_piece * part.nbytes // part.shape[0],
            )
        )
        parts.append((part, run))
    (num_pieces,) = pieces
    return StoredLayer(spec.layer, num_pieces, tuple(fields), tuple(parts))
