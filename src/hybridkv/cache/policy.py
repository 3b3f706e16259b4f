"""Two small interfaces that decide what is worth its bytes, with plain defaults: where to keep checkpoints, and what to
evict first. Policies see facts, never pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


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


class CheckpointPolicy(Protocol):
    def positions(self, facts: PromptFacts) -> Iterable[int]:
        """Where in the prompt to keep a checkpoint; positions are rounded down to blocks."""
        ...


class Candidate(NamedTuple):
    """Something that may be evicted: the end of a run of blocks, or a checkpoint."""

    is_checkpoint: bool
    last_used: int
    """A clock that ticks with each request."""
    num_hits: int
    position: int
    """Tokens from the start of the sequence up to its end."""
    num_tokens: int
    """Tokens it stands for: its blocks, or all before the checkpoint."""
    num_bytes: int


class EvictionPolicy(Protocol):
    def value(self, candidate: Candidate) -> float:
        """Lowest goes first. Asked when something becomes evictable or is used, not at each eviction."""
        ...


class LeastRecentlyUsed:
    """Blocks and checkpoints in one queue; of equal age, the deeper goes first."""

    def value(self, candidate: Candidate) -> float:
        return candidate.last_used - candidate.position / 2**40


class PromptEndBranchesGrid:
    """Checkpoints at the last block boundary a repeated prompt can resume from, where a known prefix is left, at the
    caller's breakpoints, and on a sparse grid."""

    def __init__(self, grid_tokens: int | None) -> None:
        self.grid_tokens = grid_tokens

    def positions(self, facts: PromptFacts) -> Iterable[int]:
        yield (facts.prompt_tokens - 1) // facts.block_tokens * facts.block_tokens
        yield from facts.breakpoints
        if facts.matched_tokens > facts.cached_tokens:
            yield facts.matched_tokens
        if self.grid_tokens:
            first = facts.cached_tokens // self.grid_tokens + 1
            yield from range(first * self.grid_tokens, facts.prompt_tokens, self.grid_tokens)


def affordable_grid(checkpoint_bytes: int, kv_bytes_per_token: int, least: int = 256) -> int:
    """A grid on which checkpoints take a quarter of the bytes of the full-attention KV between them, at most."""
    if not kv_bytes_per_token:
        return 4 * least
    tokens = -(-4 * checkpoint_bytes // kv_bytes_per_token)
    return max(least, -(-tokens // least) * least)
