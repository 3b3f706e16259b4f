"""Random lives of many requests over random layouts, checked at every step.

One engine drives it with two sources of chance: hypothesis (which shrinks) and a seeded generator (for long runs).
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hybridkv.cache import (
    POLICIES,
    Cache,
    CacheGroup,
    CacheLayout,
    Explanation,
    Lease,
    LookupKey,
    Match,
    NoRoom,
    Pin,
    PinnedPages,
    PinState,
    Role,
    Segment,
    StepTables,
    lookup_key,
)
from hybridkv.cache.index.tree import State
from hybridkv.cache.retention.policy import PromptEndBranchesGrid
from hybridkv.cache.steps.lease import InFlight
from hybridkv.cache.steps.running import Pinned
from hybridkv.cache.tokens import TOKEN_BYTES, pack_tokens
from hybridkv.sight import Sight
from tests.cache.sim import Sim, Value

T = TypeVar("T")
BLOCK = 4


class Chance:
    """Where choices come from."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer

    def choice(self, items: Sequence[T]) -> T:
        return items[self.integer(0, len(items) - 1)]

    def one_in(self, n: int) -> bool:
        return self.integer(1, n) == n


def random_layout(chance: Chance) -> CacheLayout:
    """Some full groups, up to two windows and a chunk, up to two states, up to two taps."""
    groups = [CacheGroup(f"full{i}", Role.FULL, chance.integer(1, 5)) for i in range(chance.integer(0, 2))]
    for i in range(chance.integer(0, 2)):
        groups.append(
            CacheGroup(f"window{i}", Role.LOCAL, chance.integer(1, 5), sight=Sight(window=chance.integer(1, 14)))
        )
    if chance.one_in(4):
        groups.append(CacheGroup("chunk", Role.LOCAL, chance.integer(1, 4), sight=Sight(chunk=chance.integer(1, 12))))
    for i in range(chance.integer(0, 2)):
        size = chance.integer(1, 3)
        groups.append(CacheGroup(f"state{i}", Role.STATE, chance.integer(1, 3), pages_per_state=size))
    if not groups:
        groups.append(CacheGroup("full0", Role.FULL, 3))
    for i in range(chance.integer(0, 2)):
        groups.append(CacheGroup(f"tap{i}", Role.TAP, 2, pool="taps"))
    return CacheLayout.of(groups, block_tokens=BLOCK, num_slabs=chance.choice([chance.integer(4, 60), 400]))


class Naive:
    """What must be found as long as nothing was evicted or thrown away: prefixes, as plain tuples of tokens."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, ...]] = set()
        self.ends: set[tuple[int, ...]] = set()

    def computed(self, key: bytes, tokens: bytes | bytearray, position: int) -> None:
        ids = _ids(key, tokens)
        self.blocks |= {ids[: 1 + end] for end in range(BLOCK, position + 1, BLOCK)}

    def ended(self, key: bytes, tokens: bytes | bytearray, position: int) -> None:
        self.ends.add(_ids(key, tokens)[: 1 + position])

    def matched(self, key: bytes, tokens: bytes) -> int:
        """The longest run of blocks that some request has computed, short of the last token."""
        ids, n = _ids(key, tokens), 0
        while n + BLOCK < len(ids) - 1 and ids[: 1 + n + BLOCK] in self.blocks:
            n += BLOCK
        return n

    def resumable(self, key: bytes, tokens: bytes) -> int:
        """The longest prefix that some request stopped at."""
        ids = _ids(key, tokens)
        return max((n for n in range(len(ids) - 1) if ids[: 1 + n] in self.ends), default=0)


def _ids(key: bytes, tokens: bytes | bytearray) -> tuple[int, ...]:
    """The tenant, then the tokens."""
    return (int.from_bytes(key[:7], "little"), *array("i", bytes(tokens)))


class Fuzz:
    """One cache and its users."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.layout = random_layout(chance)
        self.now = 0.0
        self.sim = Sim(
            self.layout,
            at_once=chance.one_in(2),
            policy=chance.choice(list(POLICIES)),
            checkpoint_policy=PromptEndBranchesGrid(
                chance.choice([None, 8, 16]), fill_tokens=chance.choice([None, 4, 8])
            ),
            clock=lambda: self.now,
            event_limit=10,
        )
        self.cache: Cache = self.sim.cache
        self.idle: list[Lease] = []
        self.flying: list[tuple[Lease, bool]] = []
        self.num_good: dict[int, int] = {}
        """Of leases whose load has gone wrong: how many tokens of it are right."""
        self.pins: list[Pin] = []
        self.pinned: dict[Pin, PinnedPages] = {}
        """Where the pages of pins were when they were first ready."""
        self.flying_places: dict[int, tuple[InFlight | None, object]] = {}
        """By lease: its step in flight, and where its pages are."""
        self.ended: list[list[int]] = []
        """Requests that left a checkpoint: something to pin."""
        self.looked: list[tuple[list[int], LookupKey, Match]] = []
        """Requests that have been looked up and have yet to begin: matches of any age."""
        self.texts: list[list[int]] = [[]]
        self.taps = [group.name for group in self.layout.tap_groups]
        self.naive: Naive | None = Naive()
        self.num_ops = 0
        self.counts: dict[str, int] = {}

    def step(self) -> None:
        """One random verb, then all checks."""
        verbs = [
            *[self.begin] * 4,
            *[self.look] * 2,
            *[self.extend] * 8,
            *[self.load] * 2,
            *[self.commit] * 8,
            *[self.run_ahead] * 2,
            *[self.release] * 2,
            self.abort,
            self.fork,
            self.drop_taps,
            self.rollback,
            *[self.pin] * 2,
            self.unpin,
            self.renew,
            self.compact,
            self.wait,
            *[self.acknowledge] * 3,
            self.spoil,
            self.look_around,
            self.drop,
        ]
        verb = self.reset if self.chance.integer(1, 200) == 1 else self.chance.choice(verbs)
        verb()
        stats = self.cache.stats
        if stats.blocks_evicted or stats.checkpoints_evicted or stats.invalid_pages or self.cache.epoch:
            self.naive = None  # from now on the tree itself is asked, by brute force
        self.num_ops += 1
        self.counts[verb.__name__] = self.counts.get(verb.__name__, 0) + 1

    def check(self) -> None:
        self.cache.check_integrity()
        self.sim.run_operations()  # pages that were moved have their content only now
        assert not self.sim.reachable_taint()
        self._check_pins()
        self._check_flying()
        for _, key, match in self.looked:
            self._check_match(key, match)

    def _check_flying(self) -> None:
        """Pages of a step in flight are where they were."""
        places: dict[int, tuple[InFlight | None, object]] = {}
        for lease, _ in self.flying:
            assert lease.step is not None
            states = [state.pages for state in (*lease.pages.states, *lease.step.old_states) if state is not None]
            here = ({name: list(table) for name, table in lease.named_tables.items()}, states)
            step, before = self.flying_places.get(lease.id, (None, None))
            assert step is not lease.step or here == before
            places[lease.id] = (lease.step, here)
        self.flying_places = places

    def _check_pins(self) -> None:
        """Pages of live pins are where they were, with what they held; pins end when they should."""
        self.pins = [pin for pin in self.pins if pin.ended is None]
        assert set(self.pins) >= set(self.cache.pins), "a pin that was made by nobody"
        self.pins = [pin for pin in self.pins if pin.ended is None]
        for pin in self.pins:
            assert pin.expires_at > self.now
            assert pin.state is PinState.READY or self.sim.unacknowledged
            if pin.state is PinState.READY:
                assert pin.pages == self.pinned.setdefault(pin, copy.deepcopy(pin.pages))
                self.sim.check_pinned(pin)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Match now, begin some other time."""
        if len(self.looked) < 8:
            tokens, key = self._prompt(), self._key()
            self.looked.append((tokens, key, self.cache.match(tokens, key)))

    def _check_match(self, key: LookupKey, match: Match) -> None:
        """A match that would be used finds what a new one finds."""
        if match.found.is_current:
            now = self.cache.match(match.found.tokens, key)
            assert (now.found.path, now.found.resume) == (match.found.path, match.found.resume)

    def begin(self) -> None:
        if len(self.idle) + len(self.flying) >= 8:
            return
        tokens, key, old = self._prompt(), self._key(), None
        if self.looked and self.chance.one_in(2):
            tokens, key, old = self.looked.pop(self.chance.integer(0, len(self.looked) - 1))
            self.counts["used match"] = self.counts.get("used match", 0) + old.found.is_current
        assert len(self.cache.pins) <= len(self.pins)  # expires pins, as begin will: what only they held is gone then
        match = self.cache.match(tokens, key)
        expected = self.sim.brute_force_resume(pack_tokens(tokens), key.root, key.taps)
        assert match.num_tokens == expected
        if self.naive is not None and not key.taps:
            packed = pack_tokens(tokens)
            assert match.num_tokens >= self.naive.resumable(key.root, packed)
            if any(group.role is Role.FULL for group in self.layout.token_groups):
                assert match.matched_tokens == self.naive.matched(key.root, packed)
        if self.chance.one_in(2):
            self.cache.follow(match)
        breakpoints = [self.chance.integer(1, len(tokens))] if self.chance.one_in(3) else []
        explained = self.cache.explain(old or match)
        lifetimes = [(one, self.chance.integer(1, 50)) for one in breakpoints if self.chance.one_in(2)]
        client = str(self.chance.integer(0, 2))
        lease = self.cache.begin(tokens, key, breakpoints=breakpoints, match=old, lifetimes=lifetimes, client=client)
        self._check_explanation(explained, lease)
        assert (lease.cached_tokens, lease.matched_tokens) == (expected, match.matched_tokens)
        self.idle.append(lease)

    def _check_explanation(self, explained: Explanation, lease: Lease) -> None:
        """It says where the request begins, and no group supplies less than that."""
        position, matched = explained.position, explained.matched_tokens
        assert (position, matched) == (lease.cached_tokens, lease.matched_tokens)
        assert matched <= explained.parted_at <= lease.num_tokens
        assert position <= max(explained.last_position, lease.num_tokens - 1)
        assert explained.checkpoint is None or explained.checkpoint.position == position
        names = {group.name for group in self.layout.groups if group.role is not Role.TAP}
        assert {group.name for group in explained.groups} - set(self.taps) == names
        for group in explained.groups:
            assert position % BLOCK or group.supplies >= position
            if group.role is Role.STATE and position:
                assert position in group.positions or group.num_positions > len(group.positions)
            assert all(0 <= start < end <= matched for start, end in group.runs)
        if explained.evicted is not None:
            assert position < explained.evicted.position <= matched + BLOCK
            assert explained.evicted.seconds_ago >= 0

    def look_around(self) -> None:
        """Views change nothing, and add up."""
        before, inspector = self.cache.inspector.version, self.cache.inspector
        shown = inspector.memory_map(self.chance.choice([4, 4096]), 4)
        assert {pool.name: pool.used_pages for pool in shown.pools} == self.cache.pages_in_use()
        assert {pool.name: pool.slabs for pool in shown.pools} == self.cache.slabs_in_use()
        assert len(shown.owners) == len(shown.used) <= self.layout.num_slabs
        assert all(0 <= used <= 255 for used in shown.used)
        tree = inspector.prefix_tree(self.chance.choice([2, 1000]))
        assert len(tree.runs) <= tree.num_runs
        for run in tree.runs:
            found = inspector.prefix(run.key)
            assert found is not None
            assert (run.start, run.end) == (found[0], len(found[1]) // TOKEN_BYTES)
            assert run.end > run.start
        assert inspector.version == before

    def drop(self) -> None:
        """Somebody drops a run. Requests that run there go on."""
        tree = self.cache.inspector.prefix_tree()
        if tree.runs:
            run = self.chance.choice(tree.runs)
            assert self.cache.inspector.drop(run.key) >= run.end - run.start
            assert self.cache.inspector.prefix(run.key) is None
            self.naive = None

    def extend(self) -> None:
        lease = self._pick_idle()
        if lease is None:
            return
        if lease.computed == lease.num_tokens:
            lease.append([self.chance.integer(0, 1)])
        count = self.chance.integer(1, min(12, lease.num_tokens - lease.computed))
        may_cut, drafts = self.chance.one_in(3), []
        if self.chance.one_in(4):
            drafts = [self.chance.integer(0, 1) for _ in range(self.chance.integer(1, 4))]
            count = lease.num_tokens - lease.computed + len(drafts)
        known = lease.num_tokens
        if self.sim.extend(lease, count, may_cut=may_cut, drafts=drafts) is not None:
            self.idle.remove(lease)
            self.flying.append((lease, may_cut or bool(drafts)))
            return
        assert lease.num_tokens == known
        count = min(count, lease.num_tokens - lease.computed)
        if not self.flying and self.chance.one_in(2):
            self.sim.acknowledge_all()
            if self.sim.extend(lease, count) is None:  # preempt the youngest
                self._let_go(self.idle[-1])
            else:
                self.idle.remove(lease)
                self.flying.append((lease, False))

    def run_ahead(self) -> None:
        """A request decodes: each step of one token runs before the last one is committed, on the pages it will get."""
        fit = [lease for lease, may_cut in self.flying if not may_cut and self._is_decoding(lease)]
        lease = self.chance.choice(fit) if fit else self._pick_idle()
        if lease is None:
            return
        if not fit:
            if lease.computed == lease.num_tokens:
                lease.append([self.chance.integer(0, 1)])
            if self.sim.extend(lease, lease.num_tokens - lease.computed) is None:
                return
            self.idle.remove(lease)
            self.flying.append((lease, False))
        for _ in range(self.chance.integer(1, 6)):
            if not self._is_decoding(lease) or not self._run_one_ahead(lease):
                return

    def _run_one_ahead(self, lease: Lease) -> bool:
        """Others may be committed and extended before it runs."""
        assert lease.step is not None
        start, end, token = lease.step.start, lease.step.end, self.chance.integer(0, 1)
        states = [state.pages for state in lease.pages.states if state is not None]
        names = [group.name for group in self.layout.state_groups]
        segments = {name: [Segment(start, end, at, at)] for name, at in zip(names, states, strict=True)}
        tables = {name: pages[:] for name, pages in lease.named_tables.items()}
        ahead = self.cache.extend_ahead(lease, StepTables(start, end, BLOCK, tables, segments))
        self.sim.run_operations()
        self.flying_places.pop(lease.id, None)  # it may have a block more
        if ahead is None:
            return False
        self.flying.remove((lease, False))
        for _ in range(self.chance.integer(0, 2)):
            self.chance.choice([self.commit, self.extend])()
        self.flying.append((lease, False))
        if lease.step.poisoned is not None:
            return False
        lease.append([token])
        self.sim.run(lease, ahead)
        lease.forget_after(end)
        assert self.cache.commit(lease, sampled=[token]) == end
        if self.naive is not None:
            self.naive.computed(lease.root_key, lease.tokens, end)
        given = self.cache.extend(lease, 1)
        self.sim.run_operations()
        assert isinstance(given, StepTables)
        assert (given.start, given.end, given.segments) == (ahead.start, ahead.end, ahead.segments)
        for name, pages in given.tables.items():
            assert pages[end // BLOCK :] == ahead.tables[name][end // BLOCK :]
        kind = "ran ahead" if end % BLOCK else "ran ahead into a block"
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return True

    def _is_decoding(self, lease: Lease) -> bool:
        """Whether its step is sound and computes all its tokens, with states that are not None."""
        is_sound = lease.id not in self.num_good and not lease.aborted and None not in lease.pages.states
        return is_sound and lease.step is not None and lease.step.end == lease.num_tokens

    def load(self) -> None:
        """Some tokens come from elsewhere, with or without others that are computed after them."""
        lease = self._pick_idle()
        if lease is not None and self.chance.one_in(3):  # so that the index has blocks to copy
            self.cache.rollback(lease, self.chance.integer(0, lease.computed))
        if lease is None or lease.computed >= lease.num_tokens:
            return
        most = lease.num_tokens - lease.computed
        num_loaded = self.chance.integer(1, most)
        count = self.chance.integer(num_loaded, most) if self.chance.one_in(2) else num_loaded
        num_good = self.chance.integer(0, num_loaded - 1) if self.chance.one_in(3) else None
        if not self._extend_by_load(lease, count, num_loaded, num_good):
            return
        if num_good is not None:
            self.num_good[lease.id] = num_good

    def _extend_by_load(self, lease: Lease, count: int, num_loaded: int, num_good: int | None = None) -> bool:
        """Whether there was room. The index must have been asked for every block."""
        step = self.sim.extend(lease, count, num_loaded=num_loaded, num_good=num_good)
        if step is None:
            return False
        assert step.loaded is not None
        assert step.loaded.copied == self._known_blocks(lease, step.start)
        self.counts["copied"] = self.counts.get("copied", 0) + sum(map(len, step.loaded.copied.values()))
        self.idle.remove(lease)
        self.flying.append((lease, False))
        return True

    def _known_blocks(self, lease: Lease, end: int) -> dict[str, list[int]]:
        """By token group that a lease uses: its blocks before `end` that the index has and that are seen from there."""
        index, known = self.cache._prefixes.index, dict[str, list[int]]()
        path = [] if lease.leaf.dead else index.walk(lease.root_key, lease.tokens, end // BLOCK)
        for group, place in zip(self.cache._groups.token_groups, range(len(lease.pages.tables)), strict=True):
            seen = range(max(lease.computed // BLOCK, group.sight.first_visible(end) // BLOCK), end // BLOCK)
            pages = [page for node, count in path for page in (node.pages[place] or [0] * node.num_blocks)[:count]]
            blocks = [block for block in seen if block < len(pages) and pages[block]]
            if blocks and lease.pages.tables[place] is not None:
                known[group.name] = blocks
        return known

    def commit(self) -> None:
        if not self.flying:
            return
        lease, may_cut = self.flying.pop(self.chance.integer(0, len(self.flying) - 1))
        assert lease.step is not None
        if lease.id in self.num_good:
            self._commit_bad_load(lease, self.num_good.pop(lease.id))
            return
        length, loaded_to = lease.step.end - lease.step.start, lease.step.loaded_to
        if lease.aborted:
            self.cache.commit(lease, failed=self.chance.one_in(2))
            return
        before, poisoned, known = lease.computed, lease.poisoned, lease.step.num_known
        if self.chance.one_in(6) or poisoned is not None:
            self.cache.commit(lease, sampled=[1], failed=poisoned is None)
            assert lease.computed <= before
            assert lease.num_tokens == known, "a token from a step that does not count"
        elif may_cut or (not self.layout.state_groups and self.chance.one_in(4)) or self.chance.one_in(20):
            accepted = self.chance.integer(0, length)
            self.cache.commit(lease, accepted)
            assert lease.computed <= before + accepted
            assert poisoned is not None or not may_cut or lease.computed >= before
            if loaded_to and before + accepted >= loaded_to:
                assert lease.computed >= loaded_to, "the state at the end of the load was there to go back to"
        else:
            self.cache.commit(lease, sampled=[self.chance.integer(0, 1)] * self.chance.integer(0, 1))
            assert lease.computed == before + length or poisoned is not None
        if poisoned is not None:
            assert lease.computed <= poisoned
        if self.naive is not None:
            self.naive.computed(lease.root_key, lease.tokens, lease.computed)
        self.idle.append(lease)

    def _commit_bad_load(self, lease: Lease, num_good: int) -> None:
        """Whatever is told of it, no more counts than what is right; the tainted rest must be out of reach."""
        before, aborted = lease.computed, lease.aborted
        is_sound = lease.poisoned is None and not lease.leaf.dead and not aborted and before % BLOCK == 0
        if self.chance.one_in(2):
            self.cache.commit(lease, failed=True, sampled=[1])
            assert lease.computed <= before
        else:
            self.cache.commit(lease, num_good)
            assert lease.computed <= before + num_good
            if not self.layout.state_groups and not any(g.role is Role.LOCAL for g in self.layout.token_groups):
                assert not is_sound or lease.computed == (before + num_good) // BLOCK * BLOCK
        if not aborted:
            self.idle.append(lease)
            if self.naive is not None:
                self.naive.computed(lease.root_key, lease.tokens, lease.computed)

    def release(self) -> None:
        lease = self._pick_idle()
        if lease is not None:
            self._let_go(lease)

    def abort(self) -> None:
        running = self.idle + [lease for lease, _ in self.flying]
        if running:
            lease = self.chance.choice(running)
            self.cache.abort(lease)
            if lease in self.idle:
                self.idle.remove(lease)

    def fork(self) -> None:
        lease = self._pick_idle()
        if lease is not None and len(self.idle) < 8:
            twins = self.cache.fork(lease, self.chance.integer(1, 2))
            if not isinstance(twins, NoRoom):
                self.idle += twins

    def drop_taps(self) -> None:
        lease = self._pick_idle()
        if lease is not None:
            self.cache.drop_taps(lease)
            assert not [name for name in lease.named_tables if name in self.taps]

    def rollback(self) -> None:
        lease = self._pick_idle()
        if lease is not None:
            limit = self.chance.integer(0, lease.computed)
            assert self.cache.rollback(lease, limit) <= limit

    def pin(self) -> None:
        if len(self.cache.pins) >= 3:
            return
        tokens = self.chance.choice(self.ended) if self.ended and not self.chance.one_in(4) else self._prompt()
        limit = self.chance.integer(0, len(tokens)) if self.chance.one_in(3) else len(tokens)
        key = lookup_key(taps=[tap for tap in self.taps if self.chance.one_in(4)])
        self.cache.match(tokens, key)  # the oracle knows taps only from their first use on
        expected = self.sim.brute_force_resume(pack_tokens([*tokens[:limit], 0]), key.root, key.taps)
        pin = self.cache.pin(tokens, self.chance.integer(1, 5), key, limit=limit)
        assert pin.num_tokens == expected
        self.pins.append(pin)
        self.counts["pinned"] = self.counts.get("pinned", 0) + bool(expected)

    def unpin(self) -> None:
        if self.pins:
            pin = self.chance.choice(self.pins)
            self.cache.unpin(pin)
            assert pin.ended is not None

    def renew(self) -> None:
        if live := self.cache.pins:
            pin, ttl = self.chance.choice(live), self.chance.integer(1, 5)
            self.cache.renew(pin, ttl)
            assert pin.expires_at == self.now + ttl

    def compact(self) -> None:
        self.cache._reclaimer.compactor.compact({}, Pinned(self.cache._running))

    def wait(self) -> None:
        self.now += 1

    def acknowledge(self) -> None:
        waiting = self.sim.unacknowledged
        if waiting:
            self.cache.acknowledge(waiting.pop(self.chance.integer(0, len(waiting) - 1)))

    def reset(self) -> None:
        self.cache.reset()

    def spoil(self) -> None:
        """A page goes bad, some requests use it before anyone knows, then it is found out."""
        lease = self._pick_idle()
        if lease is None:
            return
        places = self._places(lease)
        if not places:
            return
        name, where = self.chance.choice(places)
        page = where()
        slots = self.sim.memory.page(self.sim.groups[name].pool_name, page)
        self.sim.run_operations()
        for slot, value in list(slots.items()):
            slots[slot] = Value(value.prefix, tainted=True)
        if self.chance.one_in(3) and len(self.idle) < 8:
            twins = self.cache.fork(lease, 1)
            if not isinstance(twins, NoRoom):
                self.sim.run_operations()
                self.idle += twins
        # Other pages may be let go of by a commit: then nobody could be told any more.
        published = self.sim.groups[name].role in (Role.FULL, Role.TAP) and any(
            table is not None and page in table[: lease.leaf.end] for table in lease.pages.tables
        )
        for user in [lease, *self.idle]:
            if user in self.idle and user.computed < user.num_tokens and self.chance.one_in(2):
                most = min(9, user.num_tokens - user.computed) if not published else 1
                if self.chance.one_in(3):  # it may copy the page, and no step commits before the page is reported
                    if user is not lease:
                        self.cache.rollback(user, self.chance.integer(0, user.computed))
                    count = self.chance.integer(1, user.num_tokens - user.computed)
                    self._extend_by_load(user, count, self.chance.integer(1, count))
                    continue
                count, may_cut = self.chance.integer(1, most), published or self.chance.one_in(2)
                if self.sim.extend(user, count, may_cut=may_cut) is None:
                    continue
                if published and self.chance.one_in(2):
                    self.cache.commit(user)
                else:
                    self.idle.remove(user)
                    self.flying.append((user, may_cut))
        self.cache.invalidate({name: [where()]})  # it may have moved
        self.counts["spoiled"] = self.counts.get("spoiled", 0) + 1

    def finish(self) -> None:
        """All leave; nothing may be left."""
        for lease, _ in self.flying:
            self.cache.commit(lease, failed=lease.id in self.num_good)
            self.cache.abort(lease)
        self.flying = []
        for lease in self.idle:
            self.cache.release(lease, keep=self.chance.one_in(2))
        self.check()
        self.cache.reset()
        self.check()
        for pin in self.cache.pins:
            self.cache.unpin(pin)
        self.sim.acknowledge_all()
        self.check()
        assert not self.cache.leases
        assert set(self.cache.pages_in_use().values()) == {0}

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        """Something new, or a piece of something old with something new after it."""
        old = self.chance.choice(self.texts)
        kept = old[: self.chance.integer(0, len(old))]
        new = [self.chance.integer(0, 1) for _ in range(self.chance.integer(1, 24))]
        text = (kept + new)[:120]
        if len(self.texts) < 12:
            self.texts.append(text)
        else:
            self.texts[self.chance.integer(1, 11)] = text
        return text

    def _key(self) -> LookupKey:
        salt = self.chance.choice(["", "", "", "x"])
        return lookup_key(salt, taps=[tap for tap in self.taps if self.chance.one_in(3)])

    def _pick_idle(self) -> Lease | None:
        return self.chance.choice(self.idle) if self.idle else None

    def _let_go(self, lease: Lease) -> None:
        keep = not self.chance.one_in(4)
        position, tokens, key = lease.computed, bytes(lease.tokens), lease.root_key
        usable = keep and position and not lease.leaf.dead
        self.idle.remove(lease)
        self.cache.release(lease, keep=keep)
        if usable and key == lookup_key().root:
            self.ended = [*self.ended[-5:], list(array("i", tokens))]
        if usable and self.naive is not None:
            self.naive.ended(key, tokens, position)
        if usable and position < len(tokens) // 4 and not lease.taps:
            # Where it stopped, it can go on.
            assert self.sim.brute_force_resume(tokens[: (position + 1) * 4], key) == position

    def _places(self, lease: Lease) -> list[tuple[str, Callable[[], int]]]:
        """Where a lease holds computed content: the group, and how to find the page now."""
        places: list[tuple[str, Callable[[], int]]] = []
        groups = self.cache._groups.token_groups
        for index, (group, table) in enumerate(zip(groups, lease.pages.tables, strict=True)):
            first = lease.pages.local_first[index]
            last = min(-(-lease.computed // BLOCK), len(table or ()))
            if table is not None:
                places += [(group.name, partial(table.__getitem__, i)) for i in range(first, last)]
        for group, state in zip(self.layout.state_groups, lease.pages.states, strict=True):
            if state is not None:
                places.append((group.name, partial(_first_page, state)))
        return places


def _first_page(state: State) -> int:
    return state.pages[0]
