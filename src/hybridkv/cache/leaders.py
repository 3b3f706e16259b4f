"""Requests that compute right now what another one asks for: it had better wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridkv.cache.index import Step, common_blocks
from hybridkv.cache.lease import Lease
from hybridkv.cache.tokens import TOKEN_BYTES


def find_leader(path: Sequence[Step], tokens: bytes, max_blocks: int, block_tokens: int) -> tuple[Lease | None, int]:
    """A lease that stands where the path ends and computes what comes next in `tokens`."""
    if not path:
        return None, 0
    node, num_blocks = path[-1]
    first, size = node.end, block_tokens * TOKEN_BYTES
    if num_blocks < node.num_blocks or first >= max_blocks:
        return None, 0
    leader = node.computing.get(tokens[first * size : (first + 1) * size])
    if leader is None:
        return None, 0
    ahead = leader.tokens[first * size : leader.prompt_tokens * TOKEN_BYTES]
    most = min(len(ahead) // size, max_blocks - first)
    return leader, (first + common_blocks(ahead, tokens, first * size, most, size)) * block_tokens


def find_rebuilder(
    leases: Iterable[Lease], key: bytes, tokens: bytes, max_blocks: int, position: int, block_tokens: int
) -> tuple[Lease | None, int]:
    """A lease that computes a known prefix again, for want of a state: it can leave one where the two part."""
    best, most, size = None, position, block_tokens * TOKEN_BYTES
    for lease in leases:
        if lease.computed < lease.prompt_tokens and lease.root_key == key and not (lease.is_pin or lease.aborted):
            blocks = min(lease.prompt_tokens // block_tokens, max_blocks)
            if not blocks or lease.tokens[:size] != tokens[:size]:
                continue
            shared = common_blocks(lease.tokens, tokens, 0, blocks, size) * block_tokens
            if shared > max(most, lease.computed):
                best, most = lease, shared
    return best, most if best is not None else 0
