"""`stream` without an engine: pages in a bytearray, and "models" whose rows are made from the tokens before them.

    python -m tests.stream.halves finding MIX DIRECTORY

runs the half that finds in one process, and has it start the half that moves in another. They share a file store. What
goes between them is plain data. Neither imports torch. Exits with 0 if every byte was right.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import shake_128
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from hybridkv.cache import CacheLayout
from hybridkv.cache.tokens import TOKEN_BYTES, lookup_key, pack_tokens
from hybridkv.plan import Plan, PlanOptions, make_plan
from hybridkv.spec import (
    ChunkedLocal,
    DType,
    FullAttention,
    LatentAttention,
    LayerSpec,
    LinearState,
    ModelSpec,
    Part,
    SlidingWindow,
    Split,
)
from hybridkv.store import FileStore, Store
from hybridkv.stream import (
    Catalogue,
    DumpPoint,
    DumpRule,
    Fetch,
    Finder,
    HostPages,
    Load,
    Mover,
    PageRequest,
    Progress,
    StreamStats,
)
from hybridkv.stream.form import Chunk
from hybridkv.stream.row_io import Words

SIZE = 16
STRETCH_TOKENS = 32
_HEADS = (Split.whole(2),)
_KV = (Part("k", _HEADS, (4,), DType.BFLOAT16), Part("v", _HEADS, (4,), DType.BFLOAT16))
_LATENT = (
    Part("latent", (Split.whole(1),), (8,), DType.BFLOAT16),
    Part("rope", (Split.whole(1),), (4,), DType.BFLOAT16),
)
_STATE = (Part("conv", _HEADS, (3,), DType.BFLOAT16), Part("recurrent", _HEADS, (4, 4), DType.FLOAT32))

MIXES: dict[str, list[LayerSpec]] = {
    "full": [FullAttention(layer, _KV) for layer in range(3)],
    "window": [SlidingWindow(0, _KV, 40), FullAttention(1, _KV), SlidingWindow(2, _KV, 40)],
    "state": [LinearState(0, _STATE), FullAttention(1, _KV), LinearState(2, _STATE)],
    "all": [
        LinearState(0, _STATE),
        LatentAttention(1, _LATENT),
        ChunkedLocal(2, _KV, 48),
        SlidingWindow(3, _KV, 20),
        LinearState(4, _STATE),
    ],
    "states only": [LinearState(0, _STATE), LinearState(1, _STATE)],
}


def plan_of(mix: str) -> Plan:
    layers = tuple(MIXES[mix])
    spec = ModelSpec(mix, mix, len(layers), 8, DType.BFLOAT16, 1, 0, layers, "")
    return make_plan(spec, PlanOptions(1 << 20, block_tokens=SIZE, row_layers=1))


def catalogue_of(plan: Plan) -> Catalogue:
    return Catalogue(plan, CacheLayout.from_plan(plan), "weights", stretch_tokens=STRETCH_TOKENS)


class Order(NamedTuple):
    """One request: all that the half that finds tells the half that moves."""

    tokens: bytes
    load: PageRequest | None
    load_keys: dict[int, bytes]
    step: PageRequest
    points: list[DumpPoint]
    keys: dict[int, bytes]


class Report(NamedTuple):
    """What became of it."""

    num_wrong: int
    """Rows that a layer found wrong when it was about to run."""
    failure: str | None
    num_good: int


class Finding:
    """A scheduler: finds, says where everything lies, and hears what became of it."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan = plan
        self.stats = StreamStats()
        self.finder = Finder(store, catalogue_of(plan), self.stats, on_answer=lambda: None)
        self.rule = DumpRule(self.finder.catalogue)
        self.num_used: dict[str, int] = {}

    def order(self, tokens: list[int], *, load: bool = True) -> Order:
        catalogue, packed = self.finder.catalogue, pack_tokens(tokens)
        keys = self.finder.block_keys(lookup_key().root)
        found = _answer(self.finder.find(keys, packed, 0, len(tokens) - 1)) if load else 0
        self.num_used.clear()
        blocks = {group.name: self._pages(group.name, -(-len(tokens) // SIZE)) for group in catalogue.token_groups}
        points = self.rule.of_step(Progress(found, len(tokens), len(tokens), breakpoints=[40]))
        step = PageRequest(found, len(tokens), blocks, self._states([point.end for point in points if point.resumes]))
        wanted = PageRequest(0, found, blocks, self._states([found])) if found else None
        load_ends = catalogue.load_ends(0, found) if found else set()
        return Order(packed, wanted, keys.at(load_ends, packed), step, points, keys.at([p.end for p in points], packed))

    def _states(self, positions: list[int]) -> dict[str, dict[int, list[int]]]:
        return {
            group.name: {end: self._pages(group.name, self.plan.group(group.name).layout.pages) for end in positions}
            for group in self.finder.catalogue.state_groups
        }

    def _pages(self, name: str, count: int) -> list[int]:
        """Pages that nothing else uses: every group has its own slabs."""
        group, groups = self.plan.group(name), self.plan.groups
        per_group = (self.plan.num_slabs - 1) // len(groups) * group.pages_per_slab
        first = group.pages_per_slab + groups.index(group) * per_group
        used = self.num_used.get(name, 0)
        self.num_used[name] = used + count
        assert used + count <= per_group
        return list(range(first + used, first + used + count))


class Moving:
    """A worker: layers "run", and its memory is a bytearray."""

    def __init__(self, plan: Plan, store: Store, pages: type[HostPages] = HostPages) -> None:
        self.plan = plan
        self.memory = bytearray(plan.arena_bytes)
        self.pages = pages(self.memory)
        self.stats = StreamStats()
        self.mover = Mover(store, catalogue_of(plan), self.pages, self.stats, on_load=lambda: None)

    def run(self, order: Order) -> Report:
        self.memory[:] = bytes(len(self.memory))
        step, load = self.mover.step(), self._load(order)
        if load is not None:
            step.loads["a"] = load
        for outgoing in self.mover.dump(order.step, order.points, order.keys):
            step.add("a", outgoing)
        num_wrong = 0
        for layer in range(self.plan.model.num_layers):
            step.before_layer(layer)
            num_wrong += self.num_wrong(order, layer) if load is not None and load.failure is None else 0
            self._compute(order, layer)
            step.after_layer(layer)
        while load is not None and load.is_reading:  # `finish` would give up reads that a failure has left under way
            time.sleep(0.001)
        step.finish()
        step.judge("a", load is None or load.failure is None)
        step.publish()
        self.mover.settle()
        if load is not None:
            self.mover.ended(load, "layerwise")
        self.mover.drain()
        return Report(num_wrong, load.failure if load else None, load.num_good if load else 0)

    def _load(self, order: Order) -> Load | None:
        return None if order.load is None else self.mover.load(order.load, order.load_keys)

    def _compute(self, order: Order, layer: int) -> None:
        for chunk, end, page in self._rows(order.step, layer):
            for view, piece in self._pieces(chunk, page):
                view[...] = content(chunk, piece, order.tokens, end)

    def num_wrong(self, order: Order, layer: int) -> int:
        """Count wrong rows among those that the layer sees from the end of the load."""
        assert order.load is not None
        seen = {
            group.name: group.sight.first_visible_block(order.load.end, SIZE) for group in self.mover.catalogue.groups
        }
        rows = [row for row in self._rows(order.load, layer) if row[1] // SIZE > seen[row[0].table]]
        assert rows
        return sum(
            any((view != content(chunk, piece, order.tokens, end)).any() for view, piece in self._pieces(chunk, page))
            for chunk, end, page in rows
        )

    def _rows(self, request: PageRequest, layer: int) -> Iterator[tuple[Chunk, int, int]]:
        """Every chunk of a layer that the request's whole blocks and states have, with its end and its page."""
        for group in self.mover.catalogue.groups:
            for chunk in group.chunks:
                if not chunk.row.first_layer <= layer <= chunk.row.last_layer:
                    continue
                if group.is_state:
                    for end, pages in request.states[chunk.table].items():
                        yield chunk, end, pages[chunk.row.page]
                else:
                    for block in range(request.start // SIZE, request.end // SIZE):
                        yield chunk, (block + 1) * SIZE, request.blocks[chunk.table][block]

    def _pieces(self, chunk: Chunk, page: int) -> Iterator[tuple[Words, str]]:
        """Every part of every layer in a page, as bytes, and what it is called."""
        for view in chunk.row.views:
            offset = chunk.grid.page_offset(page) + view.offset_bytes
            shape, strides = (*view.shape[:-1], view.shape[-1] * view.dtype.nbytes), (*view.strides_bytes[:-1], 1)
            yield np.ndarray(shape, np.uint8, memoryview(self.memory), offset, strides), f"{view.layer} {view.part}"


def content(chunk: Chunk, piece: str, tokens: bytes, end: int) -> Words:
    """What a part of a block or state that ends at `end` is for these tokens, and for no others."""
    shape = next(
        (*view.shape[:-1], view.shape[-1] * view.dtype.nbytes)
        for view in chunk.row.views
        if f"{view.layer} {view.part}" == piece
    )
    seed = f"{chunk.table} {piece} ".encode() + tokens[: end * TOKEN_BYTES]
    return np.frombuffer(shake_128(seed).digest(prod(shape)), np.uint8).reshape(shape)


def _answer(fetch: Fetch | None) -> int:
    if fetch is None:
        return 0
    deadline = time.monotonic() + 20
    while not fetch.is_answered:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not fetch.has_failed
    return fetch.position


# --- in processes of their own ----------------------------------------------------------------------------------------


def find(mix: str, directory: str) -> None:
    """Two prompts with one beginning, each twice: what the first leaves, the others load."""
    shared = list(range(1, 101))
    with FileStore(Path(directory), 1 << 24) as store:
        finding = Finding(plan_of(mix), store)
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.stream.halves", "moving", mix, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        loaded = []
        for tail in (7, 8, 7):
            order = finding.order([*shared, *[tail] * 30])
            _send(worker.stdin, order)
            report: Report = pickle.load(worker.stdout)
            assert report.num_wrong == 0, report
            assert report.failure is None, report
            assert report.num_good == (order.load.end if order.load else 0)
            loaded.append(report.num_good)
        worker.stdin.close()
        assert worker.wait(20) == 0
        finding.finder.close(2.0)
    sys.stdout.write(" ".join(map(str, loaded)))


def move(mix: str, directory: str) -> None:
    with FileStore(Path(directory), 1 << 24) as store:
        moving = Moving(plan_of(mix), store)
        while True:
            try:
                order: Order = pickle.load(sys.stdin.buffer)
            except EOFError:
                break
            _send(sys.stdout.buffer, moving.run(order))
        moving.mover.close(5.0, 2.0)


def _send(pipe: IO[bytes], message: object) -> None:
    pickle.dump(message, pipe)
    pipe.flush()


if __name__ == "__main__":
    {"finding": find, "moving": move}[sys.argv[1]](*sys.argv[2:])
    assert "torch" not in sys.modules
