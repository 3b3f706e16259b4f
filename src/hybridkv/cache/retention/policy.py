"""Two small interfaces that decide what is worth its bytes: where to keep checkpoints, and what to evict first.

Policies see facts, never pages. The plain ones are here; `reuse` has the one that learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from math import log2
from typing import NamedTuple, Protocol, TypeAlias


class Kind(IntEnum):
    """Why a checkpoint is kept."""

    END = 0
    """Where a prompt, a reply or a preempted request ends: the place to continue from."""
    BRANCH = 1
    """Where a known prefix is left."""
    BREAKPOINT = 2
    """The caller named it."""
    GRID = 3


class PromptFacts(NamedTuple):
    """What is known when a request begins."""

    prompt_tokens: int
    cached_tokens: int
    """Where it resumes."""
    matched_tokens: int
    """Full-attention KV that matches: where it leaves a known prefix."""
    breakpoints: tuple[int, ...]
    """Positions the caller named."""
    block_tokens: int
    spare: float = 0.0
    """The part of the memory that nobody uses."""


class CheckpointPolicy(Protocol):
    def positions(self, facts: PromptFacts) -> Iterable[tuple[int, Kind]]:
        """Where in the prompt to keep a checkpoint, and why; positions are rounded down to blocks."""
        ...


class Candidate(NamedTuple):
    """Something that may be evicted: a checkpoint with the KV that only it needs, or (where every block boundary can be
    resumed) the end of a run of blocks."""

    kind: Kind
    is_superseded: bool
    """Something deeper on its path is kept: whoever goes on from there does not need this one."""
    turn: int
    """How often its request had been continued before it: 0 for a first prompt."""
    new_tokens: int
    """What its request added to the one it continued."""
    num_hits: int
    start: int
    """Where a request would resume without it."""
    end: int
    """Where a request resumes with it."""
    num_bytes: int
    """What evicting it makes free."""


Numbers: TypeAlias = tuple[int, ...]


class Rating(NamedTuple):
    """What a policy makes of a candidate."""

    lane: Numbers
    """Of two candidates in one lane the older goes first."""
    cohort: Numbers = ()
    """Candidates with the same prospects, for policies that learn; empty for those that do not."""


class EvictionPolicy(Protocol):
    """What to evict first. Ages are counted in requests."""

    def rate(self, candidate: Candidate) -> Rating:
        """Asked when something becomes evictable, or its facts change."""
        ...

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        """Lowest goes first. `oldest_age`: of all candidates."""
        ...

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        """`count` more of a cohort are there to be reused (fewer, if negative)."""
        ...

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        """One of a cohort was asked for, whether it was still there or not."""
        ...


class LeastRecentlyUsed:
    """One lane for all."""

    def rate(self, candidate: Candidate) -> Rating:
        return _ONE_LANE

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        return -age

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        """Learns nothing."""

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        """Learns nothing."""


_ONE_LANE = Rating((0,))


class RecencyAndFlops(LeastRecentlyUsed):
    """Recency plus compute saved per byte, each as a part of the most there is: the score of the Marconi paper
    (arXiv 2411.19379), with equal weights."""

    def __init__(self, flops: Callable[[int, int], float] | None = None) -> None:
        """`flops(start, end)`: of computing these tokens; without it, tokens are counted."""
        self._flops = flops or (lambda start, end: float(end - start))
        self._most = 1e-30

    def rate(self, candidate: Candidate) -> Rating:
        saved = self._flops(candidate.start, candidate.end) / max(1, candidate.num_bytes)
        self._most = max(self._most, saved)
        return Rating((quarter_octave(saved),))

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        return float(2.0 ** (lane[0] / 4)) / self._most - age / max(1, oldest_age)


def quarter_octave(value: float) -> int:
    """The logarithm of a positive number, in steps of 2 ** (1/4)."""
    return round(4 * log2(value)) if value > 0 else -4096


_MOSTLY_UNUSED = 0.5


class PromptEndBranchesGrid:
    """Checkpoints at the last block boundary a repeated prompt can resume from, where a known prefix is left, at the
    caller's breakpoints, and on a sparse grid: a denser one while most of the memory is unused."""

    def __init__(self, grid_tokens: int | None, near_tokens: int = 0, spare_grid_tokens: int | None = None) -> None:
        """`near_tokens`: the end of a prompt is not kept if the caller named a place so close before it."""
        self.grid_tokens = grid_tokens
        self.near_tokens = near_tokens
        self.spare_grid_tokens = spare_grid_tokens or grid_tokens

    def positions(self, facts: PromptFacts) -> Iterable[tuple[int, Kind]]:
        end = (facts.prompt_tokens - 1) // facts.block_tokens * facts.block_tokens
        named = max((p for p in facts.breakpoints if p < facts.prompt_tokens), default=0)
        yield named if named > 0 and end - named <= self.near_tokens else end, Kind.END
        if facts.matched_tokens > facts.cached_tokens:
            yield facts.matched_tokens, Kind.BRANCH
        for position in facts.breakpoints:
            yield position, Kind.BREAKPOINT
        grid = self.spare_grid_tokens if facts.spare > _MOSTLY_UNUSED else self.grid_tokens
        if grid:
            for position in range(facts.cached_tokens // grid * grid + grid, facts.prompt_tokens, grid):
                yield position, Kind.GRID


def affordable_grid(checkpoint_bytes: int, kv_bytes_per_token: int, least: int = 256) -> int:
    """A grid on which checkpoints take a quarter of the bytes of the full-attention KV between them, at most."""
    if not kv_bytes_per_token:
        return 4 * least
    tokens = -(-4 * checkpoint_bytes // kv_bytes_per_token)
    return max(least, -(-tokens // least) * least)
