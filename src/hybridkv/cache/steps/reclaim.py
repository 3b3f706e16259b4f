"""Memory reclaim: make room for a step by compaction and eviction, or report why there is no room."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.cache.arena.compaction import Compactor
from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.tree import Checkpoint, Node
from hybridkv.cache.retention.eviction import Item, is_superseded, may_go
from hybridkv.cache.retention.policy import Rating
from hybridkv.cache.steps import footprint
from hybridkv.cache.steps.footprint import Needs
from hybridkv.cache.steps.running import Pinned

_EVICT_AHEAD = 8


class NoRoom(NamedTuple):
    """Why pages could not be allocated. It is falsy, so that `if not (step := extend(...))` works."""

    reason: str
    pinned_slabs: int = 0
    """Number of slabs that could not be emptied because steps in flight or transfers use them."""
    wait_for_moves: bool = False
    """Page moves are pending: run and acknowledge them, then retry."""

    never: bool = False
    """Even an empty arena is too small: reject the request, or extend it by fewer tokens at a time."""
    transfer_slabs: int = 0
    """Number of `pinned_slabs` that transfers pin (`Cache.pin`). Transfers may take seconds."""

    def __bool__(self) -> bool:
        return False


class Reclaimer:
    """Makes room in the arena."""

    def __init__(self, prefixes: PrefixCache, compactor: Compactor) -> None:
        self.prefixes = prefixes
        self.compactor = compactor
        self.groups = prefixes.groups
        self.arena = prefixes.groups.arena
        self.running = compactor.running
        self.stats = prefixes.stats
        layout = prefixes.groups.layout
        self._num_ahead = min(_EVICT_AHEAD, layout.num_slabs // 32)
        # What goes before all others frees little, and costs no copies: several are evicted before the next look. Idle
        # windows are evicted as needed: each page may serve a request.
        self._num_spare_at_once = 1 if self.groups.keeps_idle else max(1, self._num_ahead)
        self._checkpoint_slabs = layout.checkpoint_slabs

    def num_spare_checkpoints(self) -> int:
        """Number of checkpoints for which there is idle memory: free, or taken by what goes before all others.

        What was freed by evictions ahead is not idle.
        """
        num_slabs = max(0, self.arena.num_free_slabs - 2 * self._num_ahead)
        if self.groups.keeps_idle:
            pools = {self.groups.token_pools[group] for group in self.groups.local}
            num_slabs += sum(pool.num_idle // pool.pages_per_slab for pool in pools)
        free = int(num_slabs / self._checkpoint_slabs) if self._checkpoint_slabs else 0
        return self.prefixes.queue.num_spare + free

    def make_spare_room(self, needs: Needs, most_evictions: int) -> None:
        """Evict only what goes before all others, until `needs` fit or as much as that gives."""
        for _ in range(most_evictions):
            if self.arena.fits(needs) or not self._evict_spare(needs, 1):
                return

    def make_room(self, needs: Needs, most_evictions: int | None = None) -> NoRoom | None:
        """Evict what goes before all others, compact and evict the rest until `needs` fit. Returns None if they fit."""
        if self.arena.fits(needs):
            return None
        if not self.arena.could_ever_fit(needs):  # evict nothing for what can never fit
            return NoRoom("it can never fit: the arena is smaller than what this step needs", never=True)
        self.groups.run_operations()  # emptied slabs may wait for it
        if not self.arena.fits(needs) and self._is_in_vain(needs):
            return self._no_room(set())
        pinned, num_evicted = Pinned(self.running), 0
        while not self.arena.fits(needs):
            if self._evict_spare(needs, self._num_spare_at_once) or self.compactor.compact(needs, pinned):
                continue
            if num_evicted == most_evictions or not self.evict_least(needs):
                return self._no_room(pinned.refused)
            num_evicted += 1
        # Evict a few items ahead, so that most requests find room at once; not in small arenas, where each page counts,
        # and nothing of value while there is idle memory. Windows of an evicted checkpoint are idle memory.
        if self.groups.keeps_idle or self.prefixes.queue.num_spare:
            self._evict_spare(needs, self._num_ahead)
        else:
            for _ in range(self._num_ahead):
                if not self.evict_least(needs):
                    break
        return None

    def _is_in_vain(self, needs: Needs) -> bool:
        """Whether there would be no room even after evicting everything evictable."""
        leases = self.running.leases.values()
        for count in (footprint.at_most, footprint.at_least):  # the quick bound mostly suffices
            if self.arena.could_ever_fit(footprint.add(needs, count(leases, self.groups))):
                return False
        return True

    def _no_room(self, refused: set[Slab]) -> NoRoom:
        transfers = self.running.transfer_slabs()
        pinned = refused | transfers
        if self.arena.has_limbo:
            reason = "moves are under way: acknowledge them and ask again"
        elif transfers:
            by_steps = f"{len(pinned - transfers)} slabs are pinned by steps in flight, " if pinned > transfers else ""
            reason = f"{by_steps}{len(transfers)} slabs are pinned by transfers: let one finish"
        elif pinned:
            reason = f"{len(pinned)} slabs are pinned by steps in flight: let one finish"
        else:
            reason = "nothing left to evict: running requests hold the rest"
        return NoRoom(reason, len(pinned), self.arena.has_limbo, transfer_slabs=len(transfers))

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict_least(self, needs: Needs) -> bool:
        """Evict the item of least value, or as much of its end as is needed. False if nothing is evictable.

        Tapped layers are evicted first: no request but those that ask for them misses them.
        """
        if self.prefixes.index.tapped and self._evict_taps():
            return True
        popped = self.prefixes.queue.pop(self.prefixes.history.clock)
        if popped is None:
            return False
        self._evict(*popped, needs)
        return True

    def _evict_spare(self, needs: Needs, most: int) -> bool:
        """Evict up to `most` items that go before all others, bare nodes included. False if there is none."""
        for number in range(most):
            popped = self.prefixes.queue.pop_spare(self.prefixes.history.clock)
            if popped is None:
                return number > 0
            self._evict(*popped, needs)
        return most > 0

    def _evict(self, item: Item, rating: Rating | None, needs: Needs) -> None:
        self.prefixes.history.evicted(item, rating)
        if isinstance(item, Checkpoint):
            self.evict_checkpoint(item)
        elif may_go(item) and not (self.groups.keeps_idle and self.prefixes.num_needed(item) == item.num_blocks):
            self._evict_blocks(item, needs)
        else:
            self._evict_windows(item, needs)

    def _evict_taps(self) -> bool:
        """Evict tapped layers of one node: of the least recently used one that has some which no request uses now.

        False if there is none.
        """
        in_use: dict[Node, set[int]] = {}
        for lease in self.running.leases.values():
            for node in lease.leaf.path() if lease.taps else ():
                in_use.setdefault(node, set()).update(lease.taps)
        for node in self.prefixes.index.tapped:
            used = in_use.get(node, set())
            unused = [group for group in self.groups.taps if group not in used and node.pages[group]]
            if unused:
                self.stats.taps_evicted += self.prefixes.free_taps(node, unused)
                return True
        return False

    def evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        prefixes, node = self.prefixes, checkpoint.node
        assert node is not None
        before = node.checkpoint_before(checkpoint)
        prefixes.drop_checkpoint(checkpoint)
        self.stats.checkpoints_evicted += 1
        if before is not None and before.rating is not None and not is_superseded(before):
            prefixes.history.deepest_again(before)
        if prefixes.needs_checkpoints and not node.refs and not node.children:
            prefixes.tidy(node)

    def _evict_blocks(self, node: Node, needs: Needs) -> None:
        """Evict one slab's worth of blocks from the end of `node`, or more if `needs` asks more of these pools."""
        prefixes = self.prefixes
        wanted = max(self._num_wanted(group, needs) for group in self.groups.full or self.groups.local)
        kept = max(prefixes.num_needed(node), node.num_blocks - wanted)
        self.stats.blocks_evicted += node.num_blocks - kept
        parent, last_used = node.parent, node.last_used
        prefixes.free_blocks(node, kept)
        if self.groups.keeps_idle and kept:
            if kept > prefixes.num_needed(node) or self.groups.has_idle():
                prefixes.queue.offer_bare(node, is_next=True)
        elif kept > prefixes.num_needed(node):
            if prefixes.needs_checkpoints:
                prefixes.queue.offer_bare(node)
            else:
                prefixes.queue.offer(node)
        elif not kept and parent is not None:
            parent.last_used = max(parent.last_used, last_used)
            prefixes.tidy(parent)

    def _evict_windows(self, node: Node, needs: Needs) -> None:
        """Free idle pages at the end of `node`: one slab's worth of each local group, or more if `needs` asks more.

        Block boundaries before them can still be resumed.
        """
        if self.prefixes.free_idle(node, lambda group: self._num_wanted(group, needs)) and self.groups.has_idle():
            self.prefixes.queue.offer_bare(node, is_next=True)

    def _num_wanted(self, group: int, needs: Needs) -> int:
        """Number of pages of a group to evict at once. Where windows stay idle, only as many as are missing."""
        pool = self.groups.token_pools[group]
        return max(pool.pages_per_slab, needs.get(pool, 0) - (pool.num_free if self.groups.keeps_idle else 0))
