"""Both halves of a link on bare arenas, each in a process of its own: no model, no engine, random bytes.

`Sender` and `Receiver` also have a plain NIXL agent each, on the same arena: what the link is compared with.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64

from hybridkv.cache import CacheLayout
from hybridkv.link import push
from hybridkv.link.agent import Agent
from hybridkv.link.arena import HostArena, Place
from hybridkv.link.arrival import Arrival, Stage, Wanted
from hybridkv.link.geometry import Geometry
from hybridkv.link.link import Link, LinkOptions
from hybridkv.link.messages import FirstToken
from hybridkv.link.producer import Prompt
from hybridkv.link.runs import PageTables
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.spec import DType, FullAttention, ModelSpec, Part, Split
from hybridkv.stream import Catalogue

HOST = "127.0.0.1"
ENVIRONMENT = {"HYBRIDKV_LINK_SECRET": "benchmark-of-the-link", "NIXL_LOG_LEVEL": "ERROR"}
BLOCK_TOKENS = 16
LAYER_BYTES = 16 * 1024
"""K and V of one layer in a page: 16 tokens, 4 heads of 64 elements of 2 bytes."""
_POLL_S = 0.00005


class Sent(NamedTuple):
    """Times of one transfer, by the clock that both processes share."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def make_geometry(page_bytes: int, arena_bytes: int) -> Geometry:
    """Full attention only: a page of all layers has `page_bytes`."""
    heads = (Split.whole(4),)
    parts = tuple(Part(name, heads, (64,), DType.BFLOAT16) for name in ("k", "v"))
    layers = tuple(FullAttention(layer, parts) for layer in range(page_bytes // LAYER_BYTES))
    spec = ModelSpec("synthetic", "synthetic", len(layers), 256, DType.BFLOAT16, 1, 0, layers, "benchmark")
    plan = make_plan(spec, PlanOptions(arena_bytes, BLOCK_TOKENS))
    catalogue = Catalogue(plan, CacheLayout.from_plan(plan), "weights")
    geometry = Geometry.of(catalogue, arena_bytes=plan.arena_bytes, identity="weights")
    assert geometry.tables["full"].grid.stride_bytes == page_bytes
    return geometry


class _Side:
    """An arena with random bytes, all of it touched, and a plain agent."""

    def __init__(self, name: str, page_bytes: int, arena_bytes: int, seed: int) -> None:
        self.geometry = make_geometry(page_bytes, arena_bytes)
        random = np.random.default_rng(seed)
        self.arena = memoryview(bytearray(random.bytes(self.geometry.arena_bytes)))
        self.host_arena = HostArena(self.arena)
        self.plain = Agent(name, self.host_arena.place, HOST)
        self.link: Link

    def open(self, options: LinkOptions) -> Link:
        return Link(options, self.geometry, self.host_arena)

    def card(self) -> tuple[bytes, int, int]:
        """For the other side: metadata and address of the plain agent, and the number of pages."""
        return self.plain.metadata, self.plain.place.address, self.geometry.num_pages("full")

    def digest(self, pages: list[int]) -> str:
        grid, found = self.geometry.tables["full"].grid, xxh3_64()
        for page in pages:
            slab, number = divmod(page, grid.pages_per_slab)
            begin = slab * grid.slab_bytes + number * grid.stride_bytes
            found.update(self.arena[begin : begin + grid.stride_bytes])
        return found.hexdigest()

    def seconds(self) -> dict[str, float]:
        return dict(self.link.stats.snapshot().seconds)

    def close(self) -> None:
        self.link.close()


class Sender(_Side):
    def __init__(self, page_bytes: int, arena_bytes: int) -> None:
        super().__init__("plain-sender", page_bytes, arena_bytes, 1)
        self.link = self.open(LinkOptions(role="prefill"))

    def port(self) -> int:
        return self.link.port

    def set(self, *, checksums: bool, parcel_bytes: int | None = None, window: int | None = None) -> None:
        """Settings of later pushes that an engine's user cannot change, or not while it runs."""
        producer: Any = self.link.producer
        producer._checksums = checksums
        producer._parcel_bytes = parcel_bytes or producer._parcel_bytes
        vars(push)["_WINDOW"] = window or vars(push)["_WINDOW"]

    def offer(self, request_id: str, pages: list[int]) -> None:
        producer = self.link.producer
        assert producer is not None
        outbound = producer.begin(request_id, Prompt(len(pages) * BLOCK_TOKENS, "prompt", "sampling"))
        producer.offer(outbound, PageTables({"full": pages}, {}), [FirstToken(1)])

    def meet(self, metadata: bytes) -> None:
        self._peer = self.plain.add(metadata)

    def write(self, base: int, nbytes: int) -> float:
        """One plain write of one descriptor. Returns when it began."""
        at, size = np.zeros(1, np.int64), np.array([nbytes], np.int64)
        began = time.perf_counter()
        write = self.plain.write(self._peer, Place(base, nbytes), at, at, size, b"landed")
        while not write.is_done:
            time.sleep(_POLL_S)
        return began


class Receiver(_Side):
    def __init__(self, page_bytes: int, arena_bytes: int, port: int) -> None:
        super().__init__("plain-receiver", page_bytes, arena_bytes, 2)
        self._url = f"http://{HOST}:{port}"
        self._changed = threading.Event()
        self.link = self.open(LinkOptions(role="decode", peers=[self._url]))
        self.link.on_change = self._changed.set

    def receive(self, request_id: str, pages: list[int]) -> tuple[Sent, int]:
        """Claim a prompt and wait for its end. Also returns the number of descriptors."""
        consumer = self.link.consumer
        assert consumer is not None
        end = len(pages) * BLOCK_TOKENS
        wanted = Wanted(0, end, PageTables({"full": pages}, {}), "prompt", "sampling", is_plain=True)
        arrival = consumer.expect(self._url, request_id)
        began = time.perf_counter()
        consumer.claim(arrival, wanted)
        self._wait(arrival)
        ended = time.perf_counter()
        if arrival.stage is not Stage.DONE:
            raise RuntimeError(f"{request_id}: {arrival.failure}: {arrival.reason}")
        return Sent(began, ended), arrival.num_descriptors

    def _wait(self, arrival: Arrival) -> None:
        while not arrival.is_over:
            self._changed.wait(1.0)
            self._changed.clear()

    def meet(self, metadata: bytes) -> None:
        self.plain.add(metadata)

    def await_plain(self) -> float:
        """When the message of a plain write has come."""
        while not self.plain.messages():
            time.sleep(_POLL_S)
        return time.perf_counter()

    def clear(self) -> None:
        np.frombuffer(self.arena, np.uint8)[:] = 0
