"""The arena as a map: which group owns each slab, how full it is, what is pinned, what eviction takes next."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.tree import Checkpoint, Node
from hybridkv.cache.retention.eviction import Item
from hybridkv.cache.steps.running import Running

FREE = -1
NULL_SLAB = -2
_FULL = 255


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One pool of pages: a group, or all tapped layers."""

    name: str
    pages_per_slab: int
    slabs: int
    used_pages: int


@dataclass(frozen=True, slots=True)
class NextEviction:
    """Something that eviction would take soon."""

    is_checkpoint: bool
    position: int
    """Token position of the checkpoint, or of the end of the blocks."""
    num_tokens: int
    """Tokens that a request would have to compute again."""
    num_bytes: int
    idle_s: float
    """Seconds since it was kept or last used."""
    num_hits: int
    kind: str
    worth: float | None
    """The eviction policy's value of it. None: no request can resume from it."""


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """A cell of the map is one slab, or several consecutive ones in an arena of many."""

    slabs_per_cell: int
    pools: tuple[PoolUse, ...]
    owners: list[int]
    """By cell: index of the pool that owns most of its slabs, FREE or NULL_SLAB."""
    used: list[int]
    """By cell: pages in use, from 0 (none) to 255 (all)."""
    pinned: list[int]
    """Cells with slabs that transfers or pins keep in place."""
    num_pinned_slabs: int
    next_evictions: tuple[NextEviction, ...]


def memory_map(prefixes: PrefixCache, running: Running, max_cells: int, num_evictions: int) -> MemoryMap:
    arena = prefixes.groups.arena
    arena.file_returned()
    pools = list(arena.pools.values())
    per_cell = -(-arena.num_slabs // max_cells)
    num_cells = -(-arena.num_slabs // per_cell)
    share = [[0.0] * num_cells for _ in pools]
    slabs_in = [[0] * num_cells for _ in pools]
    uses = []
    for index, pool in enumerate(pools):
        used_pages = 0
        for number, slab in pool.slabs.items():
            cell = number // per_cell
            slabs_in[index][cell] += 1
            share[index][cell] += slab.num_used / pool.pages_per_slab
            used_pages += slab.num_used
        uses.append(PoolUse(pool.name, pool.pages_per_slab, len(pool.slabs), used_pages))
    owners, used = [], []
    for cell in range(num_cells):
        counts = [slabs[cell] for slabs in slabs_in]
        most = max(counts, default=0)
        owners.append(counts.index(most) if most else FREE)
        filled = sum(one[cell] for one in share)
        used.append(-(-int(filled * _FULL) // per_cell))
    if per_cell == 1:
        owners[0] = NULL_SLAB
    pinned = running.transfer_slabs()
    cells = sorted({slab.index // per_cell for slab in pinned})
    first = prefixes.queue.first(num_evictions, prefixes.history.clock)
    evictions = [_described(prefixes, item, worth) for item, worth in first]
    with_tokens = tuple(one for one in evictions if one.num_tokens)  # of the others, only windows are bare
    return MemoryMap(per_cell, tuple(uses), owners, used, cells, len(pinned), with_tokens)


def _described(prefixes: PrefixCache, item: Item, worth: float | None) -> NextEviction:
    facts = prefixes.queue.facts(item)
    idle_s = prefixes.history.seconds_since(item.last_used)
    is_checkpoint = isinstance(item, Checkpoint)
    num_tokens, num_bytes = facts.end - facts.start, facts.num_bytes
    if worth is None and isinstance(item, Node):  # bare: the blocks after the last checkpoint
        num_tokens = (item.num_blocks - prefixes.num_needed(item)) * prefixes.block_tokens
        num_bytes = num_bytes * num_tokens // max(1, facts.end - facts.start)
    return NextEviction(
        is_checkpoint, facts.end, num_tokens, num_bytes, idle_s, facts.num_hits, facts.kind.name.lower(), worth
    )
