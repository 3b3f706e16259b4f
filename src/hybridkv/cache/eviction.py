"""What goes first: nodes and checkpoints in the order of their value to the policy."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from hybridkv.cache.index import Checkpoint, Node
from hybridkv.cache.layout import CacheLayout, Role
from hybridkv.cache.policy import Candidate, EvictionPolicy


class EvictionQueue:
    """A heap with lazy deletion: an item counts by its latest offer, if it may be evicted when its turn comes."""

    def __init__(self, layout: CacheLayout, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._block_tokens = layout.block_tokens
        self._checkpoint_bytes = layout.checkpoint_bytes
        self._block_bytes = sum(group.page_bytes for group in layout.token_groups if group.role is Role.FULL)
        self._heap: list[tuple[float, int, int, Node | Checkpoint]] = []
        self._serial = 0
        self._prune_at = 1024

    def offer(self, item: Node | Checkpoint) -> None:
        """Queue an item at its present value; earlier offers of it no longer count."""
        item.stamp += 1
        self._serial += 1
        heappush(self._heap, (self._policy.value(self._facts(item)), self._serial, item.stamp, item))
        if len(self._heap) > self._prune_at:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].stamp and _exists(entry[3])]
            heapify(self._heap)
            self._prune_at = max(1024, 2 * len(self._heap))

    def pop(self) -> Node | Checkpoint | None:
        """The item of least value that may be evicted now; those that may not are offered again when they may."""
        while self._heap:
            _, _, stamp, item = heappop(self._heap)
            if stamp == item.stamp and _may_go(item):
                return item
        return None

    def _facts(self, item: Node | Checkpoint) -> Candidate:
        if isinstance(item, Checkpoint):
            position = item.position
            return Candidate(True, item.last_used, item.num_hits, position, position, self._checkpoint_bytes)
        blocks = item.num_blocks
        return Candidate(
            is_checkpoint=False,
            last_used=item.last_used,
            num_hits=item.num_hits,
            position=item.end * self._block_tokens,
            num_tokens=blocks * self._block_tokens,
            num_bytes=blocks * self._block_bytes,
        )


def _exists(item: Node | Checkpoint) -> bool:
    return item.node is not None if isinstance(item, Checkpoint) else not item.dead


def _may_go(item: Node | Checkpoint) -> bool:
    if isinstance(item, Checkpoint):
        return item.node is not None and not item.holds
    return not item.dead and not item.refs and not item.children and item.parent is not None
