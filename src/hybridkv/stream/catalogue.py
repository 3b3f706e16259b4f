"""Which parts of a model's cache are stored, in which objects, under which names. No bytes and no threads here.

Blocks of a token group are stored in stretches of `STRETCH_TOKENS`, one object each. An object is named by the tokens
before its end, so a partial stretch has a name of its own. Each state is an object:

    tokens    0          256         512     695
    full      │ stretch  │ stretch   │ part  │        objects at 256, 512, 695
    window         ...│  │ stretch   │ part  │        only blocks visible from the end: a stretch, or less
    state                  ■ 448             ■        at 448, 695: where a request may resume

A request may resume at a position only if every group has an object that ends there, and all earlier stretches that
are visible from there. `form` says what the objects contain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

from hybridkv.cache import CacheLayout, Role
from hybridkv.cache.retention.policy import affordable_grid
from hybridkv.plan import Plan
from hybridkv.store import ObjectName
from hybridkv.stream.form import Share, StoredGroup, StoredLayer
from hybridkv.stream.slicing import stored_groups, tap_groups

FORMAT = 2
STRETCH_TOKENS = 256


class Stretch(NamedTuple):
    """Block range of one object: from `first` up to, not including, `last`. The last block may be a partial one."""

    first: int
    last: int

    @property
    def num_blocks(self) -> int:
        return self.last - self.first


class Catalogue:
    """The stored groups of one model on one engine."""

    def __init__(self, plan: Plan, layout: CacheLayout, identity: str, *, stretch_tokens: int = STRETCH_TOKENS) -> None:
        """`identity`: a digest of the weights. `stretch_tokens`: tokens per object; part of the namespace."""
        self.block_tokens = layout.block_tokens
        self.stretch_blocks = max(1, stretch_tokens // layout.block_tokens)
        self.grid_tokens = affordable_grid(layout.checkpoint_bytes, layout.kv_bytes_per_token)
        """Distance between stored grid states, in tokens."""
        groups = stored_groups(plan, layout)
        self.tap_groups = tap_groups(plan, layout)
        """Hidden states, by layer: stored and loaded only for requests that use them, with their tokens."""
        self.token_groups = [group for group in groups if not group.is_state]
        self.state_groups = [group for group in groups if group.is_state]
        self.is_plain = all(group.role is Role.FULL for group in groups)
        """Only full attention: requests can resume at the end of every stretch."""
        self._plan = plan
        self.identify(identity)

    def identify(self, identity: str) -> None:
        """Set the identity of the weights, and with it the namespace."""
        plan = self._plan
        described = json.dumps(self._description(plan, identity), sort_keys=True, separators=(",", ":"))
        self.namespace = blake2b(described.encode(), digest_size=16).hexdigest()
        self.description = {
            "model": plan.model.name,
            "type": plan.model.model_type,
            "weights": identity,
            "groups": ", ".join(group.name for group in self.groups),
            "layout": described,
        }
        """Shown by `hybridkv store` commands. The namespace is the digest of `layout`."""

    @property
    def groups(self) -> list[StoredGroup]:
        return [*self.token_groups, *self.state_groups]

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's states at one position."""
        return sum(group.nbytes(1) for group in self.state_groups)

    def place(self, placed: Callable[[StoredGroup], StoredGroup]) -> None:
        """Replace the groups' chunks by those of other memory than the plan's. What is stored stays the same."""
        self.token_groups = [placed(group) for group in self.token_groups]
        self.state_groups = [placed(group) for group in self.state_groups]

    def needed(self, names: Collection[str]) -> list[StoredGroup]:
        """The token groups of a request, and those taps that are among `names`."""
        return [*self.token_groups, *(group for name, group in self.tap_groups.items() if name in names)]

    def name(self, group: StoredGroup, key: bytes, share: Share | None = None) -> ObjectName:
        """The object that holds `share`; by default this rank's."""
        return ObjectName(self.namespace, (share or group.share).of_group(group.name), key.hex())

    def load_names(
        self, start: int, end: int, keys: Mapping[int, bytes], names: Collection[str] = ()
    ) -> list[ObjectName]:
        """This rank's objects that are read for a request at `start` that will resume at `end`, states first.

        `keys`: at `load_ends`. `names`: as of `load_ends`.
        """
        found = [self.name(group, keys[end]) for group in self.state_groups]
        for group in self.needed(names):
            found += [self.name(group, keys[one]) for one in self.ends(group, start, end)]
        return found

    # --- positions ----------------------------------------------------------------------------------------------------

    def stretch(self, group: StoredGroup, end: int) -> Stretch:
        """Blocks of a token group's object that ends at `end`. The range may be empty."""
        last = -(-end // self.block_tokens)
        first = (last - 1) // self.stretch_blocks * self.stretch_blocks
        return Stretch(max(first, group.sight.first_visible_block(end, self.block_tokens)), last)

    def first_stored(self, end: int) -> int:
        """The first token of any object that ends at `end`."""
        blocks = [self.stretch(group, end).first for group in self.token_groups]
        return min(blocks, default=0) * self.block_tokens

    def num_tokens(self, group: StoredGroup, end: int) -> int:
        """Tokens of the object that ends at `end`; 1 for a state."""
        return 1 if group.is_state else max(0, end - self.stretch(group, end).first * self.block_tokens)

    def ends(self, group: StoredGroup, start: int, end: int) -> list[int]:
        """Ends of the objects of a token group that a request at `start` needs to resume at `end`."""
        first = max(start, group.sight.first_visible(end))
        ends = [e for e in self.stretch_ends(first, end) if e < end]
        return [e for e in (*ends, end) if e > start and self.num_tokens(group, e)]

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

    def load_bytes(self, start: int, end: int, taps: Collection[str] = ()) -> int:
        """Bytes that are read for a request at `start` that will resume at `end`."""
        return sum(self.load_bytes_by_group(start, end, taps).values())

    def load_bytes_by_group(self, start: int, end: int, taps: Collection[str] = ()) -> dict[str, int]:
        ends = {group: self.ends(group, start, end) for group in self.needed(taps)}
        ends.update((group, [end]) for group in self.state_groups)
        return {
            group.name: sum(group.nbytes(self.num_tokens(group, one)) for one in all_ends)
            for group, all_ends in ends.items()
        }

    # --- description --------------------------------------------------------------------------------------------------

    def _description(self, plan: Plan, identity: str) -> dict[str, Any]:
        """Everything that changes the bytes of objects, but for their tokens. No plan, no rank, no memory size."""
        model = plan.model
        return {
            "format": FORMAT,
            "type": model.model_type,
            "weights": identity,
            "block_tokens": self.block_tokens,
            "stretch_tokens": self.stretch_blocks * self.block_tokens,
            "groups": {group.name: _description_of(group) for group in self.groups},
            "hidden": [model.hidden_size, model.dtype.value],
        }


def _description_of(group: StoredGroup) -> dict[str, Any]:
    seen = {"window": group.sight.window, "chunk": group.sight.chunk}
    rows = [
        {"layers": [layer.layer for layer in layers], "parts": parts}
        for parts, layers in groupby(group.layers, key=_parts_of)
    ]
    return {"role": group.role.value, "slices": group.slices, **{k: v for k, v in seen.items() if v}, "rows": rows}


def _parts_of(layer: StoredLayer) -> Sequence[Any]:
    """Name, dtype, length of the run that is cut, and the sizes of one of its elements."""
    return [[part.name, part.dtype.value, run.total, list(part.inner)] for part, run in layer.parts]
