"""How a lease takes its place in the index, grows, publishes and leaves: the mechanics behind the verbs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridkv.cache.arena import NULL_PAGE, Pages, make_pages
from hybridkv.cache.index import Checkpoint, Node, State, Step, common_blocks, null_pages
from hybridkv.cache.keeper import Keeper, Needs
from hybridkv.cache.lease import InFlight, Kept, Lease, NoRoom, Segment
from hybridkv.cache.resume import Resume, ResumeRule


class Leasing:
    """Leases over one keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.rule = ResumeRule(keeper.layout)
        self.block_tokens = keeper.layout.block_tokens
        self.block_bytes = keeper.index.block_bytes
        self.state_groups = keeper.layout.state_groups
        self._local_groups = [keeper.layout.token_groups[group] for group in keeper.local]
        self._next_id = 0

    def new_lease(self, root_key: bytes, tokens: bytes | bytearray, taps: Sequence[int]) -> Lease:
        lease = Lease(self._next_id, root_key, bytearray(tokens), taps)
        self._next_id += 1
        return lease

    # --- coming and going ---------------------------------------------------------------------------------------------

    def find(self, key: bytes, tokens: bytes | bytearray, limit: int, taps: Sequence[int]) -> tuple[list[Step], Resume]:
        path = self.keeper.index.walk(key, tokens, limit // self.block_tokens)
        return path, self.rule.find(path, tokens, limit, taps)

    def attach(self, lease: Lease, path: Sequence[Step], resume: Resume) -> None:
        """Stand at the position of `resume`. Takes no pages: a tail is copied when the lease first extends."""
        keeper, position = self.keeper, resume.position
        keeper.clock += 1
        block = position // self.block_tokens
        leaf = self._node_ending_at(lease.root_key, path, block)
        leaf.refs += 1
        leaf.num_hits += 1
        nodes = list(leaf.path())
        nodes.reverse()
        lease.leaf, lease.computed = leaf, position
        lease.tables = [None] * len(keeper.token_pools)
        for group in (*keeper.full, *lease.taps):
            table = make_pages()
            for node in nodes:
                pages = node.pages[group]
                if pages is not None:
                    table += pages
            lease.tables[group] = table
        lease.local_first = [0] * len(keeper.token_pools)
        for group in keeper.local:
            first = keeper.first_visible_block(group, position)
            lease.local_first[group] = first
            lease.tables[group] = null_pages(first) + keeper.hold_local(leaf, group, first, block)
        self._name_tables(lease)
        lease.states = [None] * len(self.state_groups)
        if resume.checkpoint is not None:
            self._attach_checkpoint(lease, resume.checkpoint)
        keeper.leases[lease.id] = lease
        lease.announce(self.block_bytes)

    def _attach_checkpoint(self, lease: Lease, checkpoint: Checkpoint) -> None:
        checkpoint.num_hits += 1
        checkpoint.last_used = self.keeper.clock
        self.keeper.stats.checkpoints_hit += 1
        self.keeper.offer(checkpoint)
        for group, state in enumerate(checkpoint.states):
            assert state is not None
            state.refs += 1
            lease.states[group] = state
        lease.slabs |= self.keeper.state_slabs(checkpoint.states)
        if checkpoint.tail_tokens:
            lease.tail = checkpoint
            checkpoint.holds += 1

    def _name_tables(self, lease: Lease) -> None:
        groups = self.keeper.layout.token_groups
        lease.named_tables = {
            group.name: table for group, table in zip(groups, lease.tables, strict=True) if table is not None
        }
        lease.slide_at = self._next_slide(lease.computed)

    def _next_slide(self, position: int) -> float:
        return min((group.next_slide(position, self.block_tokens) for group in self._local_groups), default=math.inf)

    def _node_ending_at(self, key: bytes, path: Sequence[Step], block: int) -> Node:
        if block == 0:
            return self.keeper.index.root(key)
        node = next(step.node for step in path if step.node.start < block <= step.node.start + step.num_blocks)
        return node if block == node.end else self.keeper.index.split(node, block - node.start)

    def let_go(self, lease: Lease) -> None:
        """Give back everything the lease holds; it keeps its tokens."""
        keeper, end = self.keeper, lease.leaf.end
        lease.withdraw()
        for group, table in enumerate(lease.tables):
            if table is None:
                continue
            if group in keeper.local:
                keeper.drop_local(lease.leaf, group, lease.local_first[group], end)
            keeper.arena.give_back(keeper.token_pools[group], table[end:])
        lease.tables, lease.named_tables = [], {}
        keeper.drop_states(lease.states)
        lease.states = []
        lease.slabs = set()
        self.settle_tail(lease)
        keeper.release_node(lease.leaf)

    def detach(self, lease: Lease) -> None:
        """The lease ends."""
        self.let_go(lease)
        lease.released = True
        del self.keeper.leases[lease.id]

    def reattach(self, lease: Lease, limit: int) -> None:
        """Go back to the largest position <= `limit` that what is published can supply."""
        before = lease.computed
        self.let_go(lease)
        lease.poisoned = None
        path, resume = self.find(lease.root_key, lease.tokens, min(limit, lease.num_tokens - 1), lease.taps)
        self.attach(lease, path, resume)
        stats = self.keeper.stats
        stats.rollbacks += 1
        stats.rolled_back_tokens += max(0, before - lease.computed)

    def settle_tail(self, lease: Lease) -> None:
        """The lease no longer counts on the checkpoint it came from."""
        checkpoint, lease.tail = lease.tail, None
        if checkpoint is not None:
            checkpoint.holds -= 1
            if not checkpoint.holds and checkpoint.node is not None:
                self.keeper.offer(checkpoint)

    # --- a step -------------------------------------------------------------------------------------------------------

    def num_table_blocks(self, lease: Lease) -> int:
        """Blocks the lease has pages for, in every group it uses."""
        for table in lease.named_tables.values():
            return len(table)
        return 0

    def room_for(
        self, lease: Lease, num_blocks: int, fresh: Sequence[bool], kept: list[int], end: int
    ) -> list[int] | NoRoom:
        """Make room for a step. Checkpoints inside it are optional: returns those there is room for."""
        no_room = self.keeper.make_room(self._needs(lease, num_blocks, fresh, sum(p < end for p in kept)))
        if no_room is None:
            return kept
        at_end = [p for p in kept if p == end]
        if not self.state_groups or len(at_end) == len(kept):
            return no_room
        no_room = self.keeper.make_room(self._needs(lease, num_blocks, fresh, 0))
        if no_room is None:
            self.keeper.stats.checkpoints_skipped += len(kept) - len(at_end)
            return at_end
        return no_room

    def _needs(self, lease: Lease, num_blocks: int, fresh: Sequence[bool], num_kept: int) -> Needs:
        needs: Needs = {}
        if num_blocks:
            for pool, table in zip(self.keeper.token_pools, lease.tables, strict=True):
                if table is not None:
                    needs[pool] = needs.get(pool, 0) + num_blocks
        for pool, group, is_fresh in zip(self.keeper.state_pools, self.state_groups, fresh, strict=True):
            if is_fresh or num_kept:
                needs[pool] = needs.get(pool, 0) + group.pages_per_state * (is_fresh + num_kept)
        return needs

    def add_blocks(self, lease: Lease, num_blocks: int) -> None:
        keeper = self.keeper
        for group, table in enumerate(lease.tables):
            if table is None:
                continue
            pages = keeper.arena.take(keeper.token_pools[group], num_blocks, lease.slabs)
            table += pages
            if lease.tail is not None:
                keeper.arena.copy(keeper.token_pools[group], lease.tail.tail_pages[group], pages[0])

    def add_segments(
        self, lease: Lease, start: int, end: int, kept: Sequence[int], fresh: Sequence[bool]
    ) -> list[list[Segment]]:
        """Send the step off: a chain of states for each group, one link for each position that is kept."""
        if not self.state_groups:
            lease.step = InFlight(start, end, [], False, [Kept(position, []) for position in kept])
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

    def decode_segments(self, lease: Lease, start: int, end: int) -> dict[str, list[Segment]]:
        """The common case of `add_segments`: every state in place, nothing kept."""
        lease.step = InFlight(start, end, [None] * len(self.state_groups), bool(self.state_groups), [])
        segments = {}
        for group, state in zip(self.state_groups, lease.states, strict=True):
            assert state is not None
            pages = tuple(state.pages)
            segments[group.name] = [Segment(start, end, pages, pages)]
        return segments

    def _chain(self, lease: Lease, group: int, length: int, fresh: bool) -> list[State | None]:
        """The state before the step, and the one after each of `length` segments; the first in place unless `fresh`."""
        state = lease.states[group]
        keeper, pages = self.keeper, self.state_groups[group].pages_per_state
        chain: list[State | None] = [state] if fresh else [state, state]
        while len(chain) <= length:
            chain.append(State(list(keeper.arena.take(keeper.state_pools[group], pages, lease.slabs))))
        return chain

    def _state_pages(self, group: int, state: State | None) -> tuple[int, ...]:
        return (NULL_PAGE,) * self.state_groups[group].pages_per_state if state is None else tuple(state.pages)

    def accept(self, lease: Lease, step: InFlight, target: int) -> None:
        """The step is good up to `target`."""
        if target == step.end:
            self.keeper.drop_states(step.old_states)
        else:
            stand = self._step_back(lease, step, target)
            if stand is None:
                self.drop_kept(step.kept)
                self.reattach(lease, target)
                return
            target = stand
        lease.computed = target
        kept_positions = [kept.position for kept in step.kept if kept.position <= target]
        if target >= lease.slide_at:  # before publishing: most of a long step's blocks are out of sight already
            self._slide(lease, min(kept_positions, default=target))
        if target // self.block_tokens > lease.leaf.end:
            self.publish(lease)
        for kept in step.kept:
            if kept.position <= target:
                self.keeper.add_checkpoint(lease.leaf, Checkpoint(kept.position, kept.states))
            else:
                self.keeper.drop_states(kept.states)
        if lease.keeps and lease.keeps[0] <= target:
            lease.keeps = [position for position in lease.keeps if position > target]
        if kept_positions and target >= lease.slide_at:
            self._slide(lease, target)

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
        if lease.poisoned is not None:
            self.reattach(lease, min(lease.poisoned, step.start))
        elif step.in_place:
            self.reattach(lease, step.start)

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
            tokens = lease.tokens[first * self.block_bytes : end * self.block_bytes]
            pages = [table if table is None else table[first:end] for table in lease.tables]
            node = index.append(leaf, tokens, pages, may_grow=leaf.refs == 1)
            node.hold_slabs(lease.slabs)
            keeper.stats.blocks_published += end - first
            if keeper.events.enabled and not node.dead:
                keeper.events.stored(node.keys[first - end :])
            self._move_to(lease, node)
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
                pool.more_holds.update(b for a, b in zip(mine, theirs, strict=True) if a != NULL_PAGE != b)
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
                    keeper.arena.give_back(keeper.token_pools[group], table[max(old, published) : first])
                table[old:first] = null_pages(first - old)
                lease.local_first[group] = first
        lease.slide_at = self._next_slide(position)

    def _own_slabs_only(self, lease: Lease) -> None:
        """After publishing, only the block begun and the states are the lease's own."""
        end = lease.leaf.end
        lease.slabs = self.keeper.state_slabs(lease.states)
        for pool, table in zip(self.keeper.token_pools, lease.tables, strict=True):
            if table is not None:
                lease.slabs.update(pool.slabs[page // pool.pages_per_slab] for page in table[end:])

    def keep_end(self, lease: Lease) -> None:
        """Make a checkpoint of where the lease stands, with its states and the block begun."""
        keeper, position = self.keeper, lease.computed
        block, begun = divmod(position, self.block_tokens)
        needless = not begun and not self.state_groups and not keeper.local
        if not position or needless or lease.tail is not None or lease.leaf.dead or lease.poisoned is not None:
            return
        tail_tokens, tail_pages = b"", None
        if begun:
            tail_tokens = bytes(lease.tokens[block * self.block_bytes : position * 4])
            tail_pages = [NULL_PAGE if table is None else table.pop(block) for table in lease.tables]
        checkpoint = Checkpoint(position, lease.states, tail_tokens, tail_pages)
        lease.states = [None] * len(self.state_groups)
        keeper.add_checkpoint(lease.leaf, checkpoint, has_local=True)
        if checkpoint.node is not None:
            checkpoint.node.hold_slabs(lease.slabs)
            lease.local_first = [block] * len(lease.tables)  # the checkpoint has taken over what the lease saw

    # --- forks --------------------------------------------------------------------------------------------------------

    def begun_block(self, lease: Lease) -> int | None:
        """The block that has some of its tokens computed, if there is one with pages."""
        block, begun = divmod(lease.computed, self.block_tokens)
        return block if begun and lease.tail is None and self.keeper.token_pools else None

    def fork_needs(self, lease: Lease, count: int) -> Needs:
        num_blocks = 0 if self.begun_block(lease) is None else count
        return self._needs(lease, num_blocks, [False] * len(self.state_groups), 0)

    def fork(self, lease: Lease) -> Lease:
        """Another lease at the same place; room for a block begun has been made."""
        keeper, begun, end = self.keeper, self.begun_block(lease), lease.leaf.end
        twin = self.new_lease(lease.root_key, lease.tokens, lease.taps)
        twin.prompt_tokens, twin.cached_tokens = lease.prompt_tokens, lease.cached_tokens
        twin.leaf, twin.computed, twin.local_first = lease.leaf, lease.computed, list(lease.local_first)
        twin.leaf.refs += 1
        twin.keeps = list(lease.keeps)
        twin.tables = [table if table is None else table[:end] for table in lease.tables]
        self._name_tables(twin)
        for group in keeper.local:
            keeper.hold_local(twin.leaf, group, twin.local_first[group], end)
        twin.states = list(lease.states)
        for state in twin.states:
            if state is not None:
                state.refs += 1
        twin.slabs = keeper.state_slabs(twin.states)
        twin.tail = lease.tail
        if twin.tail is not None:
            twin.tail.holds += 1
        if begun is not None:
            self._copy_begun_block(lease, twin, begun)
        keeper.leases[twin.id] = twin
        return twin

    def _copy_begun_block(self, lease: Lease, twin: Lease, block: int) -> None:
        arena = self.keeper.arena
        for group, (mine, theirs) in enumerate(zip(lease.tables, twin.tables, strict=True)):
            if mine is not None and theirs is not None:
                pool = self.keeper.token_pools[group]
                (page,) = arena.take(pool, 1, twin.slabs)
                arena.copy(pool, mine[block], page)
                theirs.append(page)


def first_index(pages: Pages, wanted: set[int]) -> int | None:
    """Where the first of the wanted pages is."""
    return next((i for i, page in enumerate(pages) if page in wanted), None)
