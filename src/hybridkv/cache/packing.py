"""Moves pages into few slabs, so that pinning them excludes few slabs from compaction.

It knows nothing of tokens or requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from hybridkv.cache.arena.pages import in_order, make_pages
from hybridkv.cache.arena.pools import Pool, Slab
from hybridkv.cache.arena.slabs import Arena, Moved

_Target: TypeAlias = "Slab | None"
"""A slab to move pages into; None: a slab that no pool owns yet."""


def pack(arena: Arena, pool: Pool, pages: Sequence[int], fixed: set[Slab], moved: Moved) -> None:
    """Move pages of one pool into as few slabs as free memory allows. Pages in `fixed` slabs stay.

    Nothing is evicted. If the pages cannot fit into fewer slabs, nothing moves.
    """
    arena.file_returned()
    ours = Counter([pool.slab_of(page) for page in pages])
    staying: list[_Target] = [slab for slab in ours if slab in fixed]
    targets = staying + _choose(arena, pool, ours, staying)
    leaving = [page for page in pages if pool.slab_of(page) not in targets]
    places, slabs = make_pages(), set[Slab]()
    for target in targets:
        if len(places) < len(leaving):
            arena.take_in(pool, target, len(leaving) - len(places), places, slabs)
    mappings: dict[Slab, dict[int, int]] = {}
    for src, dst in zip(leaving, in_order(places), strict=True):
        mappings.setdefault(pool.slab_of(src), {})[src] = dst
    for slab, mapping in mappings.items():
        arena.move(slab, mapping, slabs, moved)


def _choose(arena: Arena, pool: Pool, ours: Counter[Slab], staying: Sequence[_Target]) -> list[_Target]:
    """The fewest slabs that, with `staying`, can hold all our pages; preferably slabs that already contain many."""
    room: dict[_Target, int] = {slab: ours[slab] + len(slab.free) for slab in pool.slabs.values()}
    room[None] = pool.pages_per_slab
    missing = sum(ours.values()) - _total(room, staying)
    fresh: list[_Target] = [None] * min(arena.num_free_slabs, -(-missing // pool.pages_per_slab))
    by_room: list[_Target] = [slab for slab in pool.slabs.values() if slab not in staying]
    by_room.sort(key=lambda slab: -room[slab])
    by_ours: list[_Target] = [slab for slab, _ in ours.most_common() if slab not in staying]
    fewest, most_room = 0, [*fresh, *by_room]
    while _total(room, most_room[:fewest]) < missing:
        fewest += 1
    del by_room[2 * fewest :]
    for num_own in range(min(fewest, len(by_ours)), 0, -1):
        own = by_ours[:num_own]
        others = [slab for slab in by_room if slab not in own]
        for more in (others, [*fresh, *others]):
            chosen = [*own, *more[: fewest - num_own]]
            if _total(room, chosen) >= missing:
                return chosen
    return most_room[:fewest]


def _total(room: dict[_Target, int], slabs: Iterable[_Target]) -> int:
    return sum(room[slab] for slab in slabs)
