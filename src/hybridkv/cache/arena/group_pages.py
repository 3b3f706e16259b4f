"""The pages of all groups: their pools, and reference counts of pages and states. Decides nothing about retention.

A page of a full group or a tap has one owner: a node, or a lease before the page is published. A page of a local group
has a reference count: the leases that see it and the checkpoints that need it. So has a state. Without references, a
page of a local group is idle: its node keeps it until its room is needed. With state groups it is freed at once,
because no request could resume from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hybridkv.cache.arena.operations import Operation
from hybridkv.cache.arena.pages import NULL_PAGE, Pages, make_pages
from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.arena.slabs import Arena
from hybridkv.cache.index.tree import Checkpoint, Node, State, null_pages
from hybridkv.cache.layout import CacheGroup, CacheLayout, Role
from hybridkv.sight import NEVER


class GroupPages:
    """The arena, by group. A group is given as its index in the layout."""

    def __init__(
        self, layout: CacheLayout, run_operations: Callable[[Sequence[Operation]], None] | None = None
    ) -> None:
        self.layout = layout
        self.token_groups = list(layout.token_groups)
        """In the order of all tables: those of the layout, then the taps that requests have used so far."""
        self.arena = Arena(layout.num_slabs, {group.pool_name: group.pages_per_slab for group in layout.groups})
        self.token_pools = [self.arena.pools[group.pool_name] for group in layout.token_groups]
        self.state_pools = [self.arena.pools[group.pool_name] for group in layout.state_groups]
        roles = [group.role for group in layout.token_groups]
        self.full = [i for i, role in enumerate(roles) if role is Role.FULL]
        self.local = [i for i, role in enumerate(roles) if role is Role.LOCAL]
        self.taps: list[int] = []
        for group in self.local:
            self.token_pools[group].share_pages(layout.num_slabs)
        self.keeps_idle = layout.keeps_idle_windows
        """Whether pages of local groups stay in their nodes without references."""
        self._block_tokens = layout.block_tokens
        self._sights = [group.sight for group in layout.token_groups]
        self._local_sights = [layout.token_groups[group].sight for group in self.local]
        self._run_operations = run_operations

    def add_tap(self, group: CacheGroup) -> int:
        """Append a tapped layer to the token groups. Returns its index."""
        index = len(self.token_groups)
        self.token_groups.append(group)
        self.token_pools.append(self.arena.pools[group.pool_name])
        self._sights.append(group.sight)
        self.taps.append(index)
        return index

    def run_operations(self) -> None:
        """Run the pending operations, if the memory layer is synchronous."""
        if self._run_operations is not None and (batch := self.arena.take_operations()) is not None:
            try:
                self._run_operations(batch.operations)
            except BaseException:
                self.arena.take_back(batch.id)
                raise
            self.arena.acknowledge(batch.id)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def first_visible_block(self, group: int, position: int) -> int:
        return self._sights[group].first_visible(position) // self._block_tokens

    def next_slide(self, position: int) -> int:
        """The first position at which some local group no longer sees a block that it sees at `position`."""
        return min((sight.next_slide(position, self._block_tokens) for sight in self._local_sights), default=NEVER)

    def hold_local(self, leaf: Node, group: int, first: int, last: int) -> Pages:
        """Add a reference to each page of blocks [first, last) of the path to `leaf`. Returns the pages."""
        held = make_pages()
        for _, pages, start, end in _runs_upwards(leaf, group, first, last):
            held = pages[start:end] + held
        self.token_pools[group].add_holds(held)
        return held

    def drop_local(self, leaf: Node, group: int, first: int, last: int) -> bool:
        """Drop a reference to each page of blocks [first, last) of the path to `leaf`. True if some became free.

        Free pages are removed from their node. Call it through `PrefixCache`, which updates the index version.
        """
        pool, is_changed = self.token_pools[group], False
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
            is_changed = True
            if not any(pages):
                node.pages[group] = None
        return is_changed

    def let_idle(self, leaf: Node, group: int, first: int, last: int) -> list[Node]:
        """Drop a reference to each page of blocks [first, last) of the path to `leaf`. Returns nodes with idle pages:
        those that have got some."""
        pool = self.token_pools[group]
        runs = _runs_upwards(leaf, group, first, last)
        return [node for node, pages, start, end in runs if pool.let_idle(pages[start:end])]

    def has_idle(self) -> bool:
        """Whether some page of a local group is idle."""
        return any(self.token_pools[group].num_idle for group in self.local)

    def free_idle(self, node: Node, group: int, most: int) -> int:
        """Free up to `most` idle pages of a node, from its end. Returns their number.

        Call it through `PrefixCache`, which updates the index version.
        """
        pages, pool = node.pages[group], self.token_pools[group]
        if not pages or not pool.num_idle:
            return 0
        freed = pool.take_idle(pages, most)
        self.arena.give_back(pool, freed)
        if freed and not any(pages):
            node.pages[group] = None
        return len(freed)

    def free_pages(self, group: int, pages: Pages) -> None:
        """Free pages that have no other holder. Null pages are skipped."""
        if NULL_PAGE in pages:
            pages = make_pages(page for page in pages if page != NULL_PAGE)
        self.arena.give_back(self.token_pools[group], pages)

    def free_tail(self, checkpoint: Checkpoint) -> None:
        for group, page in enumerate(checkpoint.tail_pages):
            if page != NULL_PAGE:
                self.arena.give_back(self.token_pools[group], [page])
        checkpoint.tail_pages = []

    # --- states -------------------------------------------------------------------------------------------------------

    def drop_states(self, states: Sequence[State | None]) -> None:
        """Drop a reference to each state, by group. Pages of a state without references are freed."""
        for group, state in enumerate(states):
            if state is not None:
                state.refs -= 1
                if state.refs == 0:
                    self.arena.give_back(self.state_pools[group], state.pages)

    def state_slabs(self, states: Sequence[State | None]) -> set[Slab]:
        slabs: set[Slab] = set()
        for group, state in enumerate(states):
            if state is not None:
                pool = self.state_pools[group]
                for page in state.pages:
                    slabs.add(pool.slab_of(page))
        return slabs


def _runs_upwards(leaf: Node, group: int, first: int, last: int) -> Iterator[tuple[Node, Pages, int, int]]:
    """Blocks [first, last) of the path to `leaf`, from its end upwards: node, its pages, and the range in them."""
    node = leaf
    while last > first:
        node = node.at_block(last - 1)
        pages = node.pages[group]
        assert pages is not None
        low = max(first, node.start)
        yield node, pages, low - node.start, last - node.start
        last = low
