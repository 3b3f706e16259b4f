"""What a store can add to a prompt beyond what is in memory: one position that every group can resume at."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache import Role
from hybridkv.store import Store
from hybridkv.stream.catalogue import Catalogue, StoredGroup

_BATCH = 64
"""Positions that are asked for at once."""


class Finder:
    """Looks prompts up in a store, in few round trips. Waits for the store: call it from a thread."""

    def __init__(self, store: Store, catalogue: Catalogue) -> None:
        self._store = store
        self._catalogue = catalogue

    def find(self, keys: Sequence[bytes], start: int) -> int:
        """The last position after `start` that the store can supply; `start` if there is none.

        `keys`: the names of the prompt's whole blocks, as far as it may be resumed.
        """
        reach = self._reach(keys, start)
        blocks = range(reach // self._catalogue.block_tokens, start // self._catalogue.block_tokens, -1)
        for first in range(0, len(blocks), _BATCH):
            for block in self._gated(keys, blocks[first : first + _BATCH]):
                if self._has_all(keys, start, block * self._catalogue.block_tokens):
                    return block * self._catalogue.block_tokens
        return start

    def _reach(self, keys: Sequence[bytes], start: int) -> int:
        """How far full attention can go at most: through all full stretches, and the part of one more."""
        catalogue = self._catalogue
        end = len(keys) * catalogue.block_tokens
        full = [group for group in catalogue.token_groups if group.cache.role is Role.FULL]
        if not full:
            return end
        ends = list(catalogue.stretch_ends(start, end))
        found = self._lookup(full[0], keys, ends)
        num_found = found.index(False) if False in found else len(found)
        tokens = catalogue.stretch_blocks * catalogue.block_tokens
        return min(end, (start // tokens + num_found + 1) * tokens)

    def _gated(self, keys: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Those of the blocks' ends that one group has: states, if there are some, since they are the rarest."""
        gate = next(iter(self._catalogue.state_groups), None)
        ends = [block * self._catalogue.block_tokens for block in blocks]
        if gate is None:
            gate = self._catalogue.token_groups[0]
            if not all(self._catalogue.stretch(gate, end).num_blocks for end in ends):
                return list(blocks)
        found = self._lookup(gate, keys, ends)
        return [block for block, is_there in zip(blocks, found, strict=True) if is_there]

    def _has_all(self, keys: Sequence[bytes], start: int, end: int) -> bool:
        catalogue = self._catalogue
        names = [
            catalogue.name(group, keys[e // catalogue.block_tokens - 1])
            for group in catalogue.token_groups
            for e in catalogue.ends(group, start, end)
        ]
        names += [catalogue.name(group, keys[end // catalogue.block_tokens - 1]) for group in catalogue.state_groups]
        return all(self._store.lookup(names))

    def _lookup(self, group: StoredGroup, keys: Sequence[bytes], ends: Sequence[int]) -> list[bool]:
        if not ends:
            return []
        size = self._catalogue.block_tokens
        return self._store.lookup([self._catalogue.name(group, keys[end // size - 1]) for end in ends])
