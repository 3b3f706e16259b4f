"""Store lookup for one prompt: the last position, beyond the prefix in memory, at which every group can resume."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hybridkv.cache import Role
from hybridkv.store import ObjectName, Store
from hybridkv.stream.catalogue import Catalogue, StoredGroup

_BATCH = 64
"""Positions per lookup."""


def last_stored(
    store: Store, catalogue: Catalogue, keys: Sequence[bytes], start: int, taps: Collection[str] = ()
) -> int:
    """The last position after `start` that the store can supply; `start` if there is none.

    `keys`: of the prompt's full blocks, up to the last position at which it may resume. `taps`: groups of tapped layers
    that it needs, too. The call makes a few round
    trips and blocks on the store: do not call it on the engine thread.
    """
    return _Lookup(store, catalogue, keys, start, catalogue.needed(taps)).find()


class _Lookup:
    """Lookup of one prompt."""

    def __init__(
        self, store: Store, catalogue: Catalogue, keys: Sequence[bytes], start: int, token_groups: Sequence[StoredGroup]
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._keys = keys
        self._start = start
        self._token_groups = token_groups

    def find(self) -> int:
        size = self._catalogue.block_tokens
        ends = range(self._reach() // size * size, self._start // size * size, -size)
        for first in range(0, len(ends), _BATCH):
            for end in self._gated(ends[first : first + _BATCH]):
                if self._has_all(end):
                    return end
        return self._start

    def _reach(self) -> int:
        """Upper bound for full attention: all stored full stretches in a row, and part of one more."""
        catalogue = self._catalogue
        end = len(self._keys) * catalogue.block_tokens
        full = [group for group in catalogue.token_groups if group.cache.role is Role.FULL]
        if not full:
            return end
        found = self._lookup(full[0], list(catalogue.stretch_ends(self._start, end)))
        num_found = found.index(False) if False in found else len(found)
        tokens = catalogue.stretch_blocks * catalogue.block_tokens
        return min(end, (self._start // tokens + num_found + 1) * tokens)

    def _gated(self, ends: Sequence[int]) -> list[int]:
        """Positions that one group has. A state group is asked if there is one, since states are the rarest."""
        gate = next(iter(self._catalogue.state_groups), None)
        if gate is None:
            gate = self._catalogue.token_groups[0]
            if not all(self._catalogue.stretch(gate, end).num_blocks for end in ends):
                return list(ends)
        found = self._lookup(gate, ends)
        return [end for end, is_there in zip(ends, found, strict=True) if is_there]

    def _has_all(self, end: int) -> bool:
        catalogue = self._catalogue
        names = [self._name(group, e) for group in self._token_groups for e in catalogue.ends(group, self._start, end)]
        names += [self._name(group, end) for group in catalogue.state_groups]
        return all(self._store.lookup(names))

    def _lookup(self, group: StoredGroup, ends: Sequence[int]) -> list[bool]:
        return self._store.lookup([self._name(group, end) for end in ends]) if ends else []

    def _name(self, group: StoredGroup, end: int) -> ObjectName:
        return self._catalogue.name(group, self._keys[end // self._catalogue.block_tokens - 1])
