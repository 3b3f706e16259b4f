"""Who keeps which page: the index and the arena together, without the verbs of the cache.

Pages of full groups and taps belong to one node (or one lease, before they are published). Pages of local groups are
held one by one, by the leases that see them and the checkpoints that need them. States are objects that count their
holders. Eviction, compaction and the removal of what nobody needs live here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hybridkv.cache import held
from hybridkv.cache.arena import Arena
from hybridkv.cache.eviction import EvictionQueue, is_superseded
from hybridkv.cache.held import Needs
from hybridkv.cache.history import History
from hybridkv.cache.index import Checkpoint, Index, Node, State, null_pages
from hybridkv.cache.layout import CacheLayout, Role
from hybridkv.cache.lease import Lease, NoRoom
from hybridkv.cache.operations import Operation
from hybridkv.cache.pages import NULL_PAGE, Pages, make_pages
from hybridkv.cache.policy import EvictionPolicy
from hybridkv.cache.pools import Slab
from hybridkv.cache.stats import CacheStats, Events

_EVICT_AHEAD = 8


class Pinned:
    """The slabs of steps in flight and of transfers, found when first asked for."""

    def __init__(self, in_flight: dict[int, Lease], transfers: dict[int, set[Slab]]) -> None:
        self.refused: set[Slab] = set()
        """Slabs that could have been emptied otherwise."""
        self._in_flight = in_flight
        self._transfers = transfers
        self._slabs: set[Slab] | None = None

    def is_pinned(self, slab: Slab) -> bool:
        if self._slabs is None:
            self._slabs = set()
            self._slabs.update(*self._transfers.values())
            for lease in self._in_flight.values():
                self._slabs.update(lease.slabs, *(node.slabs for node in lease.leaf.path()))
        if slab in self._slabs:
            self.refused.add(slab)
        return slab in self._slabs


class Keeper:
    """Pages of nodes, checkpoints and leases."""

    def __init__(
        self,
        layout: CacheLayout,
        eviction: EvictionPolicy,
        run_operations: Callable[[Sequence[Operation]], None] | None,
        stats: CacheStats,
        events: Events,
    ) -> None:
        groups = (*layout.token_groups, *layout.state_groups)
        self.layout = layout
        self.arena = Arena(layout.num_slabs, {group.pool_name: group.pages_per_slab for group in groups})
        self.index = Index(layout.block_tokens, len(layout.token_groups))
        self.token_pools = [self.arena.pools[group.pool_name] for group in layout.token_groups]
        self.state_pools = [self.arena.pools[group.pool_name] for group in layout.state_groups]
        roles = [group.role for group in layout.token_groups]
        self.full = [i for i, role in enumerate(roles) if role is Role.FULL]
        self.local = [i for i, role in enumerate(roles) if role is Role.LOCAL]
        self.taps = [i for i, role in enumerate(roles) if role is Role.TAP]
        for group in self.local:
            self.token_pools[group].share_pages(layout.num_slabs)
        self._groups = held.Groups(self.full, self.local, self.taps, self.token_pools, self.state_pools)
        self.leases: dict[int, Lease] = {}
        self.in_flight: dict[int, Lease] = {}
        self.transfers: dict[int, set[Slab]] = {}
        """By the id of a pin's lease: the slabs that its pages are in."""
        self.needs_checkpoints = bool(layout.state_groups or self.local)
        """Whether blocks alone cannot be resumed from."""
        self.stats = stats
        self.events = events
        self._sights = [group.sight for group in layout.token_groups]
        self._block_tokens = layout.block_tokens
        self._queue = EvictionQueue(layout, eviction)
        self.history = History(self._queue, layout.block_tokens)
        self._run_operations = run_operations

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, needs: Needs, most_evictions: int | None = None) -> NoRoom | None:
        """See to it that `needs` fit: move pages together, evict what is worth least. None: they do."""
        if self.arena.fits(needs):
            return None
        if not self.arena.could_ever_fit(needs):  # nothing is evicted for what can never be
            return NoRoom("it can never fit: the arena is smaller than what this step needs", never=True)
        self.run_operations()  # slabs that were emptied may wait for it
        if not self.arena.fits(needs) and self._is_in_vain(needs):
            return self._no_room(set())
        pinned, num_evicted = Pinned(self.in_flight, self.transfers), 0
        while not self.arena.fits(needs):
            if self.compact(needs, pinned):
                continue
            if num_evicted == most_evictions or not self._evict_least(needs):
                return self._no_room(pinned.refused)
            num_evicted += 1
        # Work ahead a little, so that most requests find room at once; in small arenas every page counts.
        for _ in range(min(_EVICT_AHEAD, self.layout.num_slabs // 32)):
            if not self._evict_least(needs):
                break
        return None

    def compact(self, needs: Needs, pinned: Pinned) -> bool:
        """Empty a slab by moving its pages, if one can be emptied."""
        if not self.arena.compact(needs, pinned.is_pinned, self.pages_moved):
            return False
        self.stats.compactions += 1
        self.stats.pages_moved = self.arena.num_moves
        self.run_operations()
        return True

    def _is_in_vain(self, needs: Needs) -> bool:
        """Whether there would be no room even without anything that can be evicted."""
        leases = self.leases.values()
        for count in (held.at_most, held.at_least):  # mostly the quick one is enough to see that there would
            if self.arena.could_ever_fit(held.add(needs, count(leases, self._groups))):
                return False
        return True

    def _no_room(self, refused: set[Slab]) -> NoRoom:
        transfers = self.transfer_slabs()
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

    def transfer_slabs(self) -> set[Slab]:
        """The slabs that transfers pin."""
        slabs: set[Slab] = set()
        return slabs.union(*self.transfers.values())

    def run_operations(self) -> None:
        """Where the memory layer works at once, let it."""
        if self._run_operations is not None and (batch := self.arena.take_operations()) is not None:
            try:
                self._run_operations(batch.operations)
            except BaseException:
                self.arena.take_back(batch.id)
                raise
            self.arena.acknowledge(batch.id)

    def pages_moved(self, slab: Slab, moved: dict[int, int]) -> None:
        """Pages of a slab are elsewhere now: tell nodes, checkpoints and leases."""
        pool = slab.pool
        tokens = [i for i, candidate in enumerate(self.token_pools) if candidate is pool]
        states = [i for i, candidate in enumerate(self.state_pools) if candidate is pool]
        targets = {pool.slab_of(page) for page in moved.values()}
        for node in slab.holders:
            assert isinstance(node, Node)
            _relocate(node.pages, tokens, moved)
            for checkpoint in node.checkpoints:
                if checkpoint.tail_pages:
                    checkpoint.tail_pages = [
                        moved.get(page, page) if i in tokens else page for i, page in enumerate(checkpoint.tail_pages)
                    ]
                _relocate_states(checkpoint.states, states, moved)
        for lease in self.leases.values():
            if slab in lease.slabs or any(slab in node.slabs for node in lease.leaf.path()):
                _relocate(lease.tables, tokens, moved)
                _relocate_states(lease.states, states, moved)
                lease.copied = [(group, moved.get(p, p) if group in tokens else p) for group, p in lease.copied]
                lease.slabs |= targets

    # --- pages held one by one ----------------------------------------------------------------------------------------

    def first_visible_block(self, group: int, position: int) -> int:
        return self._sights[group].first_visible(position) // self._block_tokens

    def hold_local(self, leaf: Node, group: int, first: int, last: int) -> Pages:
        """One hold more on each page of blocks [first, last) of the path to `leaf`; returns the pages."""
        held = make_pages()
        for _, pages, start, end in _runs_upwards(leaf, group, first, last):
            held = pages[start:end] + held
        self.token_pools[group].add_holds(held)
        return held

    def drop_local(self, leaf: Node, group: int, first: int, last: int) -> None:
        """One hold less; pages nobody holds leave the node and go back."""
        pool = self.token_pools[group]
        for node, pages, start, end in _runs_upwards(leaf, group, first, last):
            run = pages[start:end]
            freed = pool.drop_holds(run)
            if not freed:
                continue
            if freed is run:
                pages[start:end] = null_pages(end - start)
            else:
                gone = set(freed)
                pages[start:end] = make_pages(NULL_PAGE if page in gone else page for page in run)
            self.arena.give_back(pool, freed)
            self.index.changed()
            if not any(pages):
                node.pages[group] = None

    def give_back_blocks(self, group: int, pages: Pages) -> None:
        """Blocks that were in no node; where a load has left some out, there is nothing to give back."""
        if NULL_PAGE in pages:
            pages = make_pages(page for page in pages if page != NULL_PAGE)
        self.arena.give_back(self.token_pools[group], pages)

    def drop_state(self, group: int, state: State | None) -> None:
        if state is not None:
            state.refs -= 1
            if state.refs == 0:
                self.arena.give_back(self.state_pools[group], state.pages)

    def drop_states(self, states: Sequence[State | None]) -> None:
        for group, state in enumerate(states):
            self.drop_state(group, state)

    def state_slabs(self, states: Sequence[State | None]) -> set[Slab]:
        slabs: set[Slab] = set()
        for group, state in enumerate(states):
            if state is not None:
                pool = self.state_pools[group]
                for page in state.pages:
                    slabs.add(pool.slab_of(page))
        return slabs

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def add_checkpoint(self, lease: Lease, checkpoint: Checkpoint, *, has_local: bool = False) -> None:
        """Attach a checkpoint to the path of a lease; of two alike one is kept.

        It takes over a hold of each state and, with `has_local`, of each page its local groups see.
        """
        leaf, block = lease.leaf, checkpoint.position // self.layout.block_tokens
        if block:
            node = leaf.at_block(block - 1)
        else:
            *_, node = leaf.path()
        twin = node.checkpoint_at(checkpoint.position, checkpoint.tail_tokens)
        if twin is not None and None not in twin.states:
            self.drop_states(checkpoint.states)
            self._free_tail(checkpoint)
            twin.last_used = self.history.clock
            self.offer_again(twin)
            return
        if twin is not None:
            self.drop_checkpoint(twin)
        for group in () if has_local else self.local:
            self.hold_local(node, group, self.first_visible_block(group, checkpoint.position), block)
        node.add_checkpoint(checkpoint)
        self.index.changed()
        node.hold_slabs(self.state_slabs(checkpoint.states))
        checkpoint.last_used = self.history.clock
        checkpoint.turn, checkpoint.new_tokens = lease.turn, checkpoint.position - lease.continued_from
        self.stats.checkpoints_kept += 1
        if not self.needs_checkpoints:  # it spares less than a block: the run it is on tells more
            self.offer_again(checkpoint)
            return
        self.history.kept(checkpoint)
        before = node.checkpoint_before(checkpoint)
        if before is not None:
            self.history.superseded(before)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the index with everything it alone holds."""
        node = checkpoint.node
        assert node is not None
        node.checkpoints.remove(checkpoint)
        self.index.changed()
        checkpoint.node = None
        self._queue.withdraw(checkpoint)
        block = checkpoint.position // self.layout.block_tokens
        for group in self.local:
            self.drop_local(node, group, self.first_visible_block(group, checkpoint.position), block)
        self.drop_states(checkpoint.states)
        self._free_tail(checkpoint)

    def _free_tail(self, checkpoint: Checkpoint) -> None:
        for group, page in enumerate(checkpoint.tail_pages):
            if page != NULL_PAGE:
                self.arena.give_back(self.token_pools[group], [page])
        checkpoint.tail_pages = []

    # --- nodes --------------------------------------------------------------------------------------------------------

    def release_node(self, node: Node) -> None:
        """A lease leaves a node."""
        node.refs -= 1
        if node.refs == 0:
            node.last_used = self.history.clock
            self.tidy(node)

    def tidy(self, node: Node | None) -> None:
        """After a node lost a lease or a child: remove it, merge it or offer it for eviction, and so on upwards."""
        while node is not None and not node.refs and not node.gone and (node.parent is not None or node.dead):
            if node.dead:
                if node.children:
                    return
                node = self._remove(node)
            elif len(node.children) == 1:
                self._queue.withdraw(node)
                self.index.absorb(node)
                return
            elif node.children:
                return
            else:
                parent = node.parent
                if not self.full:
                    self._cut_after_last_checkpoint(node)
                elif node.num_blocks:
                    self._offer_leaf(node)
                if node.num_blocks:
                    return
                node = parent
        if node is not None and node.parent is None and not node.refs:
            self.index.drop_empty_root(node)

    def all_nodes(self) -> set[Node]:
        """Nodes that can be found, and dead ones that leases are still on."""
        nodes = {node for root in self.index.roots.values() for node in root.subtree()}
        for lease in self.leases.values():
            for node in lease.leaf.path():
                nodes.add(node)
                if node.dead:
                    nodes.update(node.subtree())
        return nodes

    def kill(self, node: Node) -> None:
        """A node and all below it are no longer found; their pages go when no lease is left on them."""
        if node.parent is not None and node.parent.children.get(node.first) is node:
            self.index.unlink(node)
            node.parent.refs += 1  # leases below still count on the path above: see _remove
        below = list(node.subtree())
        for dead in below:
            if self.events.enabled and dead.num_blocks and not dead.dead:
                self.events.removed(dead.keys)
            dead.dead = True
            self._queue.withdraw(dead)
        for dead in reversed(below):
            if not dead.refs and not dead.children:
                self.tidy(dead)

    def _remove(self, node: Node) -> Node | None:
        """Free a dead node without leases and children; returns the node above that this concerns, if any."""
        parent = node.parent
        cut_off = parent is not None and parent.children.get(node.first) is not node
        self._free_blocks(node, 0)
        if parent is not None and cut_off:
            parent.refs -= 1  # taken by kill
        return parent

    def _free_blocks(self, node: Node, num_kept: int) -> None:
        """Free all blocks after the first `num_kept` of a node without children, with the checkpoints there."""
        boundary = (node.start + num_kept) * self.layout.block_tokens
        end_of_kept = boundary + self.layout.block_tokens if num_kept else 0
        for checkpoint in [c for c in node.checkpoints if c.position >= end_of_kept]:
            self.drop_checkpoint(checkpoint)
        if self.events.enabled and node.num_blocks > num_kept and not node.dead:
            self.events.removed(node.keys[num_kept:])
        if node.parent is None:
            return
        if not num_kept:
            self._queue.withdraw(node)
        lost = self.index.truncate(node, num_kept)
        for group in (*self.full, *self.taps):
            pages = lost[group]
            if pages:
                present = pages if group in self.full else [page for page in pages if page != NULL_PAGE]
                self.arena.give_back(self.token_pools[group], present)

    def _cut_after_last_checkpoint(self, node: Node) -> None:
        """Without full attention, blocks after the last checkpoint have nothing to offer."""
        last = max((c.position // self.layout.block_tokens for c in node.checkpoints), default=node.start)
        if last < node.end:
            self._free_blocks(node, max(0, last - node.start))

    # --- eviction -----------------------------------------------------------------------------------------------------

    def offer_again(self, item: Node | Checkpoint) -> None:
        """Something that could not be evicted meanwhile, or was used."""
        self._queue.offer(item)

    def _offer_leaf(self, node: Node) -> None:
        if not self.needs_checkpoints:
            self.history.kept(node)
        elif self._num_needed(node) < node.num_blocks:
            self._queue.offer_bare(node)

    def _num_needed(self, node: Node) -> int:
        """How many blocks of a leaf its checkpoints need."""
        if not self.needs_checkpoints or not node.checkpoints:
            return 0
        return max(0, node.checkpoints[-1].position // self.layout.block_tokens - node.start)

    def check_queue(self, nodes: Iterable[Node]) -> None:
        """What may be evicted is in the queue."""
        alive = [node for node in nodes if not node.dead]
        leaves = [node for node in alive if node.parent is not None and not node.refs and not node.children]
        candidates: list[Node | Checkpoint] = [node for node in leaves if self._num_needed(node) < node.num_blocks]
        candidates += [checkpoint for node in alive for checkpoint in node.checkpoints if not checkpoint.holds]
        self._queue.check_integrity(candidates)

    def _evict_least(self, needs: Needs) -> bool:
        """Evict the item of least value, or as much of its end as is needed; False if nothing may go."""
        popped = self._queue.pop(self.history.clock)
        if popped is None:
            return False
        item, rating = popped
        self.history.evicted(item, rating)
        if isinstance(item, Checkpoint):
            self._evict_checkpoint(item)
        else:
            self._evict_blocks(item, needs)
        return True

    def _evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        node = checkpoint.node
        assert node is not None
        before = node.checkpoint_before(checkpoint)
        self.drop_checkpoint(checkpoint)
        self.stats.checkpoints_evicted += 1
        if before is not None and before.rating is not None and not is_superseded(before):
            self.history.deepest_again(before)
        if self.needs_checkpoints and not node.refs and not node.children:
            self.tidy(node)

    def _evict_blocks(self, node: Node, needs: Needs) -> None:
        """A slab's worth, or what the needs ask of the same pools if that is more."""
        wanted = max(
            max(self.token_pools[group].pages_per_slab, needs.get(self.token_pools[group], 0)) for group in self.full
        )
        kept = max(self._num_needed(node), node.num_blocks - wanted)
        self.stats.blocks_evicted += node.num_blocks - kept
        parent, last_used = node.parent, node.last_used
        self._free_blocks(node, kept)
        if kept > self._num_needed(node):
            if self.needs_checkpoints:
                self._queue.offer_bare(node)
            else:
                self._queue.offer(node)
        elif not kept and parent is not None:
            parent.last_used = max(parent.last_used, last_used)
            self.tidy(parent)


def _runs_upwards(leaf: Node, group: int, first: int, last: int) -> Iterator[tuple[Node, Pages, int, int]]:
    """Blocks [first, last) of the path to `leaf`, node by node from its end: the node's pages, and which of them."""
    node = leaf
    while last > first:
        node = node.at_block(last - 1)
        pages = node.pages[group]
        assert pages is not None
        low = max(first, node.start)
        yield node, pages, low - node.start, last - node.start
        last = low


def _relocate(tables: list[Pages | None], groups: Sequence[int], moved: dict[int, int]) -> None:
    for group in groups:
        pages = tables[group]
        if pages is not None:
            pages[:] = make_pages(moved.get(page, page) for page in pages)


def _relocate_states(states: Sequence[State | None], groups: Sequence[int], moved: dict[int, int]) -> None:
    for group in groups:
        state = states[group]
        if state is not None:
            state.pages = tuple(moved.get(page, page) for page in state.pages)
