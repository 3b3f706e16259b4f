"""The stored form: which bytes an object has. They are the same whatever plan, pack size or row length computed them.

A row of an object has one layer. Its outermost axis is the one that tensor parallelism cuts:

    tokens    head 0 [ K [ all tokens ] V [ all tokens ] ]   head 1 [ .. ]  ..
    states    slice 0 [ its queries, keys, values of the convolution; its recurrent state ]   slice 1 [ .. ]  ..

So a rank holds one contiguous run of the whole row, and the rows of all ranks, end to end, are the row of one rank
alone. A layer is cut into `slices`, as many equal ones as its heads allow, up to 16. An object holds the run of slices
that its writer holds: `state.1of2` is the second half. If several ranks hold the same, such as MLA latents, the first
of them writes it.

docs/store.md describes the form byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.errors import ParallelismError
from hybridkv.plan import GroupPlan, Plan, Row
from hybridkv.sight import EVERYTHING, Sight
from hybridkv.spec import AttentionLayer, HiddenTap, LayerSpec, LinearState, ModelSpec, Part, Split
from hybridkv.stream.boxes import Box, stack

MOST_SLICES = 16
_RANKS = {Role.STATE: 0, Role.LOCAL: 1, Role.FULL: 2, Role.TAP: 3}
"""Read order of rows that are needed at the same layer."""


class Run(NamedTuple):
    """The slices that one object holds: part `number` of `total` equal parts."""

    number: int
    total: int

    def slices(self, num_slices: int) -> range:
        size = num_slices // self.total
        return range(self.number * size, (self.number + 1) * size)

    def of_group(self, name: str) -> str:
        """Group name of the objects that hold this run."""
        return name if self.total == 1 else f"{name}.{self.number}of{self.total}"


class Field(NamedTuple):
    """A run of a part's first axis, as this rank's pages have it. A row has its pieces at equal distances."""

    page_offset: int
    piece_stride: int
    token_stride: int
    nbytes: int
    """Bytes of one piece, for one token."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """One layer of a stored group: one row of its objects."""

    layer: int
    num_pieces: int
    """Heads of a token layer, slices of a state."""
    fields: tuple[Field, ...]
    parts: tuple[tuple[Part, Split], ...]
    """For the description: the fields as the model has them."""

    def row_bytes(self, num_tokens: int) -> int:
        return self.num_pieces * num_tokens * sum(one.nbytes for one in self.fields)

    def boxes(self, num_tokens: int) -> list[Box]:
        piece_bytes = num_tokens * sum(one.nbytes for one in self.fields)
        boxes, offset = [], 0
        for one in self.fields:
            shape, strides = (self.num_pieces,), (one.piece_stride,)
            boxes.append(Box(shape, one.page_offset, strides, offset, (piece_bytes,), one.token_stride, one.nbytes))
            offset += num_tokens * one.nbytes
        return stack(boxes)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Layers of a stored group that lie in one row of a page. They are loaded and dumped together."""

    plan: GroupPlan
    table: str
    """The cache group whose pages hold them."""
    row: Row
    first: int
    """Number of the first layer's row in objects."""
    layers: tuple[StoredLayer, ...]
    _boxes: dict[int, list[Box]] = field(default_factory=dict, repr=False)

    def nbytes(self, num_tokens: int) -> int:
        return sum(layer.row_bytes(num_tokens) for layer in self.layers)

    def pieces(self, num_tokens: int) -> Iterator[tuple[int, slice]]:
        """The row number in objects of each layer, and its place among the bytes of the chunk."""
        start = 0
        for number, layer in enumerate(self.layers, self.first):
            end = start + layer.row_bytes(num_tokens)
            yield number, slice(start, end)
            start = end

    def boxes(self, num_tokens: int) -> list[Box]:
        """All bytes of the chunk, in the order of `pieces`."""
        found = self._boxes.get(num_tokens)
        if found is None:
            by_layer, start = [], 0
            for layer in self.layers:
                by_layer.append([box.moved(start) for box in layer.boxes(num_tokens)])
                start += layer.row_bytes(num_tokens)
            found = [box for boxes in zip(*by_layer, strict=True) for box in stack(boxes)]
            self._boxes[num_tokens] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class StoredGroup:
    """Layers of one kind that are cut into equally many slices, in all their objects."""

    name: str
    role: Role
    sight: Sight
    slices: int
    run: Run
    """What this rank holds."""
    is_writer: bool
    """Whether this rank writes its run. Of ranks that hold the same run, the first does."""
    layers: tuple[StoredLayer, ...]
    chunks: tuple[Chunk, ...]

    @property
    def is_state(self) -> bool:
        return self.role is Role.STATE

    @property
    def rank(self) -> int:
        return _RANKS[self.role]

    @property
    def ways(self) -> list[list[Run]]:
        """How the slices may have been divided among writers: this rank's way first. Each way covers all slices."""
        totals = [total for total in range(1, self.slices + 1) if self.slices % total == 0]
        totals.sort(key=lambda total: (total != self.run.total, total))
        return [[Run(number, total) for number in range(total)] for total in totals]

    def row_bytes(self, num_tokens: int, run: Run | None = None) -> list[int]:
        """Bytes of each row of an object that holds `run`; by default this rank's."""
        total = self.run.total if run is None else run.total
        return [layer.row_bytes(num_tokens) * self.run.total // total for layer in self.layers]

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of this rank's rows."""
        return sum(layer.row_bytes(num_tokens) for layer in self.layers)


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
