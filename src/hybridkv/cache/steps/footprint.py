"""Number of pages that running requests hold, which eviction cannot free."""

from __future__ import annotations

from collections.abc import Collection

from hybridkv.cache.arena.group_pages import GroupPages
from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.arena.pools import Pool
from hybridkv.cache.steps.lease import Lease

Needs = dict[Pool, int]


def at_most(leases: Collection[Lease], groups: GroupPages) -> Needs:
    """Upper bound of the pages that leases hold, by pool. Quick, but counts shared pages once per lease."""
    footprint: Needs = {}
    for group, pool in enumerate(groups.token_pools):
        num_pages = sum(len(table) for lease in leases if (table := lease.pages.tables[group]) is not None)
        footprint[pool] = footprint.get(pool, 0) + num_pages
    for group, pool in enumerate(groups.state_pools):
        num_pages = sum(len(state.pages) for lease in leases if (state := lease.pages.states[group]) is not None)
        footprint[pool] = footprint.get(pool, 0) + num_pages
    return footprint


def at_least(leases: Collection[Lease], groups: GroupPages) -> Needs:
    """Tight lower bound of the pages that leases hold, by pool. Shared pages count once."""
    nodes = {node for lease in leases for node in lease.leaf.path()}
    footprint: Needs = {}
    for group in groups.full:
        num_pages = sum(len(run) for node in nodes if (run := node.pages[group]) is not None)
        num_pages += sum(max(0, len(lease.pages.tables[group] or ()) - lease.leaf.end) for lease in leases)
        footprint[groups.token_pools[group]] = footprint.get(groups.token_pools[group], 0) + num_pages
    for group in groups.taps:
        seen = {page for lease in leases for page in lease.pages.tables[group] or ()}
        footprint[groups.token_pools[group]] = footprint.get(groups.token_pools[group], 0) + len(seen)
    for group in groups.local:
        seen = {page for lease in leases for page in lease.pages.tables[group] or ()}
        footprint[groups.token_pools[group]] = len(seen - {NULL_PAGE})
    for group, pool in enumerate(groups.state_pools):
        states = [lease.pages.states[group] for lease in leases]
        # A shared state does not count: its other holder may be a checkpoint, and evictable.
        footprint[pool] = sum(len(state.pages) for state in states if state is not None and state.refs == 1)
    return footprint


def add(needs: Needs, footprint: Needs) -> Needs:
    return {pool: needs.get(pool, 0) + footprint.get(pool, 0) for pool in needs | footprint}
