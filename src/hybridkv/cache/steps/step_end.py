"""End of a step: accept or drop its results, and publish whole blocks and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.arena.pages import NULL_PAGE, make_pages
from hybridkv.cache.index.tree import Checkpoint, Node, common_blocks, null_pages
from hybridkv.cache.steps.lease import InFlight, Kept, Lease
from hybridkv.cache.steps.placement import Placement


class StepEnd:
    """Ends steps of the leases of one `Placement`."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.groups = placement.groups
        self.prefixes = placement.prefixes
        self.leaders = placement.leaders
        self.stats = placement.stats
        self.block_tokens = placement.block_tokens
        self.block_bytes = placement.block_bytes
        self.state_groups = placement.state_groups

    # --- accept, drop, fail -------------------------------------------------------------------------------------------

    def accept(self, lease: Lease, step: InFlight, target: int) -> None:
        """Accept the step's results up to `target`."""
        loaded = step.loaded_to > step.start
        if loaded:
            lease.cached_tokens = min(target, step.loaded_to)
            self.stats.loaded_tokens += lease.cached_tokens - step.start
        if target == step.end:
            if step.old_states:
                self.groups.drop_states(step.old_states)
        else:
            stand = self._step_back(lease, step, target)
            if stand is None:
                self.drop_kept(step.kept)
                self.placement.reattach(lease, target)
                return
            target = stand
        lease.computed = target
        lineage, pages = lease.lineage, lease.pages
        if lineage.lessons or lineage.resumed_from is not None:
            self.prefixes.history.confirm(lineage)
        kept_positions = self._checkpoint_positions(step.kept, target) if step.kept else []
        if loaded and target >= pages.slide_at:  # before publishing: blocks out of a load's windows have no pages
            self._slide(lease, step.loaded_to)
        if target // self.block_tokens > lease.leaf.end:
            self.publish(lease)
        for kept in reversed(step.kept):  # deepest first: it supersedes the others
            if kept.position in kept_positions:
                checkpoint = Checkpoint(kept.position, kept.states, lease.plan.wanted[kept.position])
                self.prefixes.add_checkpoint(lease.leaf, lineage, checkpoint)
            else:
                self.groups.drop_states(kept.states)
        if lease.plan.lifetimes:
            self.placement.start_lifetimes(lease, step.start, target)
        lease.plan.advance(target)
        if target >= pages.slide_at:
            self._slide(lease, target)
        if loaded and target <= step.loaded_to and target < step.end:  # the content after `target` is not valid
            self._clear_blocks(lease, -(-target // self.block_tokens))
            self.placement.trim(lease)

    def _checkpoint_positions(self, kept: Sequence[Kept], target: int) -> list[int]:
        """Positions of the step at which checkpoints are published: block boundaries up to `target`."""
        return [one.position for one in kept if one.position <= target and one.position % self.block_tokens == 0]

    def _step_back(self, lease: Lease, step: InFlight, target: int) -> int | None:
        """Go back to the last state at or before `target`, kept in the step or from before it.

        Returns its position; None if no such state is left.
        """
        if not self.state_groups:
            return target
        self.groups.drop_states(lease.pages.states)
        kept = [k for k in step.kept if k.position <= target]
        if not kept and not step.in_place:
            lease.pages.states = step.old_states
            return step.start
        self.groups.drop_states(step.old_states)
        if not kept:
            lease.pages.states = [None] * len(self.state_groups)
            return None
        lease.pages.states = list(kept[-1].states)
        for state in lease.pages.states:
            assert state is not None
            state.refs += 1
        return kept[-1].position

    def drop_kept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self.groups.drop_states(one.states)

    def drop_step(self, lease: Lease, step: InFlight) -> None:
        """Drop the step of a lease that is about to end."""
        if step.loaded_to > step.start:
            self._clear_blocks(lease, lease.computed // self.block_tokens)
        self.drop_kept(step.kept)
        self.groups.drop_states(step.old_states)

    def fail(self, lease: Lease, step: InFlight) -> None:
        """Drop all results of a failed step. States that it wrote in place are lost."""
        self.drop_kept(step.kept)
        self.groups.drop_states(lease.pages.states)
        lease.pages.states = step.old_states
        if step.in_place:
            self.groups.drop_states(lease.pages.states)
            lease.pages.states = [None] * len(self.state_groups)
        bad = step.poisoned
        loaded = step.loaded_to > step.start
        if loaded:
            self._clear_blocks(lease, lease.computed // self.block_tokens)
        if loaded or step.in_place or (bad is not None and bad < step.start):
            self.placement.reattach(lease, step.start if bad is None else min(bad, step.start))
        elif bad is not None:
            self.placement.trim(lease)

    def _clear_blocks(self, lease: Lease, first: int) -> None:
        """Zero the lease's own pages from block `first` on, so that their next holder does not read what a load left.

        After a failed load a partial block at the lease's end was overwritten too: the lease drops it and goes back.
        """
        for pool, table in zip(self.groups.token_pools, lease.pages.tables, strict=True):
            for page in () if table is None else table[first:]:
                if page != NULL_PAGE:
                    self.groups.arena.clear(pool, page)

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, lease: Lease) -> None:
        """Move whole computed blocks into the index. Blocks that another request has published first are shared."""
        prefixes, index, end = self.prefixes, self.prefixes.index, lease.computed // self.block_tokens
        leaf, pages, lineage = lease.leaf, lease.pages, lease.lineage
        self.leaders.withdraw(lease)
        while leaf.end < end and leaf.children:
            start = leaf.end * self.block_bytes
            child = leaf.children.get(bytes(lease.tokens[start : start + self.block_bytes]))
            if child is None:
                break
            most = min(child.num_blocks, end - leaf.end)
            same = common_blocks(child.tokens, lease.tokens, start, most, self.block_bytes)
            if same < child.num_blocks:
                child = prefixes.split(child, same)
            self._share(lease, child)
            leaf = self._move_to(lease, child)
        if leaf.end < end:
            first = leaf.end
            tables = [None if table is None else table[first:end] for table in pages.tables]
            node = index.append(leaf, lease.tokens, end, tables, may_grow=leaf.refs == 1)
            node.hold_slabs(pages.slabs)
            self.stats.blocks_published += end - first
            prefixes.history.recall(lineage, node.keys[first - end :])
            if prefixes.events.enabled and not node.dead:
                prefixes.events.stored(node.keys[first - end :])
            self._move_to(lease, node)
            node.turn, node.new_tokens = lineage.turn, end * self.block_tokens - lineage.continued_from
            node.prompt_tokens = lease.prompt_tokens
        if lease.taps:
            index.touch_taps(lease.leaf)
        pages.copied = []
        self._own_slabs_only(lease)
        self.leaders.announce(lease)

    def _move_to(self, lease: Lease, node: Node) -> Node:
        old = lease.leaf
        if node is not old:
            node.refs += 1
            lease.leaf = node
            self.prefixes.release_node(old)
        return node

    def _share(self, lease: Lease, node: Node) -> None:
        """Replace the lease's pages with those of `node` for the same blocks, and give `node` the pages it lacks."""
        groups, first, last = self.groups, node.start, node.end
        self.stats.blocks_shared += last - first
        for group, table in enumerate(lease.pages.tables):
            if table is None:
                continue
            pool, mine = groups.token_pools[group], table[first:last]
            theirs = node.pages[group]
            if theirs is None:
                theirs = node.pages[group] = null_pages(last - first)
            if group in groups.local:
                pool.add_holds(make_pages(b for a, b in zip(mine, theirs, strict=True) if a != NULL_PAGE != b))
            spare = make_pages(a for a, b in zip(mine, theirs, strict=True) if a != NULL_PAGE != b)
            groups.arena.give_back(pool, spare)
            if len(spare) < len(mine):
                theirs[:] = make_pages(b or a for a, b in zip(mine, theirs, strict=True))
                self.prefixes.index.changed()
                self.prefixes.index.note_taps(node)
                node.hold_slabs(lease.pages.slabs)
                if group in groups.local:
                    theirs = make_pages(b if a else NULL_PAGE for a, b in zip(mine, theirs, strict=True))
            table[first:last] = theirs

    def _slide(self, lease: Lease, position: int) -> None:
        """Drop the pages of local groups that no token from `position` on sees."""
        groups, pages, published = self.groups, lease.pages, lease.leaf.end
        for group in groups.local:
            first, old = groups.first_visible_block(group, position), pages.local_first[group]
            if first > old:
                table = pages.tables[group]
                assert table is not None
                self.prefixes.drop_local(lease.leaf, group, old, min(first, published))
                if first > published:
                    groups.free_pages(group, table[max(old, published) : first])
                table[old:first] = null_pages(first - old)
                pages.local_first[group] = first
        pages.slide_at = groups.next_slide(position)

    def _own_slabs_only(self, lease: Lease) -> None:
        """Recompute `slabs` after publishing: the lease itself owns only its unpublished blocks and its states."""
        pages, end = lease.pages, lease.leaf.end
        pages.slabs = self.groups.state_slabs(pages.states)
        for pool, table in zip(self.groups.token_pools, pages.tables, strict=True):
            if table is not None:
                pages.slabs.update(pool.slab_of(page) for page in table[end:])
