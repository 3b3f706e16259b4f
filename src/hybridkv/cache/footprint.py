"""What running requests hold: pages that no eviction can free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from hybridkv.cache.lease import Lease
from hybridkv.cache.pages import NULL_PAGE
from hybridkv.cache.pools import Pool

Needs = dict[Pool, int]


class Groups(NamedTuple):
    """Groups by role, and the pools of all."""

    full: Sequence[int]
    local: Sequence[int]
    taps: Sequence[int]
    token_pools: Sequence[Pool]
    state_pools: Sequence[Pool]


def at_most(leases: Collection[Lease], groups: Groups) -> Needs:
    """Not less than what leases hold, by pool; quick, but what they share is counted for each."""
    held: Needs = {}
    for group, pool in enumerate(groups.token_pools):
        num_pages = sum(len(table) for lease in leases if (table := lease.tables[group]) is not None)
        held[pool] = held.get(pool, 0) + num_pages
    for group, pool in enumerate(groups.state_pools):
        num_pages = sum(len(state.pages) for lease in leases if (state := lease.states[group]) is not None)
        held[pool] = held.get(pool, 0) + num_pages
    return held


def at_least(leases: Collection[Lease], groups: Groups) -> Needs:
    """Not more than what leases hold, by pool, and nearly all of it. What they share is counted once."""
    nodes = {node for lease in leases for node in lease.leaf.path()}
    held: Needs = {}
    for group in (*groups.full, *groups.taps):
        runs = [pages for node in nodes if (pages := node.pages[group]) is not None]
        num_pages = sum(map(len, runs))
        if group in groups.taps:
            num_pages -= sum(pages.count(NULL_PAGE) for pages in runs)
        num_pages += sum(max(0, len(lease.tables[group] or ()) - lease.leaf.end) for lease in leases)
        held[groups.token_pools[group]] = held.get(groups.token_pools[group], 0) + num_pages
    for group in groups.local:
        seen = {page for lease in leases for page in lease.tables[group] or ()}
        held[groups.token_pools[group]] = len(seen - {NULL_PAGE})
    for group, pool in enumerate(groups.state_pools):
        states = [lease.states[group] for lease in leases]
        # One that is shared may be so with a checkpoint: when that goes, it is written in place.
        held[pool] = sum(len(state.pages) for state in states if state is not None and state.refs == 1)
    return held


def add(needs: Needs, held: Needs) -> Needs:
    return {pool: needs.get(pool, 0) + held.get(pool, 0) for pool in needs | held}
