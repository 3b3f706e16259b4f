"""Store lookup for one prompt: the last position, beyond the prefix in memory, at which every group can resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.store import Store
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.form import Share, StoredGroup

EXACT_TOKENS = 512
"""Replies end at any token. So many positions are looked up one by one, the last ones; before them only block ends."""
_BATCH = 64
"""Positions of the first round trip. Later ones ask for more and more: for long prompts there are only a few of them.

The position is nearly always among the last ones; stores that take one request a name should not be asked for all.
"""

KeysAt = Callable[[Iterable[int]], Mapping[int, bytes]]


class Prompt(NamedTuple):
    """What is looked up."""

    keys_at: KeysAt
    start: int
    """Where it resumes without a store."""
    limit: int
    """The last position at which it may resume."""
    matched: int = 0
    """Memory has its full-attention KV up to here: blocks before that need not be stored."""
    taps: Collection[str] = ()
    """Groups of tapped layers that it needs, too."""


class Found(NamedTuple):
    """The answer to a lookup."""

    position: int
    """The last position after the block of `start` that the store can supply; `start` if there is none."""
    matched: int
    """Full-attention KV is stored up to here at least: whole stretches. It may be deeper than `position`."""


def last_stored(store: Store, catalogue: Catalogue, prompt: Prompt) -> Found:
    """How far the store can supply a prompt.

    The call makes a few round trips (docs/streaming.md) and blocks on the store: do not call it on the engine thread.
    """
    return _Lookup(store, catalogue, prompt).find()


class _Lookup:
    """Lookup of one prompt."""

    def __init__(self, store: Store, catalogue: Catalogue, prompt: Prompt) -> None:
        self._store = store
        self._catalogue = catalogue
        self._prompt = prompt
        self._token_groups = catalogue.needed(prompt.taps)
        self._matched = prompt.start
        self._others = False
        """Whether engines of other tensor-parallel sizes have stored parts of this prompt."""

    def find(self) -> Found:
        for ends in self._batches():
            gated = self._gated(ends)
            alone = gated[:1] if len(ends) <= _BATCH else []  # it is nearly always complete: do not ask for the others
            for some in (alone, gated[len(alone) :]):
                end = self._first_complete(some)
                if end is not None:
                    return Found(end, max(end, self._matched))
        return Found(self._prompt.start, self._matched)

    def _batches(self) -> Iterator[list[int]]:
        """Positions to look up, the last first."""
        size, reach = self._catalogue.block_tokens, self._reach()
        first = (self._prompt.start // size + 1) * size
        exact = max(first, reach - EXACT_TOKENS + 1)
        ones = list(range(reach, exact - 1, -1))
        yield from (batch for batch in (ones[:_BATCH], ones[_BATCH:]) if batch)
        ends, count = iter(range((exact - 1) // size * size, first - 1, -size)), _BATCH
        while batch := list(islice(ends, count)):
            yield batch
            count *= 2

    def _reach(self) -> int:
        """Upper bound for full attention: all stored full stretches in a row, and part of one more."""
        catalogue, prompt = self._catalogue, self._prompt
        full = [group for group in catalogue.token_groups if group.role is Role.FULL]
        if not full:
            return prompt.limit
        start = self._first_needed(full[0], prompt.limit)
        ends = list(catalogue.stretch_ends(start, prompt.limit))
        found = self._may_have(full[0], ends)
        num_found = next((number for number, end in enumerate(ends) if end not in found), len(ends))
        tokens = catalogue.stretch_blocks * catalogue.block_tokens
        self._matched = ends[num_found - 1] if num_found else prompt.start
        return min(prompt.limit, (start // tokens + num_found + 1) * tokens)

    def _gated(self, ends: Sequence[int]) -> list[int]:
        """Positions that one group may have. What is rarest is asked: states, else hidden states, windows, full KV."""
        tokens = sorted(self._token_groups, key=lambda group: (group.role is Role.FULL, group.role is not Role.TAP))
        groups = [*self._catalogue.state_groups, *tokens]
        gate = next((group for group in groups if all(self._needs_end(group, end) for end in ends)), None)
        if gate is None:
            return list(ends)
        found = self._may_have(gate, ends)
        return [end for end in ends if end in found]

    def _needs_end(self, group: StoredGroup, end: int) -> bool:
        """Whether an object of the group that ends at `end` is needed to resume there."""
        return end > self._first_needed(group, end) and self._catalogue.num_tokens(group, end) > 0

    def _may_have(self, group: StoredGroup, ends: Sequence[int]) -> set[int]:
        """Positions at which the first object of some way to divide the slices exists.

        Other ways than this engine's are looked up at block ends, and everywhere once an object of another was found.
        """
        own, *others = (way[0] for way in group.ways)
        size = self._catalogue.block_tokens
        asked = [
            (end, share) for end in ends for share in (own, *others) if share is own or self._others or end % size == 0
        ]
        found = self._stored(group, asked)
        if not self._others and any(share is not own for _, share in found):
            self._others = True
            found += self._stored(group, [(end, share) for end in ends for share in others if end % size])
        return {end for end, _ in found}

    def _stored(self, group: StoredGroup, asked: Sequence[tuple[int, Share]]) -> list[tuple[int, Share]]:
        """Those of the objects, given by their ends and shares, that exist."""
        if not asked:
            return []
        keys = self._prompt.keys_at({end for end, _ in asked})
        is_there = self._store.lookup([self._catalogue.name(group, keys[end], share) for end, share in asked])
        return [one for one, found in zip(asked, is_there, strict=True) if found]

    def _first_complete(self, ends: Sequence[int]) -> int | None:
        """The first end at which every group has all slices of every object it needs, divided in one way or another."""
        needed = {end: self._needed_at(end) for end in ends}
        lacking = self._lacking(set().union(*needed.values()), lambda group: group.ways[:1])
        if ends and needed[ends[0]] & lacking:
            lacking = self._lacking(lacking, lambda group: group.ways[1:])
        return next((end for end in ends if not needed[end] & lacking), None)

    def _needed_at(self, end: int) -> set[tuple[StoredGroup, int]]:
        """Groups and ends of the objects that are needed to resume at `end`."""
        tokens = {(group, one) for group in self._token_groups for one in self._needs(group, end)}
        return tokens | {(group, end) for group in self._catalogue.state_groups}

    def _lacking(
        self, needed: Collection[tuple[StoredGroup, int]], ways_of: Callable[[StoredGroup], list[list[Share]]]
    ) -> set[tuple[StoredGroup, int]]:
        """Those of the needed groups and ends of which none of these ways has all slices."""
        keys = self._prompt.keys_at({end for _, end in needed})
        names = {
            (group, end): [[self._catalogue.name(group, keys[end], share) for share in way] for way in ways_of(group)]
            for group, end in needed
        }
        asked = [name for ways in names.values() for way in ways for name in way]
        found = dict(zip(asked, self._store.lookup(asked), strict=True)) if asked else {}
        return {one for one, ways in names.items() if not any(all(found[name] for name in way) for way in ways)}

    def _needs(self, group: StoredGroup, end: int) -> list[int]:
        return self._catalogue.ends(group, self._first_needed(group, end), end)

    def _first_needed(self, group: StoredGroup, end: int) -> int:
        """Objects up to here are not needed to resume at `end`. Memory supplies whole blocks only."""
        prompt, size = self._prompt, self._catalogue.block_tokens
        return max(prompt.start, min(prompt.matched, end // size * size)) if group.role is Role.FULL else prompt.start
