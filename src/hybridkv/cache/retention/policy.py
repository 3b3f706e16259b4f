"""Policy interfaces: `CheckpointPolicy` (where to keep checkpoints) and `EvictionPolicy` (what to evict first).

Policies see facts, never pages. The simple policies are here; the learning one is in `reuse`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from math import log2
from typing import NamedTuple, Protocol, TypeAlias


class Kind(IntEnum):
    """Why a checkpoint is kept."""

    END = 0
    """The end of a prompt, a reply or a preempted request, from which it may be continued."""
    BRANCH = 1
    """The position at which a prompt diverges from a known prefix."""
    BREAKPOINT = 2
    """A position that the caller passed."""
    GRID = 3
    PARTING = 4
    """A place at which later prompts will probably part from this one: see `partings`."""
    FILL = 5
    """A position between others, in memory that is idle. Until a request has used it, it is evicted first."""


KIND_NAMES = tuple(kind.name.lower() for kind in Kind)
"""By kind: its name in records and metrics."""


class PromptFacts(NamedTuple):
    """Facts known when a request begins."""

    prompt_tokens: int
    cached_tokens: int
    """Position at which it resumes."""
    matched_tokens: int
    """Full-attention KV that matches: the position at which it diverges from a known prefix."""
    breakpoints: tuple[int, ...]
    """Positions that the caller passed."""
    block_tokens: int
    likely: tuple[int, ...] = ()
    """Positions at which later prompts will probably part from this one."""
    num_spare: int = 0
    """Number of checkpoints for which there is idle memory: free, or taken by checkpoints that go first."""
    store_room: int = 0
    """Number of checkpoints that would fill idle room of a store."""
    less_likely: tuple[int, ...] = ()
    """More such positions, which are worth a checkpoint only in idle memory."""
    is_branch: bool = False
    """It resumes at `matched_tokens` without a checkpoint, and earlier prompts go on there."""


class CheckpointPolicy(Protocol):
    def positions(self, facts: PromptFacts) -> Iterable[tuple[int, Kind]]:
        """Positions in the prompt at which to keep a checkpoint, and why. They are rounded down to whole blocks."""
        ...


class Candidate(NamedTuple):
    """An evictable item: a checkpoint with the KV that only it needs, or the end of a run of blocks (for layouts in
    which every block boundary can be resumed)."""

    kind: Kind
    is_superseded: bool
    """A deeper item is kept on its path: requests that resume from that one do not need this one."""
    turn: int
    """Conversation turn: number of earlier requests that its request continues; 0 for a first prompt."""
    new_tokens: int
    """Tokens that its request added to the request it continues."""
    num_hits: int
    start: int
    """Position at which a request would resume without it."""
    end: int
    """Position at which a request resumes with it."""
    num_bytes: int
    """Bytes that its eviction frees."""


Numbers: TypeAlias = tuple[int, ...]


class Rating(NamedTuple):
    """A policy's rating of a candidate."""

    lane: Numbers
    """Candidates of one lane are evicted in order of last use."""
    cohort: Numbers = ()
    """Candidates of one cohort have the same predicted reuse. Empty for policies that do not learn."""
    is_spare: bool = False
    """It is evicted before all others: set by the queue, not by policies."""
    is_wanted: bool = False
    """It has a lifetime, which counts for it: set by the queue, too."""


class EvictionPolicy(Protocol):
    """Decides what to evict first. Ages are counted in requests."""

    def rate(self, candidate: Candidate) -> Rating:
        """Rate a candidate. Called when it becomes evictable, or when its facts change."""
        ...

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        """Value of a candidate; the lowest is evicted first. `oldest_age`: age of the oldest of all candidates."""
        ...

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        """Learn that `count` more items of a cohort are kept (fewer, if negative)."""
        ...

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        """Learn that an item of a cohort was requested, whether it was still kept or already evicted."""
        ...


class LeastRecentlyUsed:
    """LRU: one lane for all candidates."""

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
    """Recency plus compute saved per byte, each relative to its maximum: the score of the Marconi paper
    (arXiv 2411.19379), with equal weights."""

    def __init__(self, flops: Callable[[int, int], float] | None = None) -> None:
        """`flops(start, end)`: FLOPs to compute these tokens. Without it, tokens are counted."""
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


_LEAST_SHARE = 8
"""One prompt takes at most this part of the idle memory, and of the idle room of a store: one eighth."""
_STORE_TIMES = 8
"""The grid for a store alone is this many times sparser: copies of states take longer (docs/performance.md)."""


class PromptEndBranchesGrid:
    """Keeps checkpoints at the last block boundary from which a repeated prompt can resume, where it diverges from a
    known prefix, where later prompts will probably diverge, at the caller's breakpoints, on a sparse grid, and in idle
    memory on a grid that is the denser the more idle memory there is."""

    def __init__(
        self,
        grid_tokens: int | None,
        near_tokens: int = 0,
        fill_tokens: int | None = None,
        most_fills: int | None = None,
    ) -> None:
        """`near_tokens`: no checkpoint at a prompt's end or at a likely place this close behind a caller's breakpoint.

        `fill_tokens`: the densest grid in idle memory. `most_fills`: checkpoints that one prompt gets on it.
        """
        self.grid_tokens = grid_tokens
        self.near_tokens = near_tokens
        self.fill_tokens = fill_tokens
        self.most_fills = most_fills

    def positions(self, facts: PromptFacts) -> Iterable[tuple[int, Kind]]:
        end = (facts.prompt_tokens - 1) // facts.block_tokens * facts.block_tokens
        named = max((p for p in facts.breakpoints if p < facts.prompt_tokens), default=0)
        yield named if named > 0 and end - named <= self.near_tokens else end, Kind.END
        if facts.matched_tokens > facts.cached_tokens or facts.is_branch:
            yield facts.matched_tokens, Kind.BRANCH
        for position in facts.breakpoints:
            yield position, Kind.BREAKPOINT
        for position in facts.likely:
            if not any(0 <= position - named <= self.near_tokens for named in facts.breakpoints):
                yield position, Kind.PARTING
        here = self._fill_spacing(facts, end, facts.num_spare, 1)
        there = self._fill_spacing(facts, end, facts.store_room, _STORE_TIMES)
        fill, grid = min(here or there, there or here), self.grid_tokens
        if grid:
            yield from _grid(facts.cached_tokens, end, -(-grid // here) * here if here else grid, Kind.GRID)
        if fill:
            for position in facts.less_likely:
                yield position, Kind.FILL
            yield from _grid(facts.cached_tokens, end - fill // 2, fill, Kind.FILL)

    def _fill_spacing(self, facts: PromptFacts, end: int, room: int, times: int) -> int:
        """Spacing of the grid that fills idle `room`, at least `times` the densest.

        0 if there is no room for one that is denser than the sparse grid.
        """
        most, spacing = room // _LEAST_SHARE, times * (self.fill_tokens or 0)
        if not spacing or not most:
            return 0
        if self.most_fills is not None:
            most = min(most, self.most_fills)
        while (end - facts.cached_tokens) // spacing > most:
            spacing *= 2
        return spacing if not self.grid_tokens or spacing < self.grid_tokens else 0


def _grid(start: int, end: int, spacing: int, kind: Kind) -> Iterable[tuple[int, Kind]]:
    """Multiples of `spacing` after `start` and before `end`."""
    for position in range(start // spacing * spacing + spacing, end, spacing):
        yield position, kind


def affordable_grid(checkpoint_bytes: int, kv_bytes_per_token: int, least: int = 256) -> int:
    """Grid spacing at which checkpoints take at most a quarter of the bytes of the full-attention KV between them."""
    if not kv_bytes_per_token:
        return 4 * least
    tokens = -(-4 * checkpoint_bytes // kv_bytes_per_token)
    return max(least, -(-tokens // least) * least)
