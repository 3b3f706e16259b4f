"""A step begins: room for it, and the tables that say which pages it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.index.tree import State, null_pages
from hybridkv.cache.retention.policy import Kind
from hybridkv.cache.steps.lease import InFlight, Kept, Lease
from hybridkv.cache.steps.lease_pages import LeasePages
from hybridkv.cache.steps.placement import Placement
from hybridkv.cache.steps.reclaim import NoRoom, Reclaimer
from hybridkv.cache.steps.step_tables import Loaded, Segment, StepTables

_EVICTIONS_FOR_CHECKPOINTS = 8
"""What may go for the sake of new checkpoints inside a step; they must not empty the cache."""


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
        """A step that computes the tokens from `start` up to `end`. `num_known`: without its drafts."""
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
        self.groups.run_operations()  # also what an earlier step could not have run: it may concern this one's pages
        tables = {name: table[:] for name, table in pages.named_tables.items()}  # theirs to keep; ours go on changing
        return StepTables(start, end, self.block_tokens, tables, segments)

    def send_off_load(self, lease: Lease, start: int, first: int, end: int) -> StepTables | NoRoom:
        """A step whose tokens from `start` up to `first` are loaded; there, a state is kept for others to find."""
        pages = lease.pages
        kept = [p for p in lease.plan.ahead if first <= p <= end]
        if self.placement.prefixes.needs_checkpoints and first % self.block_tokens == 0:
            kept = sorted({first, *kept})
        num_blocks = max(0, -(-end // self.block_tokens) - pages.num_blocks) if pages.named_tables else 0
        unseen = self._unseen_blocks(lease, num_blocks, first)
        room = self._room_for(lease, num_blocks, True, kept, end, unseen)
        if isinstance(room, NoRoom):
            return room
        if self._state_names and first < end and first not in room:
            return NoRoom("no page for the state that is loaded")
        if first in kept:
            lease.plan.want(first, Kind.BRANCH)
        if num_blocks:
            self._add_blocks(lease, num_blocks, unseen)
        self.placement.settle_tail(lease)
        chains = self._add_segments(lease, start, end, lease.num_tokens, room, True)
        assert lease.step is not None
        lease.step.loaded_to = first
        lease.plan.advance(first)
        self.running.in_flight[lease.id] = lease
        self.groups.run_operations()
        loaded = Loaded(start, {name: chain[0].dst for name, chain in zip(self._state_names, chains, strict=True)})
        segments = {name: chain[1:] for name, chain in zip(self._state_names, chains, strict=True)}
        tables = {name: table[:] for name, table in pages.named_tables.items()}
        return StepTables(first, end, self.block_tokens, tables, segments, loaded)

    # --- room and pages -----------------------------------------------------------------------------------------------

    def _fresh_states(self, lease: Lease, may_cut: bool) -> list[bool]:
        """By state group: whether the step must write to a new page, since others count on the present one."""
        return [state is None or state.refs > 1 or may_cut for state in lease.pages.states]

    def _unseen_blocks(self, lease: Lease, num_blocks: int, position: int) -> list[int]:
        """By token group: how many of the next blocks nobody sees who goes on from `position`."""
        first, unseen = lease.pages.num_blocks, [0] * len(lease.pages.tables)
        for group in self.groups.local:
            unseen[group] = min(num_blocks, max(0, self.groups.first_visible_block(group, position) - first))
        return unseen

    def _room_for(
        self, lease: Lease, num_blocks: int, may_cut: bool, kept: list[int], end: int, unseen: Sequence[int] = ()
    ) -> list[int] | NoRoom:
        """Make room for a step. Checkpoints inside it are optional: returns those there is room for."""
        make_room = self.reclaimer.make_room
        fresh, needs = self._fresh_states(lease, may_cut), self.placement.needs
        num_inside = sum(position < end for position in kept) if self.state_groups else 0
        most = _EVICTIONS_FOR_CHECKPOINTS
        if num_inside and make_room(needs(lease, num_blocks, fresh, num_inside, unseen), most) is None:
            return kept
        while (no_room := make_room(needs(lease, num_blocks, fresh, 0, unseen))) is not None:
            before, fresh = fresh, self._fresh_states(lease, may_cut)
            if fresh == before:  # else a checkpoint of our own went, and a state can be written in place after all
                return no_room
        if not num_inside:
            return kept
        make_room(needs(lease, num_blocks, fresh, num_inside, unseen), most)
        num_fit = num_inside
        while not self.arena.fits(needs(lease, num_blocks, fresh, num_fit, unseen)):
            num_fit -= 1
        self.placement.stats.checkpoints_skipped += num_inside - num_fit
        return kept[num_inside - num_fit :]  # the last ones: most is computed before them

    def _add_blocks(self, lease: Lease, num_blocks: int, unseen: Sequence[int] = ()) -> None:
        pages = lease.pages
        for group, table in enumerate(pages.tables):
            if table is None:
                continue
            skipped = unseen[group] if unseen else 0
            added = self.arena.take(self.groups.token_pools[group], num_blocks - skipped, pages.slabs)
            table += null_pages(skipped) + added if skipped else added
            if pages.tail is not None and not skipped:
                self._copy_tail(pages, group, pages.tail.tail_pages[group], added[0])

    def _copy_tail(self, pages: LeasePages, group: int, tail_page: int, page: int) -> None:
        pool = self.groups.token_pools[group]
        self.arena.copy(pool, tail_page, page)
        pages.copied.append((group, tail_page))
        pages.slabs.add(pool.slab_of(tail_page))

    def _add_segments(
        self, lease: Lease, start: int, end: int, num_known: int, kept: Sequence[int], may_cut: bool
    ) -> list[list[Segment]]:
        """Send the step off: a chain of states for each group, one link for each position that is kept."""
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
        # Each state of a chain has one hold: the last one's is the lease's, all others go to who keeps them.
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
        """The common case of `_add_segments`: every state in place, nothing kept."""
        lease.step = InFlight(start, end, num_known, [None] * len(self.state_groups), bool(self.state_groups), [])
        segments = {}
        for group, state in zip(self.state_groups, lease.pages.states, strict=True):
            assert state is not None
            segments[group.name] = [Segment(start, end, state.pages, state.pages)]
        return segments

    def _chain(self, lease: Lease, group: int, length: int, fresh: bool) -> list[State | None]:
        """The state before the step, and the one after each of `length` segments; the first in place unless `fresh`."""
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
