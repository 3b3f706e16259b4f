"""Objects of a model in stores: which ones a position needs, and how large they are. No tier is known here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.store.objects import layout
from hybridkv.stream import Catalogue
from hybridkv.stream.form import StoredGroup


class Need(NamedTuple):
    """One object that a load reads."""

    group: int
    """Index of the catalogue's groups."""
    end: int
    tokens: int
    """Tokens of the request that only this object supplies: those of its stretch in the first full group, else 0."""


class Objects:
    """The objects of one model, of all its ranks: each slice is stored once, and read by every rank that holds it."""

    def __init__(self, catalogue: Catalogue, tp: int) -> None:
        self.catalogue = catalogue
        self.groups = catalogue.groups
        self.block_tokens = catalogue.block_tokens
        self.stretch_tokens = catalogue.stretch_blocks * catalogue.block_tokens
        full = [number for number, group in enumerate(self.groups) if group.role is Role.FULL]
        self.first_full = full[0] if full else None
        self._tp = tp
        self._nbytes: dict[tuple[int, int], int] = {}

    @property
    def values(self) -> list[float]:
        """By group: tokens that need not be computed, for each byte, as objects in stores have it."""
        saved = [self.catalogue.grid_tokens if group.is_state else 1 for group in self.groups]
        return [
            tokens / (group.nbytes(1) * group.share.total) for tokens, group in zip(saved, self.groups, strict=True)
        ]

    @property
    def state_bytes(self) -> int:
        """Bytes of all ranks' states at one position."""
        return sum(self.stored_bytes(number, 1) for number, group in enumerate(self.groups) if group.is_state)

    def stored_bytes(self, group: int, end: int) -> int:
        """Bytes of all slices of the object that ends at `end`."""
        return self._bytes(group, end) * self.groups[group].share.total

    def read_bytes(self, group: int, end: int) -> int:
        """Bytes that all ranks read of it together."""
        return self._bytes(group, end) * self._tp

    def _bytes(self, group: int, end: int) -> int:
        """Bytes of one rank's object, with its header and the padding between rows."""
        stored = self.groups[group]
        tokens = self.catalogue.num_tokens(stored, end)
        found = self._nbytes.get((group, tokens))
        if found is None:
            name = stored.share.of_group(stored.name)
            found = self._nbytes[group, tokens] = layout(name, stored.row_bytes(tokens)).nbytes
        return found

    def needs(self, start: int, matched: int, end: int) -> Iterator[Need]:
        """Objects with which a request at `start` resumes at `end`. Memory has full-attention KV up to `matched`."""
        for number, group in enumerate(self.groups):
            if group.is_state:
                yield Need(number, end, 0)
                continue
            first = self.first_needed(group, start, matched, end)
            for one in self.catalogue.ends(group, first, end):
                yield Need(number, one, one - first if number == self.first_full else 0)
                first = one

    def first_needed(self, group: StoredGroup, start: int, matched: int, end: int) -> int:
        """Objects up to here are not needed to resume at `end`. Memory supplies whole blocks only."""
        if group.role is not Role.FULL:
            return start
        return max(start, min(matched, end // self.block_tokens * self.block_tokens))
