"""Helpers for engines: whether a request fits into the arena, and how far it can extend."""

from __future__ import annotations

from hybridkv.cache.cache import Cache
from hybridkv.cache.layout import CacheGroup, CacheLayout, Role
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.reclaim import NoRoom
from hybridkv.cache.steps.step_tables import StepTables


def extend_some(cache: Cache, lease: Lease, num_tokens: int) -> StepTables | NoRoom:
    """Extend by `num_tokens`, or half of that, and so on; for a lease that is alone in the arena.

    The lease may itself take the room: it holds the tail it resumed from until its first step. In that case it rolls
    back. After its first step it does not: it would recompute the same tokens and run out of room at the same position.
    """
    while True:
        most = min(num_tokens, lease.num_tokens - lease.computed)
        while isinstance(step := cache.extend(lease, most), NoRoom) and most > 1:
            most //= 2
        if not isinstance(step, NoRoom) or lease.pages.tail is None:
            return step
        cache.rollback(lease, lease.computed - 1)


def could_fit(layout: CacheLayout, num_tokens: int, num_taps: int = 0) -> bool:
    """Whether an empty arena has room for a request of `num_tokens` that uses `num_taps` tapped layers.

    If not, nothing should be evicted for it.
    """
    slabs = sum(
        -(-_held_pages(group, num_tokens, layout.block_tokens) // group.pages_per_slab)
        for group in (*layout.token_groups, *layout.state_groups)
    )
    if num_taps:
        if not layout.tap_groups:
            return False
        slabs += -(-num_taps * -(-num_tokens // layout.block_tokens) // layout.tap_groups[0].pages_per_slab)
    return slabs < layout.num_slabs


def longest_fit(layout: CacheLayout, most: int, num_taps: int = 0) -> int:
    """Length of the longest request, up to `most`, that fits into an empty arena."""
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if could_fit(layout, middle, num_taps) else (fits, middle)
    return fits


def _held_pages(group: CacheGroup, num_tokens: int, block_tokens: int) -> int:
    if group.role is Role.STATE:
        return group.pages_per_state
    return group.sight.held_blocks(num_tokens, block_tokens)
