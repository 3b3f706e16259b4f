"""Placement of leases in the index: attach, detach, go back and fork. Steps are in `step_begin` and `step_end`."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.arena.pages import NULL_PAGE, make_pages
from hybridkv.cache.index.leaders import Leaders
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.resume import Resume, ResumeRule
from hybridkv.cache.index.tree import Checkpoint, Node, PathNode, null_pages
from hybridkv.cache.retention.partings import Parting
from hybridkv.cache.retention.policy import KIND_NAMES, Kind
from hybridkv.cache.steps.footprint import Needs
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.lease_pages import LeasePages
from hybridkv.cache.steps.running import Running
from hybridkv.cache.tokens import TOKEN_BYTES


class Placement:
    """Leases on the paths of one prefix cache."""

    def __init__(self, prefixes: PrefixCache, running: Running, leaders: Leaders) -> None:
        layout = prefixes.groups.layout
        self.prefixes = prefixes
        self.running = running
        self.leaders = leaders
        self.groups = prefixes.groups
        self.stats = prefixes.stats
        self.rule = ResumeRule(layout)
        self.block_tokens = layout.block_tokens
        self.block_bytes = prefixes.index.block_bytes
        self.state_groups = layout.state_groups
        self._next_id = 0

    def new_lease(self, root_key: bytes, tokens: bytes | bytearray, taps: Sequence[int]) -> Lease:
        lease = Lease(self._next_id, root_key, bytearray(tokens), taps)
        self._next_id += 1
        return lease

    # --- attach and detach --------------------------------------------------------------------------------------------

    def find(
        self, key: bytes, tokens: bytes | bytearray, limit: int, taps: Sequence[int]
    ) -> tuple[list[PathNode], Resume]:
        path = self.prefixes.index.walk(key, tokens, limit // self.block_tokens)
        return path, self.rule.find(path, tokens, limit, taps)

    def learn_parting(self, lease: Lease, parting: Parting | None) -> tuple[int, ...]:
        """Learn where a prompt leaves an earlier one. Returns likely places of its own, the most valuable first:
        positions after its resume position at which later prompts will probably leave it."""
        partings, opening = self.prefixes.history.partings, lease.root_key + lease.tokens[: self.block_bytes]
        partings.begun(opening)
        if parting is not None:
            partings.parted(opening, parting)
        found = [place.position(lease.prompt_tokens) for place in partings.places(opening)]
        return tuple(position for position in found if lease.computed < position < lease.prompt_tokens)

    def attach(self, lease: Lease, path: Sequence[PathNode], resume: Resume) -> None:
        """Put the lease at the position of `resume`. Allocates no pages: the first `extend` copies a tail."""
        groups, prefixes, position = self.groups, self.prefixes, resume.position
        prefixes.history.tick()
        block = position // self.block_tokens
        leaf = self._node_ending_at(lease, path, block)
        leaf.refs += 1
        nodes = list(leaf.path())
        nodes.reverse()
        lease.leaf, lease.computed = leaf, position
        pages = lease.pages
        pages.tables = [None] * len(groups.token_pools)
        for group in (*groups.full, *lease.taps):
            table = make_pages()
            for node in nodes:
                run = node.pages[group]
                if run is not None:
                    table += run
            pages.tables[group] = table
        pages.local_first = [0] * len(groups.token_pools)
        for group in groups.local:
            first = groups.first_visible_block(group, position)
            pages.local_first[group] = first
            pages.tables[group] = null_pages(first) + groups.hold_local(leaf, group, first, block)
        self._name_tables(pages, position)
        pages.states = [None] * len(self.state_groups)
        if resume.checkpoint is not None:
            self._attach_checkpoint(lease, resume.checkpoint)
        if not prefixes.needs_checkpoints:
            prefixes.history.continued(lease.lineage, leaf, position)
        else:
            first = block if resume.checkpoint is not None else self._last_kept_block(leaf)
            if resume.matched_tokens > first * self.block_tokens:
                self._recall_matched(lease, path, first, resume.matched_tokens // self.block_tokens)
        if lease.taps:
            prefixes.index.touch_taps(leaf)
        self.running.leases[lease.id] = lease
        self.leaders.announce(lease)

    def _attach_checkpoint(self, lease: Lease, checkpoint: Checkpoint) -> None:
        self.stats.checkpoints_hit += 1
        self.stats.hit_by_kind[KIND_NAMES[checkpoint.kind]] += 1
        if self.prefixes.needs_checkpoints:
            self.prefixes.history.used(lease.lineage, checkpoint)
        if checkpoint.rating is None:  # else it keeps its lane: a deeper one will supersede it soon
            self.prefixes.queue.offer(checkpoint)
        pages = lease.pages
        for group, state in enumerate(checkpoint.states):
            assert state is not None
            state.refs += 1
            pages.states[group] = state
        pages.slabs |= self.groups.state_slabs(checkpoint.states)
        if checkpoint.tail_tokens or lease.is_pin:
            pages.tail = checkpoint
            checkpoint.holds += 1

    def _last_kept_block(self, leaf: Node) -> int:
        """Number of blocks up to the last checkpoint on the path to `leaf`."""
        position = next((node.checkpoints[-1].position for node in leaf.path() if node.checkpoints), 0)
        return position // self.block_tokens

    def _recall_matched(self, lease: Lease, path: Sequence[PathNode], first: int, last: int) -> None:
        """Look up blocks [first, last), which matched without a usable checkpoint, in the eviction log.

        Idle windows may supply some of them, as if nothing had been evicted.
        """
        for node, _ in reversed(path):
            if node.parent is not None and node.start < last:
                self.prefixes.history.recall(lease.lineage, node.keys[max(0, first - node.start) : last - node.start])

    def _name_tables(self, pages: LeasePages, position: int) -> None:
        pages.named_tables = {
            group.name: table
            for group, table in zip(self.groups.token_groups, pages.tables, strict=True)
            if table is not None
        }
        pages.slide_at = self.groups.next_slide(position)

    def _node_ending_at(self, lease: Lease, path: Sequence[PathNode], block: int) -> Node:
        if block == 0:
            return self.prefixes.index.root(lease.root_key)
        node = next(step.node for step in path if step.node.start < block <= step.node.start + step.num_blocks)
        if block == node.end:
            return node
        if not self.prefixes.needs_checkpoints:
            self.prefixes.history.used_in_part(lease.lineage, node, block - node.start)
        return self.prefixes.split(node, block - node.start)

    def let_go(self, lease: Lease) -> None:
        """Drop all pages and references of the lease. It keeps its tokens."""
        groups, pages, end = self.groups, lease.pages, lease.leaf.end
        self.leaders.withdraw(lease)
        for group, table in enumerate(pages.tables):
            if table is None:
                continue
            if group in groups.local:
                self.prefixes.drop_local(lease.leaf, group, pages.local_first[group], end)
            groups.free_pages(group, table[end:])
        groups.drop_states(pages.states)
        self.settle_tail(lease)
        lease.pages = LeasePages()
        self.prefixes.release_node(lease.leaf)

    def detach(self, lease: Lease) -> None:
        """End the lease."""
        self.let_go(lease)
        lease.released = True
        del self.running.leases[lease.id]

    def reattach(self, lease: Lease, limit: int) -> None:
        """Go back to the largest position <= `limit` that published blocks and checkpoints can supply."""
        before = lease.computed
        self.let_go(lease)
        path, resume = self.find(lease.root_key, lease.tokens, min(limit, lease.num_tokens - 1), lease.taps)
        self.attach(lease, path, resume)
        lease.cached_tokens = min(lease.cached_tokens, lease.computed)
        lease.plan.restart(lease.computed)
        stats = self.stats
        stats.rollbacks += 1
        stats.rolled_back_tokens += max(0, before - lease.computed)

    def trim(self, lease: Lease) -> None:
        """Free the blocks that have no computed tokens."""
        keep = -(-lease.computed // self.block_tokens)
        for group, table in enumerate(lease.pages.tables):
            if table is not None and len(table) > keep:
                self.groups.free_pages(group, table[keep:])
                del table[keep:]

    def drop_taps(self, lease: Lease) -> None:
        """Give up the tapped layers of a lease. What is published stays."""
        pages = lease.pages
        for group in lease.taps:
            table = pages.tables[group]
            assert table is not None
            self.groups.free_pages(group, table[lease.leaf.end :])
            pages.tables[group] = None
            del pages.named_tables[self.groups.token_groups[group].name]
        pages.copied = [(group, page) for group, page in pages.copied if group not in lease.taps]
        lease.taps = ()

    def settle_tail(self, lease: Lease) -> None:
        """Drop the lease's reference to the checkpoint it resumed from."""
        checkpoint, lease.pages.tail = lease.pages.tail, None
        if checkpoint is not None:
            checkpoint.holds -= 1
            if not checkpoint.holds and checkpoint.node is not None:
                self.prefixes.queue.offer(checkpoint)

    def start_lifetimes(self, lease: Lease, start: int, end: int) -> None:
        """Start the lifetimes of the checkpoints after `start` and up to `end` that the client gave one."""
        for position, lifetime_s in lease.plan.lifetimes.items():
            if start < position <= min(end, lease.leaf.end * self.block_tokens):
                node = lease.leaf.at_block(position // self.block_tokens - 1)
                checkpoint = node.checkpoint_at(position)
                if checkpoint is not None:
                    self.prefixes.queue.start_lifetime(checkpoint, lease.plan.client, lifetime_s)

    def keep_end(self, lease: Lease) -> None:
        """Keep a checkpoint at the lease's position, with its states and its partial block."""
        prefixes, pages, position = self.prefixes, lease.pages, lease.computed
        block, begun = divmod(position, self.block_tokens)
        needless = not begun and not prefixes.needs_checkpoints
        if not position or needless or pages.tail is not None or lease.leaf.dead:
            return
        tail_tokens, tail_pages = b"", None
        if begun:
            tail_tokens = bytes(lease.tokens[block * self.block_bytes : position * TOKEN_BYTES])
            tail_pages = [NULL_PAGE if table is None else table.pop(block) for table in pages.tables]
        checkpoint = Checkpoint(position, pages.states, Kind.END, tail_tokens, tail_pages)
        pages.states = [None] * len(self.state_groups)
        prefixes.add_checkpoint(lease.leaf, lease.lineage, checkpoint, has_local=True)
        if checkpoint.node is not None:
            checkpoint.node.hold_slabs(pages.slabs)
            pages.local_first = [block] * len(pages.tables)  # the checkpoint has taken over these references

    def keep_begin(self, lease: Lease) -> None:
        """Keep a checkpoint where a lease without states has begun: it costs no memory, for the lease has its pages."""
        position = lease.computed
        self.prefixes.add_checkpoint(lease.leaf, lease.lineage, Checkpoint(position, [], lease.plan.wanted[position]))

    def needs(
        self, lease: Lease, num_blocks: int, fresh: Sequence[bool], num_kept: int, unseen: Sequence[int] = ()
    ) -> Needs:
        """Pages that a step needs, by pool. `unseen`: by token group, number of blocks that need no page."""
        needs: Needs = {}
        if num_blocks:
            for index, (pool, table) in enumerate(zip(self.groups.token_pools, lease.pages.tables, strict=True)):
                if table is not None:
                    needs[pool] = needs.get(pool, 0) + num_blocks - (unseen[index] if unseen else 0)
        for pool, group, is_fresh in zip(self.groups.state_pools, self.state_groups, fresh, strict=True):
            if is_fresh or num_kept:
                needs[pool] = needs.get(pool, 0) + group.pages_per_state * (is_fresh + num_kept)
        return needs

    # --- forks --------------------------------------------------------------------------------------------------------

    def begun_block(self, lease: Lease) -> int | None:
        """The partial block (some of its tokens are computed), if there is one with pages."""
        block, begun = divmod(lease.computed, self.block_tokens)
        return block if begun and lease.pages.tail is None and self.groups.token_pools else None

    def fork_needs(self, lease: Lease, count: int) -> Needs:
        num_blocks = 0 if self.begun_block(lease) is None else count
        return self.needs(lease, num_blocks, [False] * len(self.state_groups), 0)

    def fork(self, lease: Lease) -> Lease:
        """Make another lease at the same position. The caller has made room for a copy of the partial block."""
        groups, begun, end = self.groups, self.begun_block(lease), lease.leaf.end
        twin = self.new_lease(lease.root_key, lease.tokens, lease.taps)
        twin.prompt_tokens, twin.cached_tokens = lease.prompt_tokens, lease.cached_tokens
        twin.leaf, twin.computed = lease.leaf, lease.computed
        twin.leaf.refs += 1
        twin.plan, twin.lineage, pages = lease.plan.copy(), lease.lineage.fork(), twin.pages
        pages.local_first = list(lease.pages.local_first)
        pages.tables = [None if table is None else table[:end] for table in lease.pages.tables]
        self._name_tables(pages, twin.computed)
        for group in groups.local:
            groups.hold_local(twin.leaf, group, pages.local_first[group], end)
        pages.states = list(lease.pages.states)
        for state in pages.states:
            if state is not None:
                state.refs += 1
        pages.slabs = groups.state_slabs(pages.states)
        pages.tail = lease.pages.tail
        if pages.tail is not None:
            pages.tail.holds += 1
        pages.copied = list(lease.pages.copied)
        if begun is not None:
            self._copy_begun_block(lease.pages, pages, begun)
        self.running.leases[twin.id] = twin
        return twin

    def _copy_begun_block(self, pages: LeasePages, twin: LeasePages, block: int) -> None:
        arena = self.groups.arena
        for group, (mine, theirs) in enumerate(zip(pages.tables, twin.tables, strict=True)):
            if mine is not None and theirs is not None:
                pool = self.groups.token_pools[group]
                (page,) = arena.take(pool, 1, twin.slabs)
                arena.copy(pool, mine[block], page)
                theirs.append(page)
                twin.copied.append((group, mine[block]))
                twin.slabs.add(pool.slab_of(mine[block]))
