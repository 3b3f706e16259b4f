"""Random models with a known byte for each element of each token, and what a store must have of them.

Nothing here knows plans, pages or `hybridkv.stream`: the objects are written down from docs/store.md, and the whole
model's row is cut into equal runs for the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from hybridkv.spec import (
    ChunkedLocal,
    DType,
    FullAttention,
    HiddenTap,
    LatentAttention,
    LayerSpec,
    LinearState,
    ModelSpec,
    Part,
    SlidingWindow,
    Split,
)
from tests.stream.reader import Bytes, Group, key_of, seen_from

HIDDEN_SIZE = 3
SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes."""
_KINDS: dict[str, type[FullAttention | LinearState | HiddenTap]] = {
    "full": FullAttention,
    "latent": LatentAttention,
    "state": LinearState,
    "tap": HiddenTap,
}


class Axis(NamedTuple):
    """A run of a part's first axis: `units` of `size` elements, divided among ranks as `how` says."""

    how: str
    units: int
    size: int = 1

    @property
    def length(self) -> int:
        return self.units * self.size

    def split(self, tp: int, rank: int) -> Split:
        if self.how == "whole":
            return Split.whole(self.units).of_units(self.size)
        make = Split.even if self.how == "even" else Split.replicated
        return make(self.units, tp, rank, "units").of_units(self.size)

    def num_runs(self, tp: int) -> int:
        """How many ranks hold different elements."""
        return {"whole": 1, "even": tp, "replicated": min(tp, self.units)}[self.how]


class PartOf(NamedTuple):
    name: str
    axes: tuple[Axis, ...]
    inner: tuple[int, ...]
    dtype: DType

    @property
    def element_bytes(self) -> int:
        return prod(self.inner) * self.dtype.nbytes

    def part(self, tp: int, rank: int) -> Part:
        return Part(self.name, tuple(axis.split(tp, rank) for axis in self.axes), self.inner, self.dtype)


class Layer(NamedTuple):
    """One layer spec of the whole model. `reach`: the window or the chunk of a local layer."""

    kind: str
    number: int
    parts: tuple[PartOf, ...]
    reach: int = 0

    @property
    def group(self) -> str:
        return f"{self.kind}{self.reach}" if self.reach else self.kind

    def spec(self, tp: int, rank: int) -> LayerSpec:
        parts = tuple(part.part(tp, rank) for part in self.parts)
        if self.reach:
            return (SlidingWindow if self.kind == "window" else ChunkedLocal)(self.number, parts, self.reach)
        return _KINDS[self.kind](self.number, parts)

    def element(self, part: PartOf, axis: int, known: bytes) -> Bytes:
        """[length, bytes] of one run of a part: after the tokens `known`."""
        return _content(
            f"{self.kind} {self.number} {part.name} {axis}", known, part.axes[axis].length, part.element_bytes
        )


@lru_cache(maxsize=1 << 14)
def _content(what: str, known: bytes, length: int, element_bytes: int) -> Bytes:
    digest = shake_128(what.encode() + known).digest(length * element_bytes)
    return np.frombuffer(digest, np.uint8).reshape(length, element_bytes)


class StoredRows(NamedTuple):
    """A group of objects: for each row a layer, and which runs of which parts it has."""

    name: str
    slices: int
    rows: list[tuple[Layer, list[tuple[PartOf, int]]]]

    @property
    def layer(self) -> Layer:
        return self.rows[0][0]

    @property
    def sight(self) -> Group:
        return {self.layer.kind: self.layer.reach} if self.layer.reach else {}

    def num_runs(self, tp: int) -> int:
        return next(part.axes[axis].num_runs(tp) for _, runs in self.rows for part, axis in runs)

    def object_rows(self, tokens: bytes, first: int, end: int) -> list[bytes]:
        """The whole model's rows."""
        return [
            _state_row(layer, runs, self.slices, tokens[: 4 * end])
            if layer.kind == "state"
            else _token_row(layer, runs, [tokens[: 4 * t] for t in range(first + 1, end + 1)])
            for layer, runs in self.rows
        ]


def _token_row(layer: Layer, runs: Sequence[tuple[PartOf, int]], known: Sequence[bytes]) -> bytes:
    heads = range(runs[0][0].axes[0].length)
    return b"".join(
        layer.element(part, axis, before)[head].tobytes() for head in heads for part, axis in runs for before in known
    )


def _state_row(layer: Layer, runs: Sequence[tuple[PartOf, int]], slices: int, known: bytes) -> bytes:
    found = [(layer.element(part, axis, known), part.axes[axis].length // slices) for part, axis in runs]
    return b"".join(whole[s * each : (s + 1) * each].tobytes() for s in range(slices) for whole, each in found)


class Naive(NamedTuple):
    """A model, whole."""

    layers: tuple[Layer, ...]
    block_tokens: int
    stretch_tokens: int

    def spec(self, tp: int, rank: int) -> ModelSpec:
        specs = tuple(layer.spec(tp, rank) for layer in self.layers)
        num_layers = max(layer.number for layer in self.layers) + 1
        return ModelSpec("naive", "naive", num_layers, HIDDEN_SIZE, DType.BFLOAT16, tp, rank, specs, "")

    @property
    def groups(self) -> list[StoredRows]:
        """Layers of a kind. Units that ranks share are cut into as many slices as they have, up to 16."""
        found: dict[str, dict[int, list[tuple[Layer, list[tuple[PartOf, int]]]]]] = {}
        for layer in self.layers:
            name = f"tap{layer.number}" if layer.kind == "tap" else layer.group
            runs = [(part, number) for part in layer.parts for number in range(len(part.axes))]
            for slices in sorted({self._slices(name, part.axes[number]) for part, number in runs}):
                some = [(part, number) for part, number in runs if self._slices(name, part.axes[number]) == slices]
                found.setdefault(name, {}).setdefault(slices, []).append((layer, some))
        return [
            StoredRows(name if len(by_slices) == 1 else f"{name}-{slices}", slices, rows)
            for name, by_slices in found.items()
            for slices, rows in by_slices.items()
        ]

    def _slices(self, group: str, axis: Axis) -> int:
        if axis.how == "replicated":
            return gcd(16, axis.units)
        axes = [a for layer in self.layers if layer.group == group for part in layer.parts for a in part.axes]
        return gcd(16, axis.units, *(a.units for a in axes if a.how != "replicated"))

    def first_token(self, group: StoredRows, end: int) -> int:
        """The first token of the object that ends at `end`."""
        block, stretch = self.block_tokens, self.stretch_tokens
        return max((end - 1) // stretch * stretch, seen_from(group.sight, end) // block * block)

    def objects(
        self, tokens: Sequence[int], ends: dict[int, bool], tp: int, taps: Sequence[int]
    ) -> dict[tuple[str, bytes], tuple[int, list[bytes]]]:
        """By group and key: position and rows of all objects. `ends`: True where requests may resume."""
        packed, found = np.array(tokens, "<i4").tobytes(), {}
        for end, resumes in ends.items():
            key = key_of([""], tokens, end, self.block_tokens)
            for group in self.groups:
                first, kind = self.first_token(group, end), group.layer.kind
                if (kind == "state" and not resumes) or (kind == "tap" and group.layer.number not in taps):
                    continue
                if kind == "state" or first < end:
                    rows, total = group.object_rows(packed, first, end), group.num_runs(tp)
                    for number in range(total):
                        name = group.name if total == 1 else f"{group.name}.{number}of{total}"
                        cut = [row[len(row) // total * number : len(row) // total * (number + 1)] for row in rows]
                        found[name, key] = end, cut
        return found


# --- random models ----------------------------------------------------------------------------------------------------

dtypes = st.sampled_from(list(DType))
shared = st.builds(Axis, st.just("replicated"), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
own = st.builds(Axis, st.just("even"), st.sampled_from([8, 16, 24]), st.integers(1, 3))


@st.composite
def key_values(draw: st.DrawFn) -> tuple[PartOf, ...]:
    heads = (draw(st.one_of(shared, own))._replace(size=1),)
    dtype = draw(dtypes)
    return tuple(PartOf(name, heads, (draw(st.integers(1, 3)),), dtype) for name in "kv")


@st.composite
def states(draw: st.DrawFn) -> tuple[PartOf, ...]:
    kinds = st.sampled_from([draw(own), draw(shared)])  # such as B B C B: runs of one kind at unequal distances
    conv = PartOf("conv", tuple(draw(st.lists(kinds, min_size=1, max_size=4))), (2,), draw(dtypes))
    heads = draw(own)._replace(size=1)
    recurrent = PartOf("recurrent", (heads,), (draw(st.integers(1, 3)), draw(st.integers(1, 3))), draw(dtypes))
    return draw(st.sampled_from([(conv, recurrent), (recurrent,), (conv,)]))


@st.composite
def latents(draw: st.DrawFn) -> tuple[PartOf, ...]:
    one, dtype = (Axis("whole", 1),), draw(dtypes)
    return (PartOf("latent", one, (draw(st.integers(1, 5)),), dtype), PartOf("rope", one, (1,), dtype))


@st.composite
def models(draw: st.DrawFn) -> Naive:
    attention, latent = draw(st.lists(key_values(), min_size=1, max_size=2)), draw(latents())
    state = draw(st.lists(states(), min_size=1, max_size=2))
    layers: list[Layer] = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["full", "latent", "window", "chunk", "state", "both"]))
        if kind in ("full", "both"):
            layers.append(Layer("full", number, draw(st.sampled_from(attention))))
        if kind in ("state", "both"):
            layers.append(Layer("state", number, draw(st.sampled_from(state))))
        if kind == "latent":
            layers.append(Layer("latent", number, latent))
        if kind in ("window", "chunk"):
            layers.append(Layer(kind, number, draw(st.sampled_from(attention)), draw(st.sampled_from([1, 7, 12]))))
        if draw(st.booleans()):
            hidden = PartOf("hidden", (Axis("whole", 1),), (HIDDEN_SIZE,), DType.BFLOAT16)
            layers.append(Layer("tap", number, (hidden,)))
    block = draw(st.sampled_from([1, 4, 5]))
    return Naive(tuple(layers), block, block * draw(st.integers(1, 3)))
