"""Ranks of a tensor-parallel engine without an engine: pages in a bytearray, at random places."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from hybridkv.cache import CacheLayout
from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.plan import GroupPlan, PartView, Plan, PlanOptions, Row, make_plan
from hybridkv.spec import HiddenTap, LayerSpec, LinearState, ModelSpec, Part
from hybridkv.store import Store
from hybridkv.stream import BlockKeys, Catalogue, DumpPoint, HostPages, Load, Mover, PageRequest, StreamStats
from hybridkv.stream.lookup import Prompt, last_stored
from tests.stream.reader import Bytes

Content = Callable[[LayerSpec, Part, bytes], Bytes]
"""What a part of this rank's layer is after some tokens: [first axis, bytes]."""


class Rank:
    """One rank: its plan, its memory and its mover. Memory begins with random bytes."""

    def __init__(
        self, spec: ModelSpec, store: Store, identity: str, stretch_tokens: int, seed: int, **options: Any
    ) -> None:
        chance = np.random.default_rng(seed)
        self.store = store
        self.plan: Plan = make_plan(spec, PlanOptions(**{"memory_bytes": 1 << 21, **options}))
        self.catalogue = Catalogue(self.plan, CacheLayout.from_plan(self.plan), identity, stretch_tokens=stretch_tokens)
        self.memory = bytearray(chance.bytes(self.plan.arena_bytes))
        self.stats = StreamStats()
        self.mover = self._mover(store)
        self._slabs: list[int] = (1 + chance.permutation(self.plan.num_slabs - 1)).tolist()
        self._free: dict[str, list[int]] = {}

    @property
    def block_tokens(self) -> int:
        return self.catalogue.block_tokens

    def keys_at(self, tokens: Sequence[int], ends: Iterable[int]) -> dict[int, bytes]:
        return BlockKeys(lookup_key().root, self.block_tokens).at(ends, pack_tokens(tokens))

    def found(self, tokens: Sequence[int], limit: int, taps: Sequence[str] = ()) -> int:
        """The last position up to `limit` at which the store says a request can resume."""
        prompt = Prompt(lambda ends: self.keys_at(tokens, ends), 0, limit, taps=taps)
        return last_stored(self.store, self.catalogue, prompt).position

    # --- pages --------------------------------------------------------------------------------------------------------

    def request(
        self, end: int, positions: Iterable[int], taps: Sequence[str] = (), first_of: Mapping[str, int] = {}
    ) -> PageRequest:
        """A request of `end` tokens with pages of its own, and states at `positions`. No pages before `first_of`."""
        count, blocks, states = -(-end // self.block_tokens), {}, {}
        for group in self.plan.groups:
            if isinstance(group.specs[0], LinearState):
                states[group.name] = {at: self._take(group, group.layout.pages) for at in positions}
                continue
            tables = taps if isinstance(group.specs[0], HiddenTap) else [group.name]
            for table in tables:
                skipped = first_of.get(table, 0)
                blocks[table] = [0] * skipped + self._take(group, count - skipped)
        return PageRequest(0, end, blocks, states)

    def _take(self, group: GroupPlan, count: int) -> list[int]:
        free = self._free.setdefault(group.name, [])
        while len(free) < count:
            per_slab, slab = group.pages_per_slab, self._slabs.pop()
            free += reversed(range(slab * per_slab, (slab + 1) * per_slab))
        taken, free[:] = free[:count], free[count:]
        return taken

    def visible(self, end: int) -> dict[str, int]:
        """By token group of the plan: the first block that position `end` sees."""
        return {
            chunk.table: group.sight.first_visible_block(end, self.block_tokens)
            for group in self.catalogue.token_groups
            for chunk in group.chunks
        }

    # --- bytes --------------------------------------------------------------------------------------------------------

    def fill(self, memory: bytearray, request: PageRequest, tokens: bytes, content: Content, layer: int) -> None:
        """Write what a layer has of the request's tokens and states into `memory`, through the plan's views."""
        for group in self.plan.groups:
            for spec in (one for one in group.specs if one.layer == layer):
                for row in group.rows:
                    for view in (view for view in row.views if view.layer == layer):
                        part = next(part for part in spec.parts if part.name == view.part)
                        for place, end in self._places(memory, request, spec, group, row, view):
                            place[...] = content(spec, part, tokens[: 4 * end]).reshape(place.shape)

    def _places(
        self, memory: bytearray, request: PageRequest, spec: LayerSpec, group: GroupPlan, row: Row, view: PartView
    ) -> Iterator[tuple[Bytes, int]]:
        """Where a part of a layer lies, for each token and each state, and the number of tokens up to it."""
        if isinstance(spec, LinearState):
            for end, pages in request.states[group.name].items():
                yield _view(memory, group, pages[row.page], view, 1), end
            return
        size, name = self.block_tokens, f"tap{spec.layer}" if isinstance(spec, HiddenTap) else group.name
        for block, page in enumerate(request.blocks.get(name, ())):
            whole = _view(memory, group, page, view, 2)
            for end in range(block * size + 1, (block + 1) * size + 1) if page else ():
                if request.start < end <= request.end:
                    yield whole[end - 1 - block * size], end

    # --- transfers ----------------------------------------------------------------------------------------------------

    def dump(
        self, request: PageRequest, tokens: Sequence[int], points: Sequence[DumpPoint], content: Content | None = None
    ) -> None:
        """Dump layer by layer; with `content`, each layer is computed before it is dumped."""
        step = self.mover.step()
        for outgoing in self.mover.dump(request, points, self.keys_at(tokens, [point.end for point in points])):
            step.add("a", outgoing)
        for layer in range(self.plan.model.num_layers):
            step.before_layer(layer)
            if content is not None:
                self.fill(self.memory, request, pack_tokens(tokens), content, layer)
            step.after_layer(layer)
        step.after_last_layer()
        step.finish()
        step.judge("a", True)
        step.publish()
        self.mover.settle()
        self.mover.drain()

    def load(self, request: PageRequest, tokens: Sequence[int], taps: Sequence[str] = ()) -> Load:
        ends = self.catalogue.load_ends(request.start, request.end, taps)
        load = self.mover.load(request, self.keys_at(tokens, ends))
        deadline = time.monotonic() + 20
        while load.is_reading:
            assert time.monotonic() < deadline
            time.sleep(0.0002)
        return load

    def use(self, store: Store) -> None:
        """From now on load from this store and dump into it."""
        self.close()
        self.mover = self._mover(store)

    def _mover(self, store: Store) -> Mover:
        return Mover(store, self.catalogue, HostPages(self.memory), self.stats, on_load=lambda: None)

    def close(self) -> None:
        self.mover.close(5.0, 2.0)


def _view(memory: bytearray, group: GroupPlan, page: int, view: PartView, axes: int) -> Bytes:
    """A part in a page, as bytes. The first `axes` axes have strides; the rest is one run of bytes."""
    nbytes = prod(view.shape[axes:]) * view.dtype.nbytes
    shape, strides = (*view.shape[:axes], nbytes), (*view.strides_bytes[:axes], 1)
    return np.ndarray(shape, np.uint8, memory, group.page_offset(page) + view.offset_bytes, strides)
