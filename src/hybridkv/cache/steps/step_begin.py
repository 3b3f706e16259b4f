"""Begin of a step: allocation of its pages, and the tables of the pages it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.index.tree import PathNode, State, null_pages
from hybridkv.cache.retention.policy import Kind
from hybridkv.cache.steps import footprint
from hybridkv.cache.steps.footprint import Needs
from hybridkv.cache.steps.lease import InFlight, Kept, Lease
from hybridkv.cache.steps.lease_pages import LeasePages
from hybridkv.cache.steps.placement import Placement
from hybridkv.cache.steps.reclaim import NoRoom, Reclaimer
from hybridkv.cache.steps.step_tables import Loaded, Segment, StepTables

_EVICTIONS_FOR_CHECKPOINTS = 8
"""At most this many evictions to make room for checkpoints inside a step; they must not empty the cache."""


class StepBegin:
    """Begins steps of the leases of one `Placement`."""

    def __init__(self, placement: Placement, reclaimer: Reclaimer) -> None:
        self.placement = placement
        self.reclaimer = reclaimer
        self.groups = placement.groups
        self.arena = placement.groups.arena
        self.running = placement.running
        self.block_tokens = placement.block_tokens
        self.state_groups = placement.state_groups
        self._state_names = [group.name for group in placement.state_groups]

    def send_off(self, lease: Lease, start: int, end: int, num_known: int, may_cut: bool) -> StepTables | NoRoom:
        """Begin a step that computes the tokens [start, end). `num_known`: tokens of the lease without drafts."""
        pages, ahead = lease.pages, lease.plan.ahead
        kept = [p for p in ahead if p <= end] if ahead else ahead
        num_blocks = -(-end // self.block_tokens) - pages.num_blocks if pages.named_tables else 0
        if num_blocks > 0 or kept or (pages.states and True in self._fresh_states(lease, may_cut)):
            room = self._room_for(lease, max(0, num_blocks), may_cut, kept, end)
            if isinstance(room, NoRoom):
                return room
            if num_blocks > 0:
                self._add_blocks(lease, num_blocks)
            self.placement.settle_tail(lease)
            chains = self._add_segments(lease, start, end, num_known, room, may_cut)
            segments = dict(zip(self._state_names, chains, strict=True))
        else:
            segments = self._decode_segments(lease, start, end, num_known)
        self.running.in_flight[lease.id] = lease
        self.groups.run_operations()  # includes operations that failed in an earlier step and may concern these pages
        tables = {name: table[:] for name, table in pages.named_tables.items()}  # copies: the lease's tables change
        return StepTables(start, end, self.block_tokens, tables, segments)

    def send_off_ahead(self, lease: Lease, tables: StepTables) -> StepTables | None:
        """The tables that `send_off` of one token would give after the step in flight, with `tables`, is accepted.

        If the token begins a block, the block is added now. None if the state in flight must be preserved, or if there
        is no room.
        """
        step, pages, ahead = lease.step, lease.pages, lease.plan.ahead
        if step is None or step.loaded_to or step.poisoned is not None or lease.aborted:
            return None
        if (ahead and ahead[0] <= step.end + 1) or (pages.states and True in self._fresh_states(lease, may_cut=False)):
            return None
        if not pages.named_tables or step.end < pages.num_blocks * self.block_tokens:
            return tables.following()
        if self.reclaimer.make_room(self.placement.needs(lease, 1, [False] * len(pages.states), 0)) is not None:
            return None
        self._add_blocks(lease, 1)
        self.groups.run_operations()
        return tables.following()._replace(tables={name: table[:] for name, table in pages.named_tables.items()})

    def send_off_load(self, lease: Lease, start: int, first: int, end: int) -> StepTables | NoRoom:
        """Begin a step that loads the tokens [start, first) and computes [first, end).

        The state at `first` gets pages of its own, which the rest of the step does not overwrite. If `first` is a block
        boundary, a checkpoint is kept there, so that other requests can resume from it.
        """
        pages, is_inside = lease.pages, first < end and bool(self.state_groups)
        is_checkpoint = self.placement.prefixes.needs_checkpoints and first % self.block_tokens == 0
        kept = [p for p in lease.plan.ahead if first < p <= end]
        num_blocks = max(0, -(-end // self.block_tokens) - pages.num_blocks) if pages.named_tables else 0
        unseen = self._unseen_blocks(lease, num_blocks, first)
        room = self._room_for(lease, num_blocks, True, kept, end, unseen, num_needed=int(is_inside), loaded_to=first)
        if isinstance(room, NoRoom):
            return room
        if is_checkpoint:
            lease.plan.want(first, Kind.BRANCH)
        if is_checkpoint or is_inside:
            room = [first, *room]
        if num_blocks:
            self._add_blocks(lease, num_blocks, unseen)
        self.placement.settle_tail(lease)
        copied = self._copy_known_blocks(lease, first)
        chains = self._add_segments(lease, start, end, lease.num_tokens, room, True)
        assert lease.step is not None
        lease.step.loaded_to = first
        lease.plan.advance(first)
        self.running.in_flight[lease.id] = lease
        self.groups.run_operations()
        states = {name: chain[0].dst for name, chain in zip(self._state_names, chains, strict=True)}
        segments = {name: chain[1:] for name, chain in zip(self._state_names, chains, strict=True)}
        tables = {name: table[:] for name, table in pages.named_tables.items()}
        return StepTables(first, end, self.block_tokens, tables, segments, Loaded(start, states, copied))

    # --- room and pages -----------------------------------------------------------------------------------------------

    def _fresh_states(self, lease: Lease, may_cut: bool) -> list[bool]:
        """By state group: whether the step must write to new pages because the present state must be preserved."""
        return [state is None or state.refs > 1 or may_cut for state in lease.pages.states]

    def _unseen_blocks(self, lease: Lease, num_blocks: int, position: int) -> list[int]:
        """By token group: number of the next `num_blocks` blocks that tokens from `position` on do not see."""
        first, unseen = lease.pages.num_blocks, [0] * len(lease.pages.tables)
        for group in self.groups.local:
            unseen[group] = min(num_blocks, max(0, self.groups.first_visible_block(group, position) - first))
        return unseen

    def _room_for(
        self,
        lease: Lease,
        num_blocks: int,
        may_cut: bool,
        kept: list[int],
        end: int,
        unseen: Sequence[int] = (),
        num_needed: int = 0,
        loaded_to: int = 0,
    ) -> list[int] | NoRoom:
        """Make room for a step. Checkpoints inside it are optional: returns the positions that fit.

        `num_needed`: number of states inside the step that are not optional. `loaded_to`: end of what the step loads,
        where no checkpoint can be kept.
        """
        if not self.state_groups or not lease.plan.has_fill:
            return self._firm_room(lease, num_blocks, may_cut, kept, end, unseen, num_needed)
        fill = [p for p in kept if lease.plan.wanted[p] is Kind.FILL]
        firm = [p for p in kept if p not in fill]
        if end in fill:  # the next step could not write that state in place: take a block less
            fill.remove(end)
            before = end - self.block_tokens
            if before > max(lease.computed, loaded_to) and before not in lease.plan.wanted:
                lease.plan.want(before, Kind.FILL)
                fill.append(before)
        room = self._firm_room(lease, num_blocks, may_cut, firm, end, unseen, num_needed)
        if isinstance(room, NoRoom) or not fill:
            return room
        num_needed += sum(position < end for position in room)
        fresh, promised = self._fresh_states(lease, may_cut), self._promised(lease)

        def with_fill(count: int) -> Needs:
            return footprint.add(self.placement.needs(lease, num_blocks, fresh, num_needed + count, unseen), promised)

        num_fit = len(fill)
        num_states = num_fit + sum(promised.get(pool, 0) for pool in self.groups.state_pools)
        self.reclaimer.make_spare_room(with_fill(num_fit), num_states)
        while num_fit and not self.arena.fits(with_fill(num_fit)):
            num_fit -= 1
        return sorted([*room, *fill[len(fill) - num_fit :]])

    def _promised(self, lease: Lease) -> Needs:
        """Pages that the other running requests need for the tokens they have, which may be in the same step.

        Memory that waits for them is not idle: a page taken by a step in flight cannot be evicted for them.
        """
        promised: Needs = {}
        for other in self.running.leases.values():
            if other is lease or other.step is not None or other.is_pin:
                continue
            pages, num_kept = other.pages, int(bool(other.plan.ahead))
            num_blocks = -(-other.num_tokens // self.block_tokens) - pages.num_blocks if pages.named_tables else 0
            if num_blocks > 0 or num_kept:
                fresh = self._fresh_states(other, may_cut=False)
                promised = footprint.add(promised, self.placement.needs(other, max(0, num_blocks), fresh, num_kept))
        return promised

    def _firm_room(
        self,
        lease: Lease,
        num_blocks: int,
        may_cut: bool,
        kept: list[int],
        end: int,
        unseen: Sequence[int],
        num_needed: int,
    ) -> list[int] | NoRoom:
        """`_room_for` without the checkpoints that only fill idle memory."""
        make_room = self.reclaimer.make_room
        fresh, needs = self._fresh_states(lease, may_cut), self.placement.needs
        num_inside = sum(position < end for position in kept) if self.state_groups else 0
        most, num_wanted = _EVICTIONS_FOR_CHECKPOINTS, num_needed + num_inside
        if num_inside and make_room(needs(lease, num_blocks, fresh, num_wanted, unseen), most) is None:
            return kept
        while (no_room := make_room(needs(lease, num_blocks, fresh, num_needed, unseen))) is not None:
            before, fresh = fresh, self._fresh_states(lease, may_cut)
            if fresh == before:  # else a checkpoint of this lease was evicted, and its state can be written in place
                return no_room
        if not num_inside:
            return kept
        make_room(needs(lease, num_blocks, fresh, num_wanted, unseen), most)
        num_fit = num_inside
        while not self.arena.fits(needs(lease, num_blocks, fresh, num_needed + num_fit, unseen)):
            num_fit -= 1
        self.placement.stats.checkpoints_skipped += num_inside - num_fit
        return kept[num_inside - num_fit :]  # keep the last ones: they save the most compute

    def _add_blocks(self, lease: Lease, num_blocks: int, unseen: Sequence[int] = ()) -> None:
        pages = lease.pages
        for group, table in enumerate(pages.tables):
            if table is None:
                continue
            skipped = unseen[group] if unseen else 0
            added = self.arena.take(self.groups.token_pools[group], num_blocks - skipped, pages.slabs)
            table += null_pages(skipped) + added if skipped else added
            if pages.tail is not None and not skipped:
                self._copy_page(pages, group, pages.tail.tail_pages[group], added[0])

    def _copy_known_blocks(self, lease: Lease, first: int) -> dict[str, list[int]]:
        """Copy the whole blocks before `first` that the index has into the lease's own pages of these blocks.

        Call after room was made: that may evict or move them. Blocks that the group does not see from `first` on are
        skipped. Returns their numbers by token group.
        """
        pages, copied = lease.pages, dict[str, list[int]]()
        if lease.leaf.dead:  # the index may have other content for the same tokens
            return copied
        path = self.placement.prefixes.index.walk(lease.root_key, lease.tokens, first // self.block_tokens)
        for group, table in enumerate(pages.tables):
            if table is None:
                continue
            visible = max(lease.leaf.end, self.groups.first_visible_block(group, first))
            known = _pages_from(path, group, visible)
            for block, page in known:
                self._copy_page(pages, group, page, table[block])
            if known:
                copied[self.groups.token_groups[group].name] = [block for block, _ in known]
        return copied

    def _copy_page(self, pages: LeasePages, group: int, src: int, dst: int) -> None:
        """Copy a page that others hold onto one of the lease, and pin it while the step is in flight."""
        pool = self.groups.token_pools[group]
        self.arena.copy(pool, src, dst)
        pages.copied.append((group, src))
        pages.slabs.add(pool.slab_of(src))

    def _add_segments(
        self, lease: Lease, start: int, end: int, num_known: int, kept: Sequence[int], may_cut: bool
    ) -> list[list[Segment]]:
        """Put the step in flight. Each state group gets a chain of states, one segment per kept position."""
        fresh = self._fresh_states(lease, may_cut)
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
        # Each state of a chain has one reference: the lease has the last state's, `InFlight` those of the others.
        lease.step = InFlight(
            start,
            end,
            num_known,
            old_states=[chain[0] if is_fresh else None for chain, is_fresh in zip(chains, fresh, strict=True)],
            in_place=False in fresh,
            kept=[Kept(p, [chain[i] for chain in chains]) for i, p in enumerate(bounds, 1) if p in kept],
        )
        lease.pages.states = [chain[-1] for chain in chains]
        if end in kept:
            for state in lease.pages.states:
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

    def _decode_segments(self, lease: Lease, start: int, end: int, num_known: int) -> dict[str, list[Segment]]:
        """The common case of `_add_segments`: every state is written in place and no checkpoint is kept."""
        lease.step = InFlight(start, end, num_known, [None] * len(self.state_groups), bool(self.state_groups), [])
        segments = {}
        for group, state in zip(self.state_groups, lease.pages.states, strict=True):
            assert state is not None
            segments[group.name] = [Segment(start, end, state.pages, state.pages)]
        return segments

    def _chain(self, lease: Lease, group: int, length: int, fresh: bool) -> list[State | None]:
        """The state before the step and the one after each of `length` segments.

        Unless `fresh`, the first segment writes in place.
        """
        state = lease.pages.states[group]
        size = self.state_groups[group].pages_per_state
        chain: list[State | None] = [state] if fresh else [state, state]
        count = size * (length + 1 - len(chain))
        pages = tuple(self.arena.take(self.groups.state_pools[group], count, lease.pages.slabs)) if count else ()
        for first in range(0, count, size):
            chain.append(State(pages[first : first + size]))
        return chain

    def _state_pages(self, group: int, state: State | None) -> tuple[int, ...]:
        return (NULL_PAGE,) * self.state_groups[group].pages_per_state if state is None else state.pages


def _pages_from(path: Sequence[PathNode], group: int, first: int) -> list[tuple[int, int]]:
    """The blocks from number `first` on that have a page of `group` on the path: block number and page."""
    return [
        (block, pages[block - node.start])
        for node, num_blocks in path
        if (pages := node.pages[group]) is not None
        for block in range(max(first, node.start), node.start + num_blocks)
        if pages[block - node.start] != NULL_PAGE
    ]
