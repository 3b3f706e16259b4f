"""Slicing: from a plan to stored groups. Which layers are stored together, and how they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.errors import ParallelismError
from hybridkv.plan import GroupPlan, Plan, Row
from hybridkv.sight import EVERYTHING
from hybridkv.spec import AttentionLayer, HiddenTap, LayerSpec, LinearState, ModelSpec, Split
from hybridkv.stream.form import Chunk, Field, Run, StoredGroup, StoredLayer

MOST_SLICES = 16


def stored_groups(plan: Plan) -> list[StoredGroup]:
    """All layers of a plan, tapped layers excluded."""
    found: dict[str, list[_Placed]] = {}
    for group in plan.groups:
        specs = {spec.layer: spec for spec in group.specs if not isinstance(spec, HiddenTap)}
        for row in group.rows if specs else ():
            for layer in row.layers:
                runs = [(number, i) for number, part in enumerate(specs[layer].parts) for i in range(len(part.runs))]
                placed = _Placed(group, group.name, row, specs[layer], runs)
                found.setdefault(specs[layer].group, []).append(placed)
    groups = []
    for name, all_placed in found.items():
        by_slices = _by_slices(all_placed)
        for slices, together in sorted(by_slices.items()):
            own = name if len(by_slices) == 1 else f"{name}-{slices}"
            groups.append(_stored_group(own, slices, together, plan.model))
    return groups


def tap_groups(plan: Plan) -> dict[str, StoredGroup]:
    """A stored group for each tapped layer, by the name of its cache group."""
    found = {}
    for group in plan.groups:
        for spec in group.specs:
            if isinstance(spec, HiddenTap):
                name = f"tap{spec.layer}"
                placed = _Placed(group, name, group.rows[0], spec, [(0, 0)])
                found[name] = _stored_group(name, 1, [placed], plan.model)
    return found


class _Placed(NamedTuple):
    """Runs of a layer, by part and number, and the row that has the layer."""

    plan: GroupPlan
    table: str
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
    run = _run_of(name, slices, placed, model)
    layers = [_stored_layer(one, slices // run.total) for one in placed]
    chunks: list[Chunk] = []
    for number, (one, layer) in enumerate(zip(placed, layers, strict=True)):
        last = chunks[-1] if chunks else None
        if last is not None and last.table == one.table and last.row is one.row:
            chunks[-1] = Chunk(last.plan, last.table, last.row, last.first, (*last.layers, layer))
        else:
            chunks.append(Chunk(one.plan, one.table, one.row, number, (layer,)))
    spec = placed[0].spec
    sight = spec.sight if isinstance(spec, AttentionLayer) else EVERYTHING
    return StoredGroup(
        name, _role(spec), sight, slices, run, model.rank % (model.tp // run.total) == 0, tuple(layers), tuple(chunks)
    )


def _role(spec: LayerSpec) -> Role:
    if isinstance(spec, HiddenTap):
        return Role.TAP
    if isinstance(spec, AttentionLayer):
        return Role.LOCAL if spec.sight.is_local else Role.FULL
    return Role.STATE


def _run_of(name: str, slices: int, placed: Sequence[_Placed], model: ModelSpec) -> Run:
    """The run of slices that a rank holds: the same of every layer."""
    splits = [split for one in placed for split in one.splits]
    runs = {Run(split.start // split.count, split.total // split.count) for split in splits}
    run = min(runs)
    if len(runs) > 1 or slices % run.total or model.tp % run.total:
        raise ParallelismError(
            f"a store for {model.name} at TP {model.tp}: its {name} layers are stored in {slices} slices, which "
            f"{model.tp} ranks cannot share equally; use a TP that divides {slices}, or no store"
        )
    return run


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
                token_stride,
                per_piece * part.nbytes // part.shape[0],
            )
        )
        parts.append((part, run))
    (num_pieces,) = pieces
    return StoredLayer(spec.layer, num_pieces, tuple(fields), tuple(parts))
