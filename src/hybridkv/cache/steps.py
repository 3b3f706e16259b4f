"""A step of a lease: making room and sending it off, taking it back, and publishing what it computed."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.arena import NULL_PAGE, make_pages
from hybridkv.cache.index import Checkpoint, Node, State, common_blocks, null_pages
from hybridkv.cache.lease import InFlight, Kept, Lease, NoRoom, Segment
from hybridkv.cache.leasing import Leasing

_EVICTIONS_FOR_CHECKPOINTS = 8
"""What may go for the sake of new checkpoints inside a step; they must not empty the cache."""


class Steps:
    """Steps of the leases of one `Leasing`."""

    def __init__(self, leasing: Leasing) -> None:
        self.leasing = leasing
        self.keeper = leasing.keeper
        self.block_tokens = leasing.block_tokens
        self.block_bytes = leasing.block_bytes
        self.state_groups = leasing.state_groups

    # --- sending it off -----------------------------------------------------------------------------------------------

    def num_table_blocks(self, lease: Lease) -> int:
        """Blocks the lease has pages for, in every group it uses."""
        for table in lease.named_tables.values():
            return len(table)
        return 0

    def fresh_states(self, lease: Lease, may_cut: bool) -> list[bool]:
        """By state group: whether the step must write to a new page, since others count on the present one."""
        return [state is None or state.refs > 1 or may_cut for state in lease.states]

    def unseen_blocks(self, lease: Lease, num_blocks: int, position: int) -> list[int]:
        """By token group: how many of the next blocks nobody sees who goes on from `position`."""
        first, unseen = self.num_table_blocks(lease), [0] * len(lease.tables)
        for group in self.keeper.local:
            unseen[group] = min(num_blocks, max(0, self.keeper.first_visible_block(group, position) - first))
        return unseen

    def room_for(
        self, lease: Lease, num_blocks: int, may_cut: bool, kept: list[int], end: int, unseen: Sequence[int] = ()
    ) -> list[int] | NoRoom:
        """Make room for a step. Checkpoints inside it are optional: returns those there is room for."""
        keeper = self.keeper
        fresh, needs = self.fresh_states(lease, may_cut), self.leasing.needs
        num_inside = sum(position < end for position in kept) if self.state_groups else 0
        most = _EVICTIONS_FOR_CHECKPOINTS
        if num_inside and keeper.make_room(needs(lease, num_blocks, fresh, num_inside, unseen), most) is None:
            return kept
        while (no_room := keeper.make_room(needs(lease, num_blocks, fresh, 0, unseen))) is not None:
            before, fresh = fresh, self.fresh_states(lease, may_cut)
            if fresh == before:  # else a checkpoint of our own went, and a state can be written in place after all
                return no_room
        if not num_inside:
            return kept
        keeper.make_room(needs(lease, num_blocks, fresh, num_inside, unseen), most)
        num_fit = num_inside
        while not keeper.arena.fits(needs(lease, num_blocks, fresh, num_fit, unseen)):
            num_fit -= 1
        keeper.stats.checkpoints_skipped += num_inside - num_fit
        return kept[num_inside - num_fit :]  # the last ones: most is computed before them

    def add_blocks(self, lease: Lease, num_blocks: int, unseen: Sequence[int] = ()) -> None:
        keeper = self.keeper
        for group, table in enumerate(lease.tables):
            if table is None:
                continue
            skipped = unseen[group] if unseen else 0
            pages = keeper.arena.take(keeper.token_pools[group], num_blocks - skipped, lease.slabs)
            table += null_pages(skipped) + pages if skipped else pages
            if lease.tail is not None and not skipped:
                self._copy_tail(lease, group, lease.tail.tail_pages[group], pages[0])

    def _copy_tail(self, lease: Lease, group: int, tail_page: int, page: int) -> None:
        pool = self.keeper.token_pools[group]
        self.keeper.arena.copy(pool, tail_page, page)
        lease.copied.append((group, tail_page))
        lease.slabs.add(pool.slab_of(tail_page))

    def add_segments(
        self, lease: Lease, start: int, end: int, num_known: int, kept: Sequence[int], may_cut: bool
    ) -> list[list[Segment]]:
        """Send the step off: a chain of states for each group, one link for each position that is kept."""
        fresh = self.fresh_states(lease, may_cut)
        if not self.state_groups:
            lease.step = InFlight(start, end, num_known, [], False, [Kept(position, []) for position in kept])
            return []
        bounds = [p for p in kept if p < end]
        bounds.append(end)
        segments, chains = [], []
        for group, is_fresh in enumerate(fresh):
            chain = self._chain(lease, group, len(bounds), is_fresh)
            chains.append(chain)
            segments.append(self._segments(group, start, bounds, chain))
        # Each state of a chain has one hold: the last one's is the lease's, all others go to who keeps them.
        lease.step = InFlight(
            start,
            end,
            num_known,
            old_states=[chain[0] if is_fresh else None for chain, is_fresh in zip(chains, fresh, strict=True)],
            in_place=False in fresh,
            kept=[Kept(p, [chain[i] for chain in chains]) for i, p in enumerate(bounds, 1) if p in kept],
        )
        lease.states = [chain[-1] for chain in chains]
        if end in kept:
            for state in lease.states:
                assert state is not None
                state.refs += 1
        return segments

    def _segments(self, group: int, start: int, bounds: Sequence[int], chain: Sequence[State | None]) -> list[Segment]:
        segments, src = [], self._state_pages(group, chain[0])
        for end, state in zip(bounds, chain[1:], strict=True):
            dst = self._state_pages(group, state)
            segments.append(Segment(start, end, src, dst))
            start, src = end, dst
        return segments

    def decode_segments(self, lease: Lease, start: int, end: int, num_known: int) -> dict[str, list[Segment]]:
        """The common case of `add_segments`: every state in place, nothing kept."""
        lease.step = InFlight(start, end, num_known, [None] * len(self.state_groups), bool(self.state_groups), [])
        segments = {}
        for group, state in zip(self.state_groups, lease.states, strict=True):
            assert state is not None
            segments[group.name] = [Segment(start, end, state.pages, state.pages)]
        return segments

    def _chain(self, lease: Lease, group: int, length: int, fresh: bool) -> list[State | None]:
        """The state before the step, and the one after each of `length` segments; the first in place unless `fresh`."""
        state = lease.states[group]
        keeper, size = self.keeper, self.state_groups[group].pages_per_state
        chain: list[State | None] = [state] if fresh else [state, state]
        count = size * (length + 1 - len(chain))
        pages = tuple(keeper.arena.take(keeper.state_pools[group], count, lease.slabs)) if count else ()
        for first in range(0, count, size):
            chain.append(State(pages[first : first + size]))
        return chain

    def _state_pages(self, group: int, state: State | None) -> tuple[int, ...]:
        return (NULL_PAGE,) * self.state_groups[group].pages_per_state if state is None else state.pages

    # --- taking it back -----------------------------------------------------------------------------------------------

    def accept(self, lease: Lease, step: InFlight, target: int) -> None:
        """The step is good up to `target`."""
        loaded = step.loaded_to > step.start
        if loaded:
            lease.cached_tokens = min(target, step.loaded_to)
            self.keeper.stats.loaded_tokens += lease.cached_tokens - step.start
        if target == step.end:
            if step.old_states:
                self.keeper.drop_states(step.old_states)
        else:
            stand = self._step_back(lease, step, target)
            if stand is None:
                self.drop_kept(step.kept)
                self.leasing.reattach(lease, target)
                return
            target = stand
        lease.computed = target
        if lease.lessons or lease.resumed_from is not None:
            self.keeper.history.confirm(lease)
        kept_positions = [kept.position for kept in step.kept if kept.position <= target] if step.kept else []
        if target >= lease.slide_at:  # before publishing: most of a long step's blocks are out of sight already
            self._slide(lease, min(kept_positions, default=target))
        if target // self.block_tokens > lease.leaf.end:
            self.publish(lease)
        for kept in reversed(step.kept):  # the deepest first: it supersedes the others
            if kept.position <= target:
                self.keeper.add_checkpoint(lease, Checkpoint(kept.position, kept.states, lease.wanted[kept.position]))
            else:
                self.keeper.drop_states(kept.states)
        if lease.keeps and lease.keeps[0] <= target:
            lease.keeps = [position for position in lease.keeps if position > target]
        if kept_positions and target >= lease.slide_at:
            self._slide(lease, target)
        if loaded and target < step.loaded_to:  # what was loaded after it is wrong
            self._clear_own_blocks(lease)
            self.leasing.trim(lease)

    def _step_back(self, lease: Lease, step: InFlight, target: int) -> int | None:
        """Return to the last state at or before `target`, kept or from before the step, if one is left: to where?"""
        if not self.state_groups:
            return target
        self.keeper.drop_states(lease.states)
        kept = [k for k in step.kept if k.position <= target]
        if not kept and not step.in_place:
            lease.states = step.old_states
            return step.start
        self.keeper.drop_states(step.old_states)
        if not kept:
            lease.states = [None] * len(self.state_groups)
            return None
        lease.states = list(kept[-1].states)
        for state in lease.states:
            assert state is not None
            state.refs += 1
        return kept[-1].position

    def drop_kept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self.keeper.drop_states(one.states)

    def drop_step(self, lease: Lease, step: InFlight) -> None:
        """Forget a step of a lease that is about to end."""
        if step.loaded_to > step.start:
            self._clear_own_blocks(lease)
        self.drop_kept(step.kept)
        self.keeper.drop_states(step.old_states)

    def fail(self, lease: Lease, step: InFlight) -> None:
        """Nothing of the step can be used. States that were written in place are lost with it."""
        self.drop_kept(step.kept)
        self.keeper.drop_states(lease.states)
        lease.states = step.old_states
        if step.in_place:
            self.keeper.drop_states(lease.states)
            lease.states = [None] * len(self.state_groups)
        bad = lease.poisoned
        loaded = step.loaded_to > step.start
        if loaded:
            self._clear_own_blocks(lease)
        if loaded or step.in_place or (bad is not None and bad < step.start):
            self.leasing.reattach(lease, step.start if bad is None else min(bad, step.start))
        elif bad is not None:
            self.leasing.trim(lease)
        lease.poisoned = None

    def _clear_own_blocks(self, lease: Lease) -> None:
        """Whoever has the pages of a failed load next must not find what it left there.

        The block begun, if there is one, was loaded over too: the lease lets it go, and goes back.
        """
        first = lease.computed // self.block_tokens
        for pool, table in zip(self.keeper.token_pools, lease.tables, strict=True):
            for page in () if table is None else table[first:]:
                if page != NULL_PAGE:
                    self.keeper.arena.clear(pool, page)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, lease: Lease) -> None:
        """Move whole computed blocks into the index; where another request was faster, share its pages."""
        keeper, index, end = self.keeper, self.keeper.index, lease.computed // self.block_tokens
        leaf = lease.leaf
        lease.withdraw()
        while leaf.end < end and leaf.children:
            start = leaf.end * self.block_bytes
            child = leaf.children.get(bytes(lease.tokens[start : start + self.block_bytes]))
            if child is None:
                break
            most = min(child.num_blocks, end - leaf.end)
            same = common_blocks(child.tokens, lease.tokens, start, most, self.block_bytes)
            if same < child.num_blocks:
                child = index.split(child, same)
            self._share(lease, child)
            leaf = self._move_to(lease, child)
        if leaf.end < end:
            first = leaf.end
            pages = [None if table is None else table[first:end] for table in lease.tables]
            node = index.append(leaf, lease.tokens, end, pages, may_grow=leaf.refs == 1)
            node.hold_slabs(lease.slabs)
            keeper.stats.blocks_published += end - first
            keeper.history.recall(lease, node.keys[first - end :])
            if keeper.events.enabled and not node.dead:
                keeper.events.stored(node.keys[first - end :])
            self._move_to(lease, node)
            node.turn, node.new_tokens = lease.turn, end * self.block_tokens - lease.continued_from
        lease.copied = []
        self._own_slabs_only(lease)
        lease.announce(self.block_bytes)

    def _move_to(self, lease: Lease, node: Node) -> Node:
        old = lease.leaf
        if node is not old:
            node.refs += 1
            lease.leaf = node
            self.keeper.release_node(old)
        return node

    def _share(self, lease: Lease, node: Node) -> None:
        """Use the pages `node` has for blocks the lease computed too, and lend it those it lacks."""
        keeper, first, last = self.keeper, node.start, node.end
        keeper.stats.blocks_shared += last - first
        for group, table in enumerate(lease.tables):
            if table is None:
                continue
            pool, mine = keeper.token_pools[group], table[first:last]
            theirs = node.pages[group]
            if theirs is None:
                theirs = node.pages[group] = null_pages(last - first)
            if group in keeper.local:
                pool.add_holds(make_pages(b for a, b in zip(mine, theirs, strict=True) if a != NULL_PAGE != b))
            spare = make_pages(a for a, b in zip(mine, theirs, strict=True) if a != NULL_PAGE != b)
            keeper.arena.give_back(pool, spare)
            if len(spare) < len(mine):
                theirs[:] = make_pages(b or a for a, b in zip(mine, theirs, strict=True))
                node.hold_slabs(lease.slabs)
                if group in keeper.local:
                    theirs = make_pages(b if a else NULL_PAGE for a, b in zip(mine, theirs, strict=True))
            table[first:last] = theirs

    def _slide(self, lease: Lease, position: int) -> None:
        """Let go of the blocks that no token from `position` on sees."""
        keeper, published = self.keeper, lease.leaf.end
        for group in keeper.local:
            first, old = keeper.first_visible_block(group, position), lease.local_first[group]
            if first > old:
                table = lease.tables[group]
                assert table is not None
                keeper.drop_local(lease.leaf, group, old, min(first, published))
                if first > published:
                    keeper.give_back_blocks(group, table[max(old, published) : first])
                table[old:first] = null_pages(first - old)
                lease.local_first[group] = first
        lease.slide_at = self.leasing.next_slide(position)

    def _own_slabs_only(self, lease: Lease) -> None:
        """After publishing, only the block begun and the states are the lease's own."""
        end = lease.leaf.end
        lease.slabs = self.keeper.state_slabs(lease.states)
        for pool, table in zip(self.keeper.token_pools, lease.tables, strict=True):
            if table is not None:
                lease.slabs.update(pool.slab_of(page) for page in table[end:])
