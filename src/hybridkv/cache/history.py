"""What the eviction policy learns from: what was kept, used, left behind, evicted, and asked for again.

Nothing here holds a page. A lease only tells at its first commit what it used: one that found no room has used nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.eviction import EvictionQueue, Item, is_superseded
from hybridkv.cache.eviction_log import Eviction, EvictionLog
from hybridkv.cache.index import Checkpoint, Node
from hybridkv.cache.lease import Lease
from hybridkv.cache.policy import Kind, Rating


class History:
    """The past of one cache, counted in requests."""

    def __init__(self, queue: EvictionQueue, block_tokens: int) -> None:
        self.clock = 0
        """Ticks with each lease that takes a place in the index."""
        self.log = EvictionLog()
        self._queue = queue
        self._policy = queue.policy
        self._block_tokens = block_tokens

    # --- kept ---------------------------------------------------------------------------------------------------------

    def kept(self, item: Item) -> None:
        """Something new may be reused, or evicted."""
        self._policy.learn_kept(self._queue.offer(item).group, 1)

    def superseded(self, checkpoint: Checkpoint) -> None:
        """Something deeper is kept now on its path."""
        before = checkpoint.rating
        if before is None or not checkpoint.is_news:
            return
        if not checkpoint.num_hits:  # by its own request, before anyone else could use it
            self._policy.learn_kept(before.group, -1)
        self.kept(checkpoint)
        checkpoint.is_news = False

    def deepest_again(self, checkpoint: Checkpoint) -> None:
        """What superseded it has gone."""
        checkpoint.is_news = True
        self.kept(checkpoint)

    # --- used ---------------------------------------------------------------------------------------------------------

    def used(self, lease: Lease, checkpoint: Checkpoint) -> None:
        """A lease resumes from it."""
        if checkpoint.kind is Kind.END and not is_superseded(checkpoint):
            lease.turn, lease.continued_from = checkpoint.turn + checkpoint.num_hits + 1, checkpoint.position
        self._note(lease, checkpoint.rating, checkpoint.last_used)
        lease.resumed_from = checkpoint
        checkpoint.last_used = self.clock

    def continued(self, lease: Lease) -> None:
        """A lease goes on from the end of a run, where every block boundary can be resumed."""
        leaf = lease.leaf
        if leaf.parent is None:
            return
        if leaf.children:
            leaf.turn += 1  # one more branches off here
        elif leaf.refs == 1:
            self._note(lease, leaf.rating, leaf.last_used)
            lease.turn, lease.continued_from = leaf.turn + 1, lease.computed

    def used_in_part(self, lease: Lease, node: Node, num_blocks: int) -> None:
        """A lease goes on from inside a run: it was reused if that is most of it."""
        if not node.children and not node.refs and 2 * num_blocks >= node.num_blocks:
            self._note(lease, node.rating, node.last_used)

    def confirm(self, lease: Lease) -> None:
        """The lease has computed something: what it said it used counts."""
        for group, age in lease.lessons:
            self._policy.learn_reused(group, age)
        lease.lessons = []
        checkpoint, lease.resumed_from = lease.resumed_from, None
        if checkpoint is not None:
            checkpoint.num_hits += 1
            checkpoint.is_news = True

    def _note(self, lease: Lease, rating: Rating | None, last_used: int) -> None:
        if rating is not None and rating.group:
            lease.lessons.append((rating.group, self.clock - last_used))

    # --- evicted ------------------------------------------------------------------------------------------------------

    def evicted(self, item: Item, rating: Rating | None) -> None:
        """Keep the name of what is about to go, with how it was rated."""
        if rating is None or not rating.group:
            return
        if isinstance(item, Node):
            node, position, turn, superseded = item, item.end * self._block_tokens, item.turn + 1, False
        else:
            assert item.node is not None
            node, position = item.node, item.position
            turn, superseded = item.turn + item.num_hits + 1, is_superseded(item)
        block = position // self._block_tokens - 1 - node.start
        if 0 <= block < node.num_blocks:
            self.log.remember(node.keys[block], Eviction(position, turn, rating.group, item.last_used, superseded))

    def recall(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """A lease asks for blocks by these names: did something that was evicted end at one of them?

        What was evicted piece by piece has left several entries: one request reuses it once.
        """
        eviction = self.log.recall(keys)
        if eviction is None or eviction.position <= lease.continued_from:
            return
        if not lease.has_recalled:
            self._policy.learn_reused(eviction.group, self.clock - eviction.last_used)
            lease.has_recalled = True
        if not eviction.is_superseded:
            lease.turn, lease.continued_from = eviction.turn, eviction.position
