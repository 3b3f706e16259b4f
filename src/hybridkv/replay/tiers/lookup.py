"""The last position of a prompt that the tiers can supply: what `stream.lookup` finds in a store, without its names.

A store is asked position by position. Here an index of the positions at which objects end takes its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybridkv.replay.tiers.keys import PositionKeys
from hybridkv.replay.tiers.objects import Need, Objects
from hybridkv.replay.tiers.shelf import Shelf
from hybridkv.stream.lookup import EXACT_TOKENS


class Read(NamedTuple):
    """One object of a load, and the first tier that has it."""

    need: Need
    key: bytes
    level: int


class Supply(NamedTuple):
    """What the tiers can add to a request at `start`."""

    start: int
    end: int
    reads: Sequence[Read]

    def tokens_by_level(self) -> dict[int, int]:
        """Tokens by the tier that their full-attention KV is read from.

        Tokens whose KV is not read (memory has it, or the model has none) count for the lowest tier of the load.
        """
        tokens: defaultdict[int, int] = defaultdict(int)
        for read in self.reads:
            tokens[read.level] += read.need.tokens
        tokens[max(read.level for read in self.reads)] += self.end - self.start - sum(tokens.values())
        return dict(tokens)


class Index:
    """Positions at which objects end, by the stretch before them."""

    def __init__(self, objects: Objects, shelves: Sequence[Shelf]) -> None:
        self._objects = objects
        self._shelves = shelves
        self._offsets: defaultdict[bytes, set[int]] = defaultdict(set)

    def add(self, keys: PositionKeys, end: int) -> None:
        number, offset = divmod(end, self._objects.stretch_tokens)
        self._offsets[keys.stretch(number)].add(offset)

    def find(self, keys: PositionKeys, start: int, matched: int, limit: int) -> Supply | None:
        """The last position up to `limit` that the tiers can supply; None: none after the block of `start`."""
        size = self._objects.block_tokens
        if limit // size <= start // size:
            return None
        for end in self._ends(keys, (start // size + 1) * size, self._reach(keys, start, matched, limit)):
            reads = self._reads(keys, start, matched, end)
            if reads:
                return Supply(start, end, reads)
        return None

    def _reach(self, keys: PositionKeys, start: int, matched: int, limit: int) -> int:
        """Upper bound for full attention: all stored full stretches in a row, and part of one more."""
        objects, size = self._objects, self._objects.stretch_tokens
        if objects.first_full is None:
            return limit
        group = objects.groups[objects.first_full]
        number = objects.first_needed(group, start, matched, limit) // size + 1
        while number * size <= limit and self._level(objects.first_full, keys.stretch(number)) is not None:
            number += 1
        return min(limit, number * size)

    def _ends(self, keys: PositionKeys, first: int, reach: int) -> Iterator[int]:
        """Positions that may be stored, the last first. Engines look for ends inside blocks only near the last."""
        size, block = self._objects.stretch_tokens, self._objects.block_tokens
        for number in range(reach // size, first // size - 1, -1):
            for offset in sorted(self._offsets.get(keys.stretch(number), ()), reverse=True):
                end = number * size + offset
                if first <= end <= reach and (end % block == 0 or end > reach - EXACT_TOKENS):
                    yield end

    def _reads(self, keys: PositionKeys, start: int, matched: int, end: int) -> list[Read]:
        """All objects that are needed to resume at `end`; empty if one is missing."""
        reads = []
        # States are rarest, and come last: a position that lacks one is left at the first look.
        for need in reversed(list(self._objects.needs(start, matched, end))):
            key = keys.at(need.end)
            level = self._level(need.group, key)
            if level is None:
                return []
            reads.append(Read(need, key, level))
        return reads

    def _level(self, group: int, key: bytes) -> int | None:
        for level, shelf in enumerate(self._shelves):
            if shelf.has(group, key):
                return level
        return None
