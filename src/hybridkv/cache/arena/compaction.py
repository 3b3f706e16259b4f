"""Compaction: moves pages together so that slabs become free, and updates all holders of the moved pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridkv.cache.arena.group_pages import GroupPages
from hybridkv.cache.arena.pages import Pages, as_numbers, make_pages
from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.index.tree import Node, State
from hybridkv.cache.stats import CacheStats
from hybridkv.cache.steps.footprint import Needs
from hybridkv.cache.steps.running import Pinned, Running

_LONG_TABLE = 32
"""Pages of a table from which numpy finds those of a slab faster than a Python loop."""


class Compactor:
    """Moves pages of nodes, checkpoints and leases."""

    def __init__(self, groups: GroupPages, running: Running, stats: CacheStats) -> None:
        self.groups = groups
        self.running = running
        self.stats = stats

    def compact(self, needs: Needs, pinned: Pinned) -> bool:
        """Empty one slab by moving its pages; False if no slab can be emptied."""
        if not self.groups.arena.compact(needs, pinned.is_pinned, self.pages_moved):
            return False
        self.stats.compactions += 1
        self.stats.pages_moved = self.groups.arena.num_moves
        self.groups.run_operations()
        return True

    def pages_moved(self, slab: Slab, moved: dict[int, int]) -> None:
        """Update nodes, checkpoints and leases after pages of a slab have moved. `moved`: old page to new page."""
        pool = slab.pool
        tokens = [i for i, candidate in enumerate(self.groups.token_pools) if candidate is pool]
        states = [i for i, candidate in enumerate(self.groups.state_pools) if candidate is pool]
        targets = {pool.slab_of(page) for page in moved.values()}
        for node in slab.holders:
            assert isinstance(node, Node)
            _relocate(node.pages, tokens, slab, moved)
            for checkpoint in node.checkpoints:
                if checkpoint.tail_pages:
                    checkpoint.tail_pages = [
                        moved.get(page, page) if i in tokens else page for i, page in enumerate(checkpoint.tail_pages)
                    ]
                _relocate_states(checkpoint.states, states, moved)
        for lease in self.running.leases.values():
            pages = lease.pages
            if slab in pages.slabs or any(slab in node.slabs for node in lease.leaf.path()):
                _relocate(pages.tables, tokens, slab, moved)
                _relocate_states(pages.states, states, moved)
                pages.copied = [(group, moved.get(p, p) if group in tokens else p) for group, p in pages.copied]
                pages.slabs |= targets


def _relocate(tables: Sequence[Pages | None], groups: Sequence[int], slab: Slab, moved: dict[int, int]) -> None:
    for group in groups:
        pages = tables[group]
        if pages is None:
            continue
        if len(pages) <= _LONG_TABLE:
            pages[:] = make_pages(moved.get(page, page) for page in pages)
            continue
        size, numbers = slab.pool.pages_per_slab, as_numbers(pages)
        first = slab.index * size
        places = np.flatnonzero((numbers >= first) & (numbers < first + size))
        for place in places.tolist():
            pages[place] = moved.get(pages[place], pages[place])


def _relocate_states(states: Sequence[State | None], groups: Sequence[int], moved: dict[int, int]) -> None:
    for group in groups:
        state = states[group]
        if state is not None:
            state.pages = tuple(moved.get(page, page) for page in state.pages)
