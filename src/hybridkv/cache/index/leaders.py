"""Leaders: running requests that compute a prefix which another request needs, so that it can wait for the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridkv.cache.index.resume import Found
from hybridkv.cache.index.tree import Node, PathNode, common_blocks
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.tokens import TOKEN_BYTES


class Match(NamedTuple):
    """Result of looking up a prompt in the index."""

    num_tokens: int
    """Position at which a request would resume."""
    matched_tokens: int
    """Full-attention KV that matches, in whole blocks."""
    missing: str
    leader: Lease | None
    """A running request that computes more of this prefix, or recomputes it because a state is missing."""
    leader_tokens: int
    """Length of the prefix shared with the leader, in whole blocks; 0 without a leader."""
    found: Found
    """The lookup result, which `begin` reuses."""


class Leaders:
    """The block that each lease computes next."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * TOKEN_BYTES
        self._computing: dict[tuple[Node, bytes], Lease] = {}
        """By the leaf of the lease and the tokens of its next block."""

    def announce(self, lease: Lease) -> None:
        """Register the prompt block that a lease computes next, so that requests with the same prefix can wait."""
        self.withdraw(lease)
        start, size = lease.leaf.end * self.block_bytes, self.block_bytes
        if not lease.is_pin and start + size <= lease.prompt_tokens * TOKEN_BYTES:
            lease.announced = (lease.leaf, bytes(lease.tokens[start : start + size]))
            self._computing.setdefault(lease.announced, lease)

    def withdraw(self, lease: Lease) -> None:
        block = lease.announced
        if block is not None:
            if self._computing.get(block) is lease:
                del self._computing[block]
            lease.announced = None

    def find_leader(
        self, path: Sequence[PathNode], tokens: bytes, max_blocks: int, taps: Sequence[int]
    ) -> tuple[Lease | None, int]:
        """A lease at the end of `path` that computes the next block of `tokens`, and the shared prefix's length.

        It uses all tapped layers of `taps`.
        """
        if not path:
            return None, 0
        node, num_blocks = path[-1]
        first, size = node.end, self.block_bytes
        if num_blocks < node.num_blocks or first >= max_blocks:
            return None, 0
        leader = self._computing.get((node, tokens[first * size : (first + 1) * size]))
        if leader is None or not leader.has_taps(taps):
            return None, 0
        ahead = leader.tokens[first * size : leader.prompt_tokens * TOKEN_BYTES]
        most = min(len(ahead) // size, max_blocks - first)
        return leader, (first + common_blocks(ahead, tokens, first * size, most, size)) * self.block_tokens

    def find_rebuilder(
        self, leases: Iterable[Lease], key: bytes, tokens: bytes, max_blocks: int, position: int, taps: Sequence[int]
    ) -> tuple[Lease | None, int]:
        """A lease that recomputes a known prefix because a state or tap is missing, and the shared prefix's length.

        It can keep a checkpoint where the prompts diverge.
        """
        best, most, size = None, position, self.block_bytes
        for lease in leases:
            is_running = lease.computed < lease.prompt_tokens and not (lease.is_pin or lease.aborted)
            if is_running and lease.root_key == key and lease.has_taps(taps):
                blocks = min(lease.prompt_tokens // self.block_tokens, max_blocks)
                if not blocks or lease.tokens[:size] != tokens[:size]:
                    continue
                shared = common_blocks(lease.tokens, tokens, 0, blocks, size) * self.block_tokens
                if shared > max(most, lease.computed):
                    best, most = lease, shared
        return best, most if best is not None else 0
