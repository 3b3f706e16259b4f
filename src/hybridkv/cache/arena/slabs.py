"""The arena: allocation of pages and slabs, and how slabs move from one pool to another.

A pool owns slabs and hands out their pages, from the fullest slab first, so that other slabs become free and return to
the arena. When free pages are scattered, `compact` moves the pages of the emptiest slab into free pages of other slabs.
The arena knows nothing of tokens or requests: a callback (`Moved`) updates the holders of moved pages.

Moves, tail copies and zeroing form one ordered list (`take_operations`) that the memory layer runs before the next
step. A page that an unacknowledged operation reads or writes is not reused, even if it was given back meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridkv.cache.arena.operations import CopyPage, Operation, OperationBatch, ZeroPage, ZeroSlab
from hybridkv.cache.arena.pages import Pages, in_order, make_pages
from hybridkv.cache.arena.pools import Pool, Slab

_PageKey = tuple[str, int]

Moved = Callable[[Slab, dict[int, int]], None]
"""Callback with a slab and a map from old to new page; it updates the holders of the moved pages."""


class _Pending(NamedTuple):
    """An operation, and the pages that wait for it to be done."""

    number: int
    """Operations are numbered in the order of their requests."""
    operation: Operation
    busy: tuple[_PageKey, ...]


class Arena:
    """All slabs. Slab 0 is the null slab and belongs to no pool."""

    def __init__(self, num_slabs: int, pools: dict[str, int]) -> None:
        self.num_slabs = num_slabs
        self.pools = {name: Pool(name, pages_per_slab) for name, pages_per_slab in pools.items()}
        self.num_free_slabs = num_slabs - 1
        self._never_used = list(range(num_slabs - 1, 0, -1))
        self.num_moves = 0
        self.num_compactions = 0
        self.num_asked = 0
        """Number of operations requested since the start."""
        self._pending: list[_Pending] = []
        self._batches: dict[int, list[_Pending]] = {}
        self._next_batch = 0
        self._busy: Counter[_PageKey] = Counter()
        self._limbo: set[_PageKey] = set()

    # --- allocation ---------------------------------------------------------------------------------------------------

    def fits(self, needs: dict[Pool, int]) -> bool:
        """Whether each pool can supply that many pages without eviction or moves."""
        return self._fits(needs) or (self.file_returned() and self._fits(needs))

    def _fits(self, needs: dict[Pool, int]) -> bool:
        slabs = 0
        for pool, count in needs.items():
            if count > pool.num_free:
                slabs -= (pool.num_free - count) // pool.pages_per_slab
        return slabs <= self.num_free_slabs

    def could_ever_fit(self, needs: dict[Pool, int]) -> bool:
        """Whether they would fit into an empty arena."""
        return sum(-(-count // pool.pages_per_slab) for pool, count in needs.items()) < self.num_slabs

    def take(self, pool: Pool, count: int, slabs: set[Slab]) -> Pages:
        """Allocate `count` pages and add their slabs to `slabs`. The caller has checked that they fit."""
        if pool.returned:
            self._file(pool)
        pages = make_pages()
        missing = count
        for filed in pool.by_free:
            while filed and missing:
                missing -= self._take_from(filed.popitem()[0], missing, pages, slabs)
        while missing:
            missing -= self._take_from(self._give_slab(pool), missing, pages, slabs)
        pool.num_free -= count
        return pages

    def _take_from(self, slab: Slab, most: int, pages: Pages, slabs: set[Slab]) -> int:
        """Take up to `most` pages of a slab that is not in `by_free`. It is listed there again if some are left."""
        slabs.add(slab)
        if len(slab.free) <= most:
            taken, slab.free, slab.free_class = slab.free, make_pages(), 0
        else:
            taken = slab.free[-most:]
            del slab.free[-most:]
            slab.pool.file(slab)
        taken.reverse()
        pages += taken
        return len(taken)

    def take_in(self, pool: Pool, slab: Slab | None, most: int, pages: Pages, slabs: set[Slab]) -> int:
        """Add up to `most` free pages of `slab` to `pages`, or of a free slab if None. Returns how many."""
        if slab is None:
            slab = self._give_slab(pool)
        elif not slab.free:
            return 0
        pool.by_free[slab.free_class].pop(slab, None)
        taken = self._take_from(slab, most, pages, slabs)
        pool.num_free -= taken
        return taken

    def give_back(self, pool: Pool, pages: Sequence[int]) -> None:
        """Free pages that have no holder. A slab that becomes entirely free returns to the arena."""
        pool.returned.extend(self._keep_busy_back(pool, pages) if self._busy else pages)

    def pages_in_use(self) -> dict[str, int]:
        """By pool: number of pages that are held or wait for an operation."""
        self.file_returned()
        return {name: len(p.slabs) * p.pages_per_slab - p.num_free for name, p in self.pools.items()}

    def slabs_in_use(self) -> dict[str, int]:
        self.file_returned()
        return {name: len(pool.slabs) for name, pool in self.pools.items()}

    @property
    def free_slabs(self) -> list[int]:
        """Slabs that no pool owns."""
        self.file_returned()
        return [*self._never_used, *(slab.index for pool in self.pools.values() for slab in pool.spare)]

    def file_returned(self) -> bool:
        """List the pages that were given back in their slabs. Returns whether there were any."""
        pools = [pool for pool in self.pools.values() if pool.returned]
        for pool in pools:
            self._file(pool)
        return bool(pools)

    def _file(self, pool: Pool) -> None:
        pages, per_slab, start = in_order(pool.returned), pool.pages_per_slab, 0
        pool.returned = make_pages()
        pool.num_free += len(pages)
        while start < len(pages):
            slab = pool.slab_of(pages[start])
            end = bisect_left(pages, (slab.index + 1) * per_slab, start)
            slab.free.extend(pages[start:end])
            start = end
            if len(slab.free) < per_slab:
                pool.file(slab)
            else:
                self._take_slab(slab)

    def _give_slab(self, pool: Pool) -> Slab:
        slab = pool.spare.pop() if pool.spare else pool.get_slab(self._slab_of_others(pool))
        pool.slabs[slab.index] = slab
        pool.num_free += pool.pages_per_slab
        slab.is_owned = True
        self.num_free_slabs -= 1
        return slab

    def _slab_of_others(self, pool: Pool) -> int:
        """A slab that was never used, or a free one that another pool owned last."""
        if self._never_used:
            index = self._never_used.pop()
        else:
            index = max(self.pools.values(), key=lambda other: len(other.spare)).spare.pop().index
            self._ask(ZeroSlab(pool.name, index), ())
        return index

    def _take_slab(self, slab: Slab) -> None:
        """Return an entirely free slab to the arena."""
        pool = slab.pool
        pool.by_free[slab.free_class].pop(slab, None)
        slab.free_class = 0
        pool.num_free -= pool.pages_per_slab
        del pool.slabs[slab.index]
        slab.is_owned = False
        pool.spare.append(slab)
        self.num_free_slabs += 1
        for holder in slab.holders:
            holder.slabs.discard(slab)
        slab.holders = {}

    # --- operations ---------------------------------------------------------------------------------------------------

    def copy(self, pool: Pool, src: int, dst: int, also_busy: Sequence[int] = ()) -> None:
        """Request a copy of `src` onto `dst` before the next step."""
        busy = tuple((pool.name, page) for page in (src, dst, *also_busy))
        self._ask(CopyPage(pool.name, src, dst), busy)
        self._busy.update(busy)

    def clear(self, pool: Pool, page: int) -> None:
        """Request that a page with invalid content be zeroed before the next step."""
        if page // pool.pages_per_slab in pool.slabs:
            self._ask(ZeroPage(pool.name, page), ((pool.name, page),))
            self._busy[pool.name, page] += 1

    def _ask(self, operation: Operation, busy: tuple[_PageKey, ...]) -> None:
        self.num_asked += 1
        self._pending.append(_Pending(self.num_asked, operation, busy))

    def take_operations(self) -> OperationBatch | None:
        """Take the operations to run, in this order, before the next step; None if there are none."""
        if not self._pending:
            return None
        batch = OperationBatch(self._next_batch, tuple(pending.operation for pending in self._pending))
        self._batches[batch.id] = self._pending
        self._next_batch += 1
        self._pending = []
        return batch

    def take_back(self, batch_id: int) -> None:
        """Put a batch that failed back at the start of the next one. Operations can safely run twice."""
        self._pending = self._batches.pop(batch_id) + self._pending

    def acknowledge(self, batch_id: int) -> None:
        """Report that a batch is done: its pages may be reused. Batches may be acknowledged in any order."""
        if batch_id not in self._batches:
            raise KeyError(f"batch {batch_id} is not waiting to be acknowledged")
        for pending in self._batches.pop(batch_id):
            for name, page in pending.busy:
                self._no_longer_busy(self.pools[name], page)

    def is_done(self, number: int) -> bool:
        """Whether the first `number` requested operations are all acknowledged."""
        waiting = [*self._batches.values(), self._pending]
        return all(not batch or batch[0].number > number for batch in waiting)

    @property
    def has_limbo(self) -> bool:
        """Whether free pages wait for operations to be acknowledged before they can be reused."""
        return bool(self._limbo)

    def _keep_busy_back(self, pool: Pool, pages: Sequence[int]) -> list[int]:
        idle = []
        for page in pages:
            if (pool.name, page) in self._busy:
                self._limbo.add((pool.name, page))
                pool.slab_of(page).limbo += 1
            else:
                idle.append(page)
        return idle

    def _no_longer_busy(self, pool: Pool, page: int) -> None:
        key = (pool.name, page)
        self._busy[key] -= 1
        if self._busy[key] == 0:
            del self._busy[key]
            if key in self._limbo:
                self._limbo.remove(key)
                pool.slab_of(page).limbo -= 1
                self.give_back(pool, [page])

    # --- compaction ---------------------------------------------------------------------------------------------------

    def compact(self, needs: dict[Pool, int], is_pinned: Callable[[Slab], bool], moved: Moved) -> bool:
        """Move all pages of one slab into free pages of its pool's other slabs. False if no slab can be emptied.

        The slab becomes free when the moves are acknowledged. Only pools with a slab's worth of free pages beyond
        `needs` are compacted.
        """
        self.file_returned()
        for pool in self.pools.values():
            slab = self._slab_to_empty(pool, needs.get(pool, 0), is_pinned)
            if slab is None:
                continue
            pages, holes = slab.used_pages(), slab.free
            pool.by_free[slab.free_class].pop(slab, None)  # its own free pages are no targets
            pool.num_free -= len(holes)
            slab.free, slab.free_class = make_pages(), 0
            target_slabs: set[Slab] = set()
            mapping = dict(zip(pages, self.take(pool, len(pages), target_slabs), strict=True))
            self.move(slab, mapping, target_slabs, moved, holes)
            self.num_compactions += 1
            return True
        return False

    def move(
        self, slab: Slab, mapping: dict[int, int], targets: set[Slab], moved: Moved, holes: Sequence[int] = ()
    ) -> None:
        """Move pages of a slab to pages that were allocated in the slabs `targets`.

        `holes`: free pages of the slab that also wait for the last move, so that the whole slab becomes free at once.
        """
        pool, last = slab.pool, next(reversed(mapping))
        for src, dst in mapping.items():
            self.copy(pool, src, dst, also_busy=holes if src == last else ())
            if pool.holds:
                pool.holds[dst], pool.holds[src] = pool.holds[src], 0
        slab.holders = {holder: None for holder in slab.holders if slab in holder.slabs}
        for holder in slab.holders:
            for target in targets:
                target.add_holder(holder)
        moved(slab, mapping)
        self.num_moves += len(mapping)
        self.give_back(pool, [*mapping, *holes])  # all in limbo until the moves are acknowledged

    def _slab_to_empty(self, pool: Pool, needed: int, is_pinned: Callable[[Slab], bool]) -> Slab | None:
        if pool.num_free - needed < pool.pages_per_slab:
            return None
        for slab in pool.emptiest_first():
            holes_elsewhere = pool.num_free - len(slab.free)
            if slab.num_used <= holes_elsewhere and not slab.limbo and not is_pinned(slab):
                return slab
        return None

    # --- integrity ----------------------------------------------------------------------------------------------------

    def check_integrity(self, held: dict[str, Counter[int]]) -> None:
        """Assert that every page is either free, in limbo, or held. `held`: references of each page, by pool."""
        free_slabs = self.free_slabs
        assert len(free_slabs) == self.num_free_slabs
        owned = {index for pool in self.pools.values() for index in pool.slabs}
        assert len(owned) == sum(len(pool.slabs) for pool in self.pools.values())
        assert owned.isdisjoint(free_slabs)
        assert len(free_slabs) == len(set(free_slabs))
        assert owned | set(free_slabs) == set(range(1, self.num_slabs))
        for pool in self.pools.values():
            free = [page for slab in pool.slabs.values() for page in slab.free]
            limbo = [page for name, page in self._limbo if name == pool.name]
            assert pool.num_free == len(free)
            pages = {
                page
                for index in pool.slabs
                for page in range(index * pool.pages_per_slab, (index + 1) * pool.pages_per_slab)
            }
            counted = Counter(free) + Counter(limbo) + Counter(dict.fromkeys(held.get(pool.name, ()), 1))
            assert counted == Counter(pages), (pool.name, counted - Counter(pages), Counter(pages) - counted)
            for slab in pool.slabs.values():
                assert slab.num_used > 0
                assert (slab in pool.by_free[slab.free_class]) == bool(slab.free)
                assert slab.free_class == len(slab.free).bit_length()
            assert sum(map(len, pool.by_free)) == sum(bool(slab.free) for slab in pool.slabs.values())
