"""The cache API for an engine: `match`, `begin`, `extend`, `commit`, `fork`, `rollback`, `release` and a few more.

    lease = cache.begin(prompt)                     # resumes at a position that every group can supply
    while not done:
        step = cache.extend(lease, n)               # pages for the next n tokens, as tables; or NoRoom
        run(cache.take_operations(), step)          # copies and zeroing first, in order; then acknowledge them
        cache.commit(lease, sampled=[token])        # publishes whole blocks and checkpoints
    cache.release(lease)                            # keeps a checkpoint at the end of the request

No method blocks, and none touches device memory. A lease with a step in flight can only be committed or aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from hybridkv.cache.arena.compaction import Compactor
from hybridkv.cache.arena.group_pages import GroupPages
from hybridkv.cache.arena.operations import Operation, OperationBatch
from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.index.leaders import Leaders, Match
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.resume import Found, Resume
from hybridkv.cache.inspection.explanation import Explanation
from hybridkv.cache.inspection.inspector import Inspector
from hybridkv.cache.integrity import check_integrity
from hybridkv.cache.invalid import Invalid
from hybridkv.cache.layout import CacheGroup, CacheLayout
from hybridkv.cache.pins import Pin, Pins, PinState
from hybridkv.cache.retention.named import DEFAULT_POLICY, default_checkpoints, named_policy
from hybridkv.cache.retention.partings import Parting
from hybridkv.cache.retention.policy import CheckpointPolicy, EvictionPolicy, Kind, PromptFacts
from hybridkv.cache.stats import CacheStats, Event, Events
from hybridkv.cache.steps.lease import InFlight, Lease
from hybridkv.cache.steps.placement import Placement
from hybridkv.cache.steps.reclaim import NoRoom, Reclaimer
from hybridkv.cache.steps.running import Running
from hybridkv.cache.steps.step_begin import StepBegin
from hybridkv.cache.steps.step_end import StepEnd
from hybridkv.cache.steps.step_tables import StepTables
from hybridkv.cache.tokens import PLAIN_KEY, TOKEN_BYTES, LookupKey, TokenIds, pack_tokens
from hybridkv.errors import CacheError


class Cache:
    """The cache of one rank."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        policy: str | EvictionPolicy = DEFAULT_POLICY,
        checkpoint_policy: CheckpointPolicy | None = None,
        run_operations: Callable[[Sequence[Operation]], None] | None = None,
        event_limit: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy`: eviction policy or its name (lru, flops, reuse). `checkpoint_policy`: where to keep checkpoints.

        `run_operations`: runs copies and zeroing synchronously. Without it, call `take_operations` and `acknowledge`.
        """
        self.layout = layout
        self.block_tokens = layout.block_tokens
        self.stats = CacheStats()
        self.epoch = 0
        self._checkpoints = checkpoint_policy or default_checkpoints(layout)
        self._events = Events(event_limit)
        eviction = named_policy(policy) if isinstance(policy, str) else policy
        self._running = Running()
        self._groups = GroupPages(layout, run_operations)
        self._prefixes = PrefixCache(self._groups, eviction, self.stats, self._events, clock)
        compactor = Compactor(self._groups, self._running, self.stats)
        self._reclaimer = Reclaimer(self._prefixes, compactor)
        self._leaders = Leaders(layout.block_tokens)
        self._placement = Placement(self._prefixes, self._running, self._leaders)
        self._step_begin = StepBegin(self._placement, self._reclaimer)
        self._step_end = StepEnd(self._placement)
        self._pins = Pins(self._placement, compactor, clock)
        self.inspector = Inspector(self._prefixes, self._placement, self._pins)
        """Views for people: explanations of lookups, the arena as a map, the prefixes as a tree."""
        self._token_group = {group.name: index for index, group in enumerate(layout.token_groups)}
        self._state_group = {group.name: index for index, group in enumerate(layout.state_groups)}
        self._taps = {group.name: group for group in layout.tap_groups}

    # --- lookup -------------------------------------------------------------------------------------------------------

    def match(self, tokens: TokenIds, key: LookupKey = PLAIN_KEY) -> Match:
        """Look up a prompt in the index. Read-only."""
        found = self._find(pack_tokens(tokens), key)
        resume, taps = found.resume, self._tap_groups(key.taps)
        num_blocks = (len(found.tokens) // TOKEN_BYTES - 1) // self.block_tokens
        leader, leader_tokens = self._leaders.find_leader(found.path, found.tokens, num_blocks, taps)
        if leader is None and resume.matched_tokens > resume.position:
            leases = self._running.leases.values()
            leader, leader_tokens = self._leaders.find_rebuilder(
                leases, key.root, found.tokens, num_blocks, resume.position, taps
            )
        return Match(resume.position, resume.matched_tokens, resume.missing, leader, leader_tokens, found)

    def explain(self, match: Match) -> Explanation:
        """Why a request with this match resumes where it does. Call it before `begin`, which forgets evictions."""
        return self.inspector.explain(match, self._tap_groups(match.found.key.taps))

    def _find(self, packed: bytes, key: LookupKey) -> Found:
        limit, index = len(packed) // TOKEN_BYTES - 1, self._prefixes.index
        path, resume = self._placement.find(key.root, packed, limit, self._tap_groups(key.taps))
        return Found(key, packed, path, resume, index, index.version)

    def follow(self, match: Match) -> bool:
        """Whether to wait for the leader of a match. If so, the leader keeps a checkpoint where the prompts diverge."""
        leader = match.leader
        if leader is None or leader.released or leader.aborted or match.leader_tokens <= match.num_tokens:
            return False
        return leader.keep_at(match.leader_tokens) if self._prefixes.needs_checkpoints else True

    # --- request lifecycle --------------------------------------------------------------------------------------------

    def begin(
        self,
        tokens: TokenIds,
        key: LookupKey = PLAIN_KEY,
        *,
        breakpoints: Sequence[int] = (),
        match: Match | None = None,
        store_room: int = 0,
        lifetimes: Sequence[tuple[int, float]] = (),
        client: str = "",
    ) -> Lease:
        """Start a request: a lease at the largest position that every group can supply.

        Allocates no pages, so it always succeeds. `match`: result of `match` for the same tokens and key. It saves the
        index lookup if the index has not changed since. `store_room`: number of checkpoints that would fill idle room
        of a store, which gets those that the request computes. `lifetimes`: breakpoints that `client` would like to
        have kept for so many seconds: a hint for what is evicted first.
        """
        packed = pack_tokens(tokens)
        if not packed:
            raise CacheError("a request needs at least one token")
        if self._pins.live:
            self._pins.expire()
        found = self._find(packed, key) if match is None else self._found_again(match.found, packed, key)
        lease, resume = self._placement.new_lease(key.root, packed, self._tap_groups(key.taps)), found.resume
        parting = found.parting(self.block_tokens) if self._prefixes.needs_checkpoints else None
        self._placement.attach(lease, found.path, resume)
        lease.cached_tokens, lease.matched_tokens = resume.position, resume.matched_tokens
        self._plan_checkpoints(lease, resume, parting, breakpoints, store_room)
        if lifetimes and self._prefixes.needs_checkpoints:
            self._plan_lifetimes(lease, lifetimes, client)
        self._count_request(lease, resume)
        return lease

    def extend(
        self, lease: Lease, num_tokens: int, *, drafts: TokenIds = (), may_cut: bool = False, num_loaded: int = 0
    ) -> StepTables | NoRoom:
        """Allocate pages for the next `num_tokens` tokens, all or none. Returns the step's tables, or `NoRoom`.

        `drafts`: speculative tokens at the end of the step; the lease keeps only those that `commit` accepts.
        `may_cut`: the step may be accepted in part, so no state is written in place. Drafts imply it.
        `num_loaded`: number of tokens at the start of the step (up to all of them) that are loaded, not computed. The
        caller fills their pages, listed in `loaded` of the tables, before the step reads them, or commits the step as
        failed. Local groups get pages only for the loaded blocks that later tokens see. Blocks that the index has are
        copied: `loaded` names them.
        """
        self._check_idle(lease)
        if self._pins.live:
            self._pins.expire()
        if num_loaded:
            _check_load(num_loaded, num_tokens, len(drafts))
        num_known = lease.num_tokens
        if len(drafts):
            lease.append(drafts)
            may_cut = True
        start, end = lease.computed, lease.computed + num_tokens
        if num_tokens < 1 or end > lease.num_tokens:
            lease.forget_after(num_known)
            raise CacheError(f"cannot extend by {num_tokens}: {start} of {num_known} tokens are computed")
        try:
            if num_loaded:
                step = self._step_begin.send_off_load(lease, start, start + num_loaded, end)
            else:
                step = self._step_begin.send_off(lease, start, end, num_known, may_cut)
        except BaseException:  # the memory layer failed; if the step is not in flight yet, drop its drafts
            if lease.step is None:
                lease.forget_after(num_known)
            raise
        if isinstance(step, NoRoom):
            self.stats.no_room += 1
            lease.forget_after(num_known)
        return step

    def extend_ahead(self, lease: Lease, tables: StepTables) -> StepTables | None:
        """Tables for a step of one more token that runs before the step in flight, with `tables`, is committed.

        It writes all states in place. `commit` and then `extend` must follow for this lease, one after the other, and
        the device must run both steps, and what later calls ask of it, in order. None: commit the step first.
        """
        return self._step_begin.send_off_ahead(lease, tables)

    def commit(
        self, lease: Lease, num_accepted: int | None = None, *, sampled: TokenIds = (), failed: bool = False
    ) -> int:
        """End the step and publish its whole blocks and checkpoints. Returns the number of computed tokens.

        `num_accepted`: number of accepted tokens, default all; drafts after them are dropped. `sampled`: tokens to
        append to the request. `failed`: no result of the step is usable. If the step failed, or a page it read was
        invalidated meanwhile, drafts and `sampled` are dropped, and the number of computed tokens does not grow.
        """
        step = lease.step
        if step is None:
            raise CacheError("nothing to commit: the lease has no step in flight")
        packed = pack_tokens(sampled) if len(sampled) else b""
        accepted = step.end - step.start if num_accepted is None else num_accepted
        if not 0 <= accepted <= step.end - step.start:
            raise CacheError(f"{accepted} tokens accepted of a step of {step.end - step.start}")
        del self._running.in_flight[lease.id]
        lease.step = None
        if step.loaded_to > step.start + accepted:
            accepted, unusable = self._usable(step, accepted)
            failed = failed or unusable
        if lease.aborted:
            self._step_end.drop_step(lease, step)
            self._placement.detach(lease)
        elif failed or step.poisoned is not None:
            lease.forget_after(step.num_known)
            self._step_end.fail(lease, step)
        else:
            if num_accepted is not None:
                lease.forget_after(max(step.start + accepted, step.num_known))
            self._step_end.accept(lease, step, step.start + accepted)
            lease.tokens += packed
        if step.loaded_to > step.start:
            self._groups.run_operations()  # pages of a failed load become free after they are zeroed
        return 0 if lease.aborted else lease.computed

    def _usable(self, step: InFlight, accepted: int) -> tuple[int, bool]:
        """Number of usable tokens of a load that was accepted in part, and whether there are none.

        Loaded windows and states are those of the load's end, so a shorter load cannot use them.
        """
        target = (step.start + accepted) // self.block_tokens * self.block_tokens
        if self._prefixes.needs_checkpoints or target <= step.start:
            return 0, True
        return target - step.start, False

    def release(self, lease: Lease, *, keep: bool = True) -> None:
        """End or preempt a request. If `keep`, a checkpoint is kept at its end; the lease gives up its pages."""
        self._check_idle(lease)
        if keep:
            self._placement.keep_end(lease)
        self._placement.detach(lease)

    def abort(self, lease: Lease) -> None:
        """End a request at any time. Pages of a step in flight are held until the step is committed."""
        if lease.released:
            return
        if lease.step is None:
            self._placement.detach(lease)
        else:
            lease.aborted = True
            self._leaders.withdraw(lease)

    def fork(self, lease: Lease, count: int) -> list[Lease] | NoRoom:
        """Make `count` more leases at the same position. A partial block is copied; everything else is shared."""
        self._check_idle(lease)
        if self._pins.live:
            self._pins.expire()
        no_room = self._reclaimer.make_room(self._placement.fork_needs(lease, count))
        if no_room is not None:
            self.stats.no_room += 1
            return no_room
        twins = [self._placement.fork(lease) for _ in range(count)]
        self._groups.run_operations()
        return twins

    def rollback(self, lease: Lease, limit: int) -> int:
        """Go back to the largest position <= `limit` that can be resumed, and return it. The lease keeps its tokens."""
        self._check_idle(lease)
        if limit < 0:
            raise CacheError(f"cannot roll back to {limit}")
        if limit < lease.computed:
            self._placement.reattach(lease, limit)
        return lease.computed

    def drop_taps(self, lease: Lease) -> None:
        """Use no tapped layers from now on. What the lease has published of them stays for other requests."""
        self._check_idle(lease)
        self._placement.drop_taps(lease)

    # --- invalidation and reset ---------------------------------------------------------------------------------------

    def invalidate(self, pages: Mapping[str, Iterable[int]]) -> dict[int, int]:
        """Report pages, by group, whose content is wrong (a failed load, a bad transfer).

        Everything derived from them leaves the index. Every lease that uses them goes back to the largest position that
        can be resumed at or before its first invalid one. A lease with a step in flight goes back when the step is
        committed, whatever its result. Pins of invalid pages break. Returns the new positions of leases by id.
        """
        bad = {name: {page for page in numbers if page > NULL_PAGE} for name, numbers in pages.items()}
        for name in bad:
            if name not in self._token_group and name not in self._state_group:
                raise CacheError(f"no group {name!r}: the cache has {[*self._token_group, *self._state_group]}")
        self.stats.invalid_pages += sum(map(len, bad.values()))
        invalid = Invalid(
            self._prefixes,
            {index: bad[name] for name, index in self._token_group.items() if bad.get(name)},
            {index: bad[name] for name, index in self._state_group.items() if bad.get(name)},
        )
        first_bad = {lease: invalid.first_bad_position(lease) for lease in self.leases}
        invalid.clear_pages()
        for node in self._prefixes.all_nodes(lease.leaf for lease in self.leases):
            if not node.gone:
                invalid.cut_out(node)
        moved = {}
        for lease, position in first_bad.items():
            if position is None:
                continue
            step = lease.step
            if step is not None:
                step.poisoned = position if step.poisoned is None else min(position, step.poisoned)
            elif position >= lease.computed:
                self._placement.trim(lease)
            elif lease.is_pin:
                self._pins.break_off(lease)
            else:
                self._placement.reattach(lease, position)
                moved[lease.id] = lease.computed
        self._groups.run_operations()
        return moved

    def reset(self) -> None:
        """Start a new epoch (new weights): the index is emptied. Running leases and pins keep the pages they hold."""
        self.epoch += 1
        self._prefixes.history.log.clear()
        for root in self._prefixes.index.drop_all_roots():
            self._prefixes.kill(root)

    # --- pins, operations, reports ------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: TokenIds,
        ttl_seconds: float,
        key: LookupKey = PLAIN_KEY,
        *,
        limit: int | None = None,
        packs: bool = True,
    ) -> Pin:
        """Pin the pages of a prefix for a transfer: they are neither evicted nor moved until the pin ends or expires.

        `num_tokens` of the pin: the largest n, at most `limit`, that every group can supply; 0 if there is none.
        `pages` of the pin: the pages to read, available when `state` is ready. The pages are first moved into few slabs
        if there is room, and these copies must be acknowledged; without room they stay in place. Always succeeds.
        `packs`: False leaves all pages in place, because a transfer reads them already.
        """
        _check_ttl(ttl_seconds)
        if limit is not None and limit < 0:
            raise CacheError(f"cannot pin the first {limit} tokens: give a limit of at least 0")
        packed = pack_tokens(tokens)
        self._pins.expire()
        lease = self._placement.new_lease(key.root, packed, self._tap_groups(key.taps))
        lease.is_pin = True
        most = lease.prompt_tokens if limit is None else min(limit, lease.prompt_tokens)
        path, resume = self._placement.find(lease.root_key, packed, most, lease.taps)
        self._placement.attach(lease, path, resume)
        return self._pins.add(lease, ttl_seconds, packs=packs)

    def renew(self, pin: Pin, ttl_seconds: float) -> None:
        """Set a pin to expire `ttl_seconds` from now, earlier or later than before. The pin must not have ended."""
        _check_ttl(ttl_seconds)
        self._pins.expire()
        if pin.ended is not None:
            raise CacheError(f"cannot renew a pin that is {pin.ended}: pin the prefix again")
        self._pins.renew(pin, ttl_seconds)

    def unpin(self, pin: Pin) -> None:
        """End a pin: its pages may be evicted and moved again. Does nothing if the pin has ended."""
        self._pins.end(pin, PinState.UNPINNED)

    @property
    def pins(self) -> Sequence[Pin]:
        """Pins that have not ended."""
        self._pins.expire()
        return tuple(self._pins.live.values())

    def pinned_slabs(self, pins: Iterable[Pin] | None = None) -> int:
        """Number of slabs that pins exclude from compaction: all pins by default, or some that have not ended."""
        self._pins.expire()
        return len(self._running.transfer_slabs(None if pins is None else [pin.lease.id for pin in pins]))

    def take_operations(self) -> OperationBatch | None:
        """Take the copies and zeroing to run, in order, before the next step; None if there are none."""
        return self._groups.arena.take_operations()

    def acknowledge(self, batch_id: int) -> None:
        """Report that a batch of operations is done."""
        try:
            self._groups.arena.acknowledge(batch_id)
        except KeyError as error:
            raise CacheError(str(error.args[0])) from None

    def take_events(self) -> list[Event]:
        return self._events.take()

    @property
    def leases(self) -> Sequence[Lease]:
        """Running requests, and the leases of pins."""
        return tuple(self._running.leases.values())

    def pages_in_use(self) -> dict[str, int]:
        """Number of pages of each pool that are held or wait for an operation."""
        return self._groups.arena.pages_in_use()

    def slabs_in_use(self) -> dict[str, int]:
        return self._groups.arena.slabs_in_use()

    def check_integrity(self) -> None:
        """Recount all references from scratch; raises AssertionError if a count is wrong."""
        check_integrity(self._prefixes, self._running, self._pins)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _check_idle(self, lease: Lease) -> None:
        if lease.released or lease.aborted:
            raise CacheError("the lease has ended")
        if lease.in_flight:
            raise CacheError("the lease has a step in flight: commit it first")

    def _found_again(self, found: Found, packed: bytes, key: LookupKey) -> Found:
        """The lookup result of a match if the index has not changed since; else a new lookup."""
        if found.tokens != packed or found.key != key or found.source is not self._prefixes.index:
            raise CacheError(
                "the match is not of these tokens and this key in this cache: pass the one that is, or none"
            )
        return found if found.is_current else self._find(packed, key)

    def _tap_groups(self, taps: Sequence[str]) -> tuple[int, ...]:
        """Indices of tapped layers. The first use of one adds it to all tables."""
        for name in taps:
            group = self._taps.get(name)
            if group is None:
                raise CacheError(f"no tap {name!r}: the cache has {list(self._taps) or 'none'}")
            if name not in self._token_group:
                self._add_tap(group)
        return tuple(self._token_group[name] for name in taps)

    def _add_tap(self, group: CacheGroup) -> None:
        self._token_group[group.name] = self._groups.add_tap(group)
        self._prefixes.index.add_tap(self._prefixes.all_nodes(lease.leaf for lease in self.leases))
        for lease in self.leases:
            lease.pages.tables.append(None)
            lease.pages.local_first.append(0)

    def _plan_checkpoints(
        self, lease: Lease, resume: Resume, parting: Parting | None, breakpoints: Sequence[int], store_room: int
    ) -> None:
        if not self._prefixes.needs_checkpoints:
            return
        is_branch = parting is not None and resume.checkpoint is None and 0 < resume.position == resume.matched_tokens
        if parting is not None and breakpoints:
            parting = parting.after_breakpoints(breakpoints, self.block_tokens)
        places = self._placement.learn_parting(lease, parting)
        num_spare, num_likely = self._reclaimer.num_spare_checkpoints(), 1
        if places and not num_spare and not self._is_worth_keeping(lease, places[0]):
            num_likely = 0
            self.stats.places_declined += 1
        facts = PromptFacts(
            lease.prompt_tokens,
            resume.position,
            resume.matched_tokens,
            tuple(breakpoints),
            self.block_tokens,
            places[:num_likely],
            num_spare,
            store_room,
            places[num_likely:],
            is_branch,
        )
        for position, kind in self._checkpoints.positions(facts):
            aligned = position // self.block_tokens * self.block_tokens
            if 0 < aligned <= lease.prompt_tokens:
                lease.plan.want(aligned, kind)
        lease.plan.restart(lease.computed)
        if resume.checkpoint is None and lease.computed in lease.plan.wanted:  # idle windows supplied this position
            self._placement.keep_begin(lease)

    def _plan_lifetimes(self, lease: Lease, lifetimes: Sequence[tuple[int, float]], client: str) -> None:
        """Note the lifetimes of checkpoints, and start those of checkpoints that are there."""
        plan = lease.plan
        plan.client = client
        for position, lifetime_s in lifetimes:
            aligned = position // self.block_tokens * self.block_tokens
            plan.lifetimes[aligned] = max(lifetime_s, plan.lifetimes.get(aligned, 0.0))
        plan.lifetimes.pop(0, None)
        self._placement.start_lifetimes(lease, 0, lease.computed)

    def _is_worth_keeping(self, lease: Lease, position: int) -> bool:
        """Whether a checkpoint at a likely place is worth more than what is evicted for it."""
        new_tokens = position - lease.lineage.continued_from
        candidate = self._prefixes.queue.inner(Kind.PARTING, lease.lineage.turn, new_tokens, lease.computed, position)
        return self._prefixes.queue.is_worth_keeping(candidate, self._prefixes.history.clock)

    def _count_request(self, lease: Lease, resume: Resume) -> None:
        missed = lease.prompt_tokens - resume.position
        self.stats.requests += 1
        self.stats.prompt_tokens += lease.prompt_tokens
        self.stats.hit_tokens += resume.position
        self.stats.misses[resume.missing] += missed
        if self._events.enabled:
            self._events.hit(resume.position)
            self._events.missed(missed, resume.missing)


def _check_load(num_loaded: int, num_tokens: int, num_drafts: int) -> None:
    if not 0 < num_loaded <= num_tokens or num_drafts:
        raise CacheError(f"cannot load {num_loaded} of {num_tokens} tokens: not more, and no drafts")


def _check_ttl(ttl_seconds: float) -> None:
    if not ttl_seconds > 0:
        raise CacheError(f"a pin cannot last {ttl_seconds:g} s: give it more than 0; unpin ends it")
