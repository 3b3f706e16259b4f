"""Questions of room that everyone who drives a cache asks."""

from __future__ import annotations

from hybridkv.cache.cache import Cache
from hybridkv.cache.layout import CacheGroup, CacheLayout, Role
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.reclaim import NoRoom
from hybridkv.cache.steps.step_tables import StepTables


def extend_some(cache: Cache, lease: Lease, num_tokens: int) -> StepTables | NoRoom:
    """Extend by `num_tokens`, or half of that, and so on; for a lease that is alone in the arena.

    Where it stands may be what takes the room: the tail it resumed from is held until its first step. Then it goes
    back; but only then: what it has computed since would have to be computed again, and end at the same place.
    """
    while True:
        most = min(num_tokens, lease.num_tokens - lease.computed)
        while isinstance(step := cache.extend(lease, most), NoRoom) and most > 1:
            most //= 2
        if not isinstance(step, NoRoom) or lease.pages.tail is None:
            return step
        cache.rollback(lease, lease.computed - 1)


def could_fit(layout: CacheLayout, num_tokens: int) -> bool:
    """Whether an empty arena has room for a request of that length; if not, nothing should be evicted for it."""
    slabs = sum(
        -(-_held_pages(group, num_tokens, layout.block_tokens) // group.pages_per_slab)
        for group in (*layout.token_groups, *layout.state_groups)
        if group.role is not Role.TAP
    )
    return slabs < layout.num_slabs


def longest_fit(layout: CacheLayout, most: int) -> int:
    """The length of the longest request, up to `most`, that an empty arena has room for."""
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if could_fit(layout, middle) else (fits, middle)
    return fits


def _held_pages(group: CacheGroup, num_tokens: int, block_tokens: int) -> int:
    if group.role is Role.STATE:
        return group.pages_per_state
    return group.sight.held_blocks(num_tokens, block_tokens)
