"""Sight: which tokens a token sees, and therefore which blocks requests hold and checkpoints keep.

Layer specs, the cache, kernels and stores all use this module for that arithmetic. It knows positions and blocks, but
no layers and no pages. It is compiled together with the cache core, which calls it in every step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import gcd
from typing import Final

from hybridkv.errors import InputError

NEVER: Final = sys.maxsize
"""A position that no request reaches."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The positions that the token at position p sees, itself included: [0, p], or less with a window or a chunk.

    Block i is the positions [i * block_tokens, (i + 1) * block_tokens).
    """

    window: int | None = None
    """The token sees (p - window, p]."""
    chunk: int | None = None
    """The token sees [p // chunk * chunk, p]."""

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise InputError(f"a window of {self.window} and a chunk of {self.chunk} tokens: pass one of them")
        if (self.window is not None and self.window < 1) or (self.chunk is not None and self.chunk < 1):
            raise InputError(f"{self}: a token sees itself, so a window or a chunk has at least 1 token")

    @property
    def is_local(self) -> bool:
        """Whether there is a window or a chunk, so that later tokens stop seeing earlier ones."""
        return self.window is not None or self.chunk is not None

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees. Later tokens see none before it either."""
        if self.window is not None:
            return position - self.window + 1 if position >= self.window else 0
        if self.chunk is not None:
            return position - position % self.chunk
        return 0

    def first_visible_block(self, position: int, block_tokens: int) -> int:
        return self.first_visible(position) // block_tokens

    def next_slide(self, position: int, block_tokens: int) -> int:
        """The first position that no longer sees the first block that `position` sees; NEVER if all later ones do."""
        block_end = (self.first_visible(position) // block_tokens + 1) * block_tokens
        if self.window is not None:
            return block_end + self.window - 1
        if self.chunk is not None:
            return -(-block_end // self.chunk) * self.chunk
        return NEVER

    def held_blocks(self, num_tokens: int, block_tokens: int) -> int:
        """Maximum number of blocks that one token of a request of `num_tokens` sees.

        For a request shorter than chunk * block_tokens it is an upper bound: possibly none of its chunks begins at the
        worst offset in a block.
        """
        num_blocks = -(-num_tokens // block_tokens)
        if not self.is_local:
            return num_blocks
        # The first token of a block sees the most: that block, and the blocks that a checkpoint there keeps.
        return min(num_blocks, self.checkpoint_blocks(block_tokens) + 1)

    def checkpoint_blocks(self, block_tokens: int) -> int:
        """Maximum number of blocks before n that tokens from n on see, for n a multiple of `block_tokens`.

        0 without a window or chunk: full-attention KV is kept independently of checkpoints.
        """
        span = self.window or self.chunk
        if span is None:
            return 0
        # The largest offset in a block at which the visible tokens may begin. Windows begin anywhere, chunks at their
        # multiples.
        latest_start = block_tokens - gcd(self.chunk or 1, block_tokens)
        return (latest_start + span - 1) // block_tokens

    def num_pairs(self, num_tokens: int) -> int:
        """Sum over the first `num_tokens` tokens of a sequence of the number of tokens that each one sees."""
        if self.chunk is not None:
            num_chunks, rest = divmod(num_tokens, self.chunk)
            return num_chunks * _triangle(self.chunk) + _triangle(rest)
        if self.window is not None and num_tokens > self.window:
            return _triangle(self.window) + (num_tokens - self.window) * self.window
        return _triangle(num_tokens)


EVERYTHING: Final = Sight()


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
