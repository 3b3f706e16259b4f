"""Pins: prefixes whose pages are neither evicted nor moved, so that a transfer can read them while requests run.

A pin is a lease that computes nothing, so its pages are not evicted. The slabs of its pages are not compacted either.
`Pins.add` first moves the pages together, so that a pin excludes few slabs from compaction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from hybridkv.cache.arena.compaction import Compactor
from hybridkv.cache.arena.pages import NULL_PAGE, Pages, make_pages
from hybridkv.cache.arena.pools import Pool, Slab
from hybridkv.cache.arena.slabs import Arena
from hybridkv.cache.index.tree import Node, State
from hybridkv.cache.packing import pack
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.placement import Placement
from hybridkv.errors import CacheError


class PinState(StrEnum):
    """Whether the pages of a pin can be read."""

    WAITING = "waiting"
    """Not yet: operations requested up to the pin's creation are not acknowledged."""
    READY = "ready"
    UNPINNED = "unpinned"
    EXPIRED = "expired"
    BROKEN = "broken"
    """Pages of the prefix were invalidated: data that a transfer has read is wrong."""


class PinnedPages(NamedTuple):
    """The pages of a prefix, in the same form as the pages that the caller fills for `extend(num_loaded=)`."""

    tables: dict[str, Pages]
    """By token group: the page of each block. The null page: a block that tokens after the prefix do not see."""
    states: dict[str, tuple[int, ...]]
    """By state group: the pages of the state at the prefix's end. Null pages: the zero state of position 0."""


class Pin:
    """A prefix whose pages stay in place until `expires_at`."""

    __slots__ = ("_arena", "_pages", "_waits_for", "ended", "expires_at", "lease", "num_tokens")

    def __init__(self, lease: Lease, expires_at: float, pages: PinnedPages, arena: Arena) -> None:
        self.lease = lease
        self.num_tokens = lease.computed
        """Number of pinned tokens: the largest n that every group can supply."""
        self.expires_at = expires_at
        self.ended: PinState | None = None
        """Final state; None while its pages are pinned."""
        self._pages = pages
        self._arena = arena
        self._waits_for = arena.num_asked

    @property
    def state(self) -> PinState:
        if self.ended is not None:
            return self.ended
        return PinState.READY if self._arena.is_done(self._waits_for) else PinState.WAITING

    @property
    def pages(self) -> PinnedPages:
        """The pages to read. The data is valid if the pin is still ready after the read."""
        state = self.state
        if state is PinState.WAITING:
            raise CacheError("the pin is waiting: run and acknowledge the operations taken since, then ask again")
        if state is not PinState.READY:
            raise CacheError(f"the pin is {state}: pin the prefix again")
        return self._pages

    def check_integrity(self) -> None:
        """Assert that the lease still has exactly the pages that were pinned."""
        assert self.ended is None
        assert self.lease.computed == self.num_tokens
        assert self._pages.tables.keys() == self.lease.named_tables.keys()
        tail = self.lease.pages.tail is not None and bool(self.lease.pages.tail.tail_tokens)
        for name, table in self.lease.named_tables.items():
            assert self._pages.tables[name][: len(table)] == table
            assert len(self._pages.tables[name]) == len(table) + tail
        for pages, state in zip(self._pages.states.values(), self.lease.pages.states, strict=True):
            assert state is None or state.pages == pages


class Pins:
    """The pins of one cache."""

    def __init__(self, placement: Placement, compactor: Compactor, clock: Callable[[], float]) -> None:
        self.placement = placement
        self.compactor = compactor
        self.groups = placement.groups
        self.running = placement.running
        self.stats = placement.stats
        self.live: dict[int, Pin] = {}
        """Pins that have not ended, by the id of their lease."""
        self._clock = clock
        self._next_expiry = math.inf
        """No pin expires before this time."""

    def add(self, lease: Lease, ttl_seconds: float, *, packs: bool) -> Pin:
        """Move the pages of a lease together (`packs`), then pin them."""
        if packs:
            self._pack(lease)
        expires_at = self._expiry(ttl_seconds)
        pin = Pin(lease, expires_at, self._pages_of(lease), self.groups.arena)
        self.running.transfers[lease.id] = self.slabs_of(lease)
        self.live[lease.id] = pin
        self.stats.pins += 1
        try:
            self.groups.run_operations()
        except BaseException:  # the memory layer failed, and the caller has no pin
            self.end(pin, PinState.UNPINNED)
            raise
        return pin

    def renew(self, pin: Pin, ttl_seconds: float) -> None:
        pin.expires_at = self._expiry(ttl_seconds)

    def end(self, pin: Pin, state: PinState) -> None:
        """End a pin: its pages may be evicted and moved again."""
        if pin.ended is None:
            pin.ended = state
            del self.live[pin.lease.id]
            del self.running.transfers[pin.lease.id]
            self.placement.detach(pin.lease)

    def expire(self) -> None:
        """End the pins whose time has passed."""
        now = self._clock()
        if now < self._next_expiry:
            return
        for pin in [pin for pin in self.live.values() if pin.expires_at <= now]:
            self.stats.pins_expired += 1
            self.end(pin, PinState.EXPIRED)
        self._next_expiry = min((pin.expires_at for pin in self.live.values()), default=math.inf)

    def break_off(self, lease: Lease) -> None:
        """End the pin of `lease` because one of its pages, or a page they were derived from, is invalid."""
        self.stats.pins_broken += 1
        self.end(self.live[lease.id], PinState.BROKEN)

    def _expiry(self, ttl_seconds: float) -> float:
        expires_at = self._clock() + ttl_seconds
        self._next_expiry = min(self._next_expiry, expires_at)
        return expires_at

    # --- pages --------------------------------------------------------------------------------------------------------

    def _pages_of(self, lease: Lease) -> PinnedPages:
        tail = lease.pages.tail.tail_pages if lease.pages.tail is not None else []
        tables = {}
        for index, (group, table) in enumerate(zip(self.groups.token_groups, lease.pages.tables, strict=True)):
            if table is not None:
                tables[group.name] = table + make_pages(tail[index : index + 1])
        states = {}
        for group, state in zip(self.placement.state_groups, lease.pages.states, strict=True):
            states[group.name] = (NULL_PAGE,) * group.pages_per_state if state is None else state.pages
        return PinnedPages(tables, states)

    def slabs_of(self, lease: Lease) -> set[Slab]:
        return {pool.slab_of(page) for pool, page in self._places(lease)}

    def _places(self, lease: Lease) -> Iterator[tuple[Pool, int]]:
        """Every page of a pin, with its pool."""
        pages = self._pages_of(lease)
        for group, pool in zip(self.groups.token_groups, self.groups.token_pools, strict=True):
            for page in pages.tables.get(group.name, ()):
                if page != NULL_PAGE:
                    yield pool, page
        for group, pool in zip(self.placement.state_groups, self.groups.state_pools, strict=True):
            for page in pages.states[group.name]:
                if page != NULL_PAGE:
                    yield pool, page

    def _pack(self, lease: Lease) -> None:
        """Move the pages of a lease together, except those that steps in flight or other pins use."""
        arena, by_pool = self.groups.arena, dict[Pool, list[int]]()
        for pool, page in self._places(lease):
            by_pool.setdefault(pool, []).append(page)
        fixed = self.running.transfer_slabs() | self._slabs_in_flight(lease)
        for pool, pages in by_pool.items():
            pack(arena, pool, pages, fixed, self.compactor.pages_moved)
        self.stats.pages_moved = arena.num_moves

    def _slabs_in_flight(self, lease: Lease) -> set[Slab]:
        """Slabs with pages of this lease (shared blocks and states) that steps in flight use."""
        nodes, states = set[Node](), set[State | None]()
        for other in self.running.in_flight.values():
            nodes.update(other.leaf.path())
            states.update(_states_of(other))
        shared = max((node.end for node in lease.leaf.path() if node in nodes), default=0)
        slabs = self.groups.state_slabs([state if state in states else None for state in lease.pages.states])
        for pool, table in zip(self.groups.token_pools, lease.pages.tables, strict=True):
            if table is not None:
                slabs.update(pool.slab_of(page) for page in table[:shared] if page != NULL_PAGE)
        return slabs


def _states_of(lease: Lease) -> Iterator[State | None]:
    """The states of a step in flight: before, inside and after it."""
    assert lease.step is not None
    yield from lease.pages.states
    yield from lease.step.old_states
    for kept in lease.step.kept:
        yield from kept.states
