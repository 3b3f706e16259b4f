"""Which parts of a model's cache are stored, in which objects, under which names. No bytes and no threads here.

Blocks of a token group are stored in stretches of `STRETCH_TOKENS`, one object each. An object is named by the tokens
before its end, so a partial stretch has a name of its own. Each state is an object:

    tokens    0          256         512     688
    full      │ stretch  │ stretch   │ part  │        objects at 256, 512, 688
    window         ...│  │ stretch   │ part  │        only blocks visible from the end: a stretch, or less
    state                  ■ 448             ■        at 448, 688: where a request may resume

A request may resume at a position only if every group has an object that ends there, and all earlier stretches that
are visible from there. Object rows are those of the plan, without their offsets in pages: a restart with another memory
size finds its objects.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from hybridkv.cache import CacheGroup, CacheLayout, Role
from hybridkv.cache.retention.policy import affordable_grid
from hybridkv.plan import GroupPlan, Plan
from hybridkv.plan import Row as PlanRow
from hybridkv.spec import HiddenTap
from hybridkv.store import ObjectName

FORMAT = 1
STRETCH_TOKENS = 256
_RANKS = {Role.STATE: 0, Role.LOCAL: 1, Role.FULL: 2, Role.TAP: 3}
"""Read order of rows that are needed at the same layer."""


class Stretch(NamedTuple):
    """Block range of one object: from `first` up to, not including, `last`. The object ends where the range ends."""

    first: int
    last: int

    @property
    def num_blocks(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A cache group whose blocks or states are stored."""

    plan: GroupPlan
    cache: CacheGroup

    @property
    def name(self) -> str:
        return self.cache.name

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        return self.plan.rows

    @property
    def is_state(self) -> bool:
        return self.cache.role is Role.STATE

    @property
    def rank(self) -> int:
        return _RANKS[self.cache.role]

    @property
    def item_bytes(self) -> int:
        """Size of one block, or of one state."""
        return sum(row.nbytes for row in self.rows)


class Catalogue:
    """The stored groups of one model on one engine."""

    def __init__(self, plan: Plan, layout: CacheLayout, identity: str, *, stretch_tokens: int = STRETCH_TOKENS) -> None:
        """`identity`: a digest of the weights. `stretch_tokens`: tokens per object; part of the namespace."""
        self.block_tokens = layout.block_tokens
        self.stretch_blocks = max(1, stretch_tokens // layout.block_tokens)
        self.grid_tokens = affordable_grid(layout.checkpoint_bytes, layout.kv_bytes_per_token)
        """Distance between stored grid states, in tokens."""
        cached = {group.name: group for group in (*layout.token_groups, *layout.state_groups)}
        kept = [StoredGroup(group, cached[group.name]) for group in plan.groups if group.name in cached]
        self.tap_groups = _tap_groups(plan, layout)
        """Hidden states, by layer: stored and loaded only for requests that use them, with their tokens."""
        self.token_groups = [group for group in kept if not group.is_state]
        self.state_groups = [group for group in kept if group.is_state]
        self.is_plain = all(group.cache.role is Role.FULL for group in kept)
        """Only full attention: requests can resume at the end of every stretch."""
        self.namespace = self._digest(plan, identity)
        self.description = {
            "model": plan.model.name,
            "type": plan.model.model_type,
            "weights": identity,
            "groups": ", ".join(group.name for group in self.groups),
        }
        """Shown by `hybridkv store` commands."""

    @property
    def groups(self) -> list[StoredGroup]:
        return [*self.token_groups, *self.state_groups]

    def needed(self, names: Collection[str]) -> list[StoredGroup]:
        """The token groups of a request, and those taps that are among `names`."""
        return [*self.token_groups, *(group for name, group in self.tap_groups.items() if name in names)]

    def name(self, group: StoredGroup, key: bytes) -> ObjectName:
        return ObjectName(self.namespace, group.name, key.hex())

    def stretch(self, group: StoredGroup, end: int) -> Stretch:
        """Blocks of a token group's object that ends at `end`. The range may be empty."""
        last = -(-end // self.block_tokens)
        first = (last - 1) // self.stretch_blocks * self.stretch_blocks
        return Stretch(max(first, group.cache.sight.first_visible_block(end, self.block_tokens)), last)

    def ends(self, group: StoredGroup, start: int, end: int) -> list[int]:
        """Ends of the objects of a token group that a request at `start` needs to resume at `end`."""
        first = max(start, group.cache.sight.first_visible(end))
        ends = [e for e in self.stretch_ends(first, end) if e < end]
        return [e for e in (*ends, end) if self.stretch(group, e).num_blocks]

    def stretch_ends(self, start: int, end: int) -> Iterator[int]:
        """Ends of full stretches after `start`, up to and including `end`."""
        tokens = self.stretch_blocks * self.block_tokens
        return iter(range((start // tokens + 1) * tokens, end + 1, tokens))

    def ends_stretch(self, end: int) -> bool:
        return end % (self.stretch_blocks * self.block_tokens) == 0

    def load_ends(self, start: int, end: int, names: Collection[str] = ()) -> set[int]:
        """Ends of all objects that are read for a request at `start` that will resume at `end`.

        `names`: its groups. Only taps must be among them.
        """
        return {end}.union(*(self.ends(group, start, end) for group in self.needed(names)))

    def row_bytes(self, group: StoredGroup, end: int) -> list[int]:
        """Size of each row of the object that ends at `end`."""
        count = 1 if group.is_state else self.stretch(group, end).num_blocks
        return [row.nbytes * count for row in group.rows]

    def load_bytes(self, start: int, end: int, taps: Collection[str] = ()) -> int:
        """Bytes that are read for a request at `start` that will resume at `end`."""
        tokens = sum(sum(self.row_bytes(group, e)) for group in self.needed(taps) for e in self.ends(group, start, end))
        return tokens + sum(group.item_bytes for group in self.state_groups)

    def _digest(self, plan: Plan, identity: str) -> str:
        """Digest of everything that changes the bytes of all objects. It excludes the arena's layout."""
        facts = {
            "format": FORMAT,
            "type": plan.model.model_type,
            "weights": identity,
            "tp": [plan.model.tp, plan.model.rank],
            "blocks": [self.block_tokens, self.stretch_blocks],
            "groups": {group.name: [_canonical(row) for row in group.rows] for group in self.groups},
        }
        return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _tap_groups(plan: Plan, layout: CacheLayout) -> dict[str, StoredGroup]:
    """A stored group for each tapped layer: the plan has one for all."""
    planned = next((group for group in plan.groups if isinstance(group.specs[0], HiddenTap)), None)
    if planned is None:
        return {}
    found = {}
    for group, spec, view in zip(layout.tap_groups, planned.specs, planned.rows[0].views, strict=True):
        row = replace(planned.rows[0], layers=(spec.layer,), views=(view,))
        alone = replace(planned, specs=(spec,), layout=replace(planned.layout, rows=(row,)))
        found[group.name] = StoredGroup(alone, group)
    return found


def _canonical(row: PlanRow) -> list[object]:
    """A row without its offset in a page."""
    views = [
        [view.layer, view.part, view.dtype.value, view.offset_bytes - row.offset_bytes, view.shape, view.strides_bytes]
        for view in row.views
    ]
    return [row.layers, row.nbytes, views]
