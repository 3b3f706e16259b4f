"""What became of the breakpoints of one request: which have a checkpoint at the end of the request, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.steps.lease import Lease


class Outcome(StrEnum):
    """What became of a breakpoint."""

    KEPT = "kept"
    """A checkpoint that the request computed is there."""
    CACHED = "cached"
    """The request resumed there or later: it computed nothing up to there."""
    TOO_EARLY = "too_early"
    """It is inside the first block, before which there is nothing to keep."""
    NO_ROOM = "no_room"
    """No checkpoint is there: there was no page to spare, or it was evicted before the request ended."""
    NOT_REACHED = "not_reached"
    """The request ended before it computed the tokens up to there."""


class BreakpointAccount(NamedTuple):
    """One breakpoint."""

    position: int
    """As the client named it."""
    kept_at: int
    """The position of its checkpoint: the end of the last whole block."""
    outcome: Outcome
    num_bytes: int
    """Of its states and windows; the keys and values before it are not counted. 0 if none are kept for it."""


def account_for(
    prefixes: PrefixCache, lease: Lease, positions: Iterable[int], cached_tokens: int
) -> list[BreakpointAccount]:
    """What became of the breakpoints of a request that is about to give up its lease. Of several at one place, the last
    one counts. `cached_tokens`: tokens that it did not compute."""
    size, layout = prefixes.block_tokens, prefixes.groups.layout
    by_place = {position // size * size: position for position in sorted(positions)}
    accounts = []
    for place, position in by_place.items():
        num_bytes = 0
        if not place:
            outcome = Outcome.TOO_EARLY
        elif place <= cached_tokens:
            outcome = Outcome.CACHED
        elif place > lease.leaf.end * size:
            outcome = Outcome.NOT_REACHED
        elif not prefixes.needs_checkpoints:
            outcome = Outcome.KEPT
        elif lease.leaf.at_block(place // size - 1).checkpoint_at(place) is not None:
            outcome, num_bytes = Outcome.KEPT, layout.checkpoint_bytes
        else:
            outcome = Outcome.NO_ROOM
        accounts.append(BreakpointAccount(position, place, outcome, num_bytes))
    return accounts
