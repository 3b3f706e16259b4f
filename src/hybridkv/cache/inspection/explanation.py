"""Explains a lookup: what every group had of a prompt, where the request resumes, and what was missing for more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from hybridkv.cache.arena.pages import NULL_PAGE, as_numbers
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.resume import Found, ResumeRule
from hybridkv.cache.index.tree import Checkpoint, PathNode
from hybridkv.cache.layout import CacheGroup, Role
from hybridkv.cache.retention.eviction_log import Eviction
from hybridkv.cache.retention.partings import Place
from hybridkv.cache.retention.policy import Kind
from hybridkv.cache.tokens import PLAIN_KEY, TOKEN_BYTES

_MOST_LISTED = 16
_MOST_COMPARED = 64
"""Cached prompts that are compared with a prompt to see where the nearest one parts from it."""


@dataclass(frozen=True, slots=True)
class GroupSupply:
    """What one group had of a prompt."""

    name: str
    role: Role
    supplies: int
    """The largest position that this group alone can supply."""
    positions: tuple[int, ...] = ()
    """The last 16 positions at which a state group has a state."""
    num_positions: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    """The last 16 runs of tokens for which another group has pages."""


@dataclass(frozen=True, slots=True)
class UsedCheckpoint:
    """The checkpoint from which a request resumes."""

    position: int
    kind: Kind
    num_hits: int
    """Requests that have resumed there before."""
    idle_s: float
    """Seconds since it was kept or last used."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Something that the prompt could have used, had it not been evicted."""

    position: int
    """A request could have resumed here."""
    seconds_ago: float
    requests_ago: int

    def in_prompt(self, num_tokens: int, block_tokens: int) -> Evicted:
        """The part that a prompt could have used. An item may end in a reply, after the last token of the prompt."""
        if self.position < num_tokens:
            return self
        return replace(self, position=(num_tokens - 1) // block_tokens * block_tokens)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request resumes where it does."""

    prompt_tokens: int
    position: int
    """The largest position that all groups can supply: the request resumes there."""
    matched_tokens: int
    """Full-attention KV that matches, in whole blocks."""
    missing: str
    """Why the request resumes no later; a member of `Missing`."""
    parted_at: int
    """The first token that differs from the nearest cached prompt, or at which all cached prompts end."""
    block_tokens: int
    checkpoint: UsedCheckpoint | None
    groups: tuple[GroupSupply, ...]
    evicted: Evicted | None
    """The deepest checkpoint between `position` and `matched_tokens` that was evicted."""
    is_apart: bool = False
    """Whether a `cache_salt` or an adapter keeps the request apart from requests without it."""
    likely: tuple[Place, ...] = ()
    """Where prompts that begin like this one part from earlier ones, as learned so far."""

    @property
    def last_position(self) -> int:
        """The last block boundary at which the prompt could resume: one token must be left to compute."""
        return (self.prompt_tokens - 1) // self.block_tokens * self.block_tokens


class Explainer:
    """Explains lookups in one prefix cache."""

    def __init__(self, prefixes: PrefixCache, rule: ResumeRule) -> None:
        self._prefixes = prefixes
        self._rule = rule
        self._block_tokens = rule.block_tokens
        self._state_groups = prefixes.groups.layout.state_groups

    def explain(self, found: Found, taps: Sequence[int]) -> Explanation:
        """Explain a lookup whose result is current. `taps`: the tapped layers that the request uses."""
        path, resume, num_tokens = found.path, found.resume, len(found.tokens) // TOKEN_BYTES
        checkpoint = None if resume.checkpoint is None else self._used(resume.checkpoint)
        checkpoints = list(self._rule.reachable(path, found.tokens, num_tokens - 1))
        groups = [*self._token_groups(path, taps, resume.position), *self._states(checkpoints)]
        return Explanation(
            num_tokens,
            resume.position,
            resume.matched_tokens,
            resume.missing,
            self._parted_at(path, found.tokens, resume.matched_tokens),
            self._block_tokens,
            checkpoint,
            tuple(groups),
            self._evicted_between(path, resume.position, resume.matched_tokens, num_tokens),
            found.key.root != PLAIN_KEY.root,
            self._likely(found),
        )

    def _likely(self, found: Found) -> tuple[Place, ...]:
        """Only what prompts with the same salt have taught: records must not tell of others."""
        opening = found.key.root + found.tokens[: self._block_tokens * TOKEN_BYTES]
        return tuple(self._prefixes.history.partings.own_places(opening) or ())

    def evicted(self, eviction: Eviction | None) -> Evicted | None:
        """An entry of the eviction log, as part of an explanation."""
        if eviction is None:
            return None
        history = self._prefixes.history
        seconds = history.seconds_since(eviction.evicted_at)
        return Evicted(eviction.position, seconds, history.clock - eviction.evicted_at)

    def _used(self, checkpoint: Checkpoint) -> UsedCheckpoint:
        idle_s = self._prefixes.history.seconds_since(checkpoint.last_used)
        return UsedCheckpoint(checkpoint.position, checkpoint.kind, checkpoint.num_hits, idle_s)

    def _token_groups(self, path: Sequence[PathNode], taps: Sequence[int], position: int) -> Iterator[GroupSupply]:
        """`position`: where the request resumes. A checkpoint inside a block also has the tokens of that block."""
        for index, group in enumerate(self._prefixes.groups.token_groups):
            if group.role is Role.TAP and index not in taps:
                continue
            supplies = self._supplied(path, index, group)
            runs = [(0, supplies)] * bool(supplies) if group.role is Role.FULL else _runs(path, index)
            tokens = tuple((a * self._block_tokens, b * self._block_tokens) for a, b in runs[-_MOST_LISTED:])
            yield GroupSupply(group.name, group.role, max(supplies * self._block_tokens, position), runs=tokens)

    def _supplied(self, path: Sequence[PathNode], index: int, group: CacheGroup) -> int:
        """The last block boundary that one group alone can supply."""
        if not path:
            return 0
        local = [(index, group)] if group.role is Role.LOCAL else []
        return self._rule.best_boundary(path, local, [index] if group.role is Role.TAP else [])[0]

    def _states(self, checkpoints: Sequence[Checkpoint]) -> Iterator[GroupSupply]:
        for index, group in enumerate(self._state_groups):
            positions = [one.position for one in reversed(checkpoints) if one.states[index] is not None]
            listed = tuple(positions[-_MOST_LISTED:])
            yield GroupSupply(group.name, Role.STATE, max(positions, default=0), listed, len(positions))

    def _parted_at(self, path: Sequence[PathNode], tokens: bytes, matched: int) -> int:
        size, start = self._block_tokens * TOKEN_BYTES, matched * TOKEN_BYTES
        if not path:
            return matched
        node, num_blocks = path[-1]
        if num_blocks < node.num_blocks:
            return matched + _common_tokens(node.tokens[num_blocks * size : (num_blocks + 1) * size], tokens, start)
        others = list(islice(node.children, _MOST_COMPARED))
        others += [one.tail_tokens for one in node.checkpoints[-_MOST_COMPARED:] if one.position > matched]
        first = tokens[start : start + TOKEN_BYTES]
        similar = [other for other in others if other.startswith(first)]
        return matched + max((_common_tokens(other, tokens, start) for other in similar), default=0)

    def _evicted_between(
        self, path: Sequence[PathNode], position: int, matched: int, num_tokens: int
    ) -> Evicted | None:
        """The deepest entry of the eviction log in blocks that match after `position`, and before the prompt's end."""
        if matched <= position:
            return None
        first, last, log = position // self._block_tokens, matched // self._block_tokens, self._prefixes.history.log
        for node, _ in reversed(path):
            if node.parent is not None and node.start < last:
                keys = node.keys[max(0, first - node.start) : last - node.start]
                eviction = log.deepest(keys)
                if eviction is not None and eviction.position >= num_tokens:  # inside the block after the last one
                    eviction = log.deepest(keys[:-1])
                if eviction is not None:
                    return self.evicted(eviction)
        return None


def _runs(path: Sequence[PathNode], group: int) -> list[tuple[int, int]]:
    """Runs of consecutive blocks on a path that have a page in `group`."""
    parts = [np.zeros(1, dtype=np.bool_)]
    for node, num_blocks in path:
        pages = node.pages[group] if num_blocks else None
        parts.append(np.zeros(num_blocks, np.bool_) if pages is None else as_numbers(pages)[:num_blocks] != NULL_PAGE)
    present = np.concatenate([*parts, parts[0]])
    edges: list[int] = np.flatnonzero(present[1:] != present[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _common_tokens(run: bytes | bytearray, tokens: bytes, start: int) -> int:
    """Number of equal tokens at the beginning of `run` and of `tokens` from byte `start` on."""
    most = min(len(run), len(tokens) - start) // TOKEN_BYTES
    for number in range(most):
        at = number * TOKEN_BYTES
        if run[at : at + TOKEN_BYTES] != tokens[start + at : start + at + TOKEN_BYTES]:
            return number
    return most
