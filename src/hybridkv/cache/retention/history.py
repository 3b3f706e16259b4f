"""What the eviction policy learns from: what was kept, used, left behind, evicted, and asked for again.

Nothing here holds a page. A lease only tells at its first commit what it used: one that found no room has used nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.index.tree import Checkpoint, Node
from hybridkv.cache.retention.eviction import EvictionQueue, Item, is_superseded
from hybridkv.cache.retention.eviction_log import Eviction, EvictionLog
from hybridkv.cache.retention.policy import Kind, Numbers, Rating


class Lineage:
    """The earlier requests that one request continues, and what of theirs it reuses. Only `History` changes it."""

    __slots__ = ("continued_from", "has_recalled", "lessons", "resumed_from", "turn")

    def __init__(self) -> None:
        self.turn = 0
        """Conversation turn: the number of earlier requests that this one continues."""
        self.continued_from = 0
        """The position at which the last of them ended."""
        self.lessons: list[tuple[Numbers, int]] = []
        """What it reuses, for the eviction policy: cohort and age. Told when it has computed something."""
        self.resumed_from: Checkpoint | None = None
        self.has_recalled = False
        """It asked for something that was evicted, and that has been counted."""

    def fork(self) -> Lineage:
        """For a fork: the same turn. What is reused counts once, for the lease that was forked."""
        twin = Lineage()
        twin.turn, twin.continued_from = self.turn, self.continued_from
        return twin


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
        self._policy.learn_kept(self._queue.offer(item).cohort, 1)

    def superseded(self, checkpoint: Checkpoint) -> None:
        """Something deeper is kept now on its path."""
        before = checkpoint.rating
        if before is None or not checkpoint.is_news:
            return
        if not checkpoint.num_hits:  # by its own request, before anyone else could use it
            self._policy.learn_kept(before.cohort, -1)
        self.kept(checkpoint)
        checkpoint.is_news = False

    def deepest_again(self, checkpoint: Checkpoint) -> None:
        """What superseded it has gone."""
        checkpoint.is_news = True
        self.kept(checkpoint)

    # --- used ---------------------------------------------------------------------------------------------------------

    def used(self, lineage: Lineage, checkpoint: Checkpoint) -> None:
        """A request resumes from it."""
        if checkpoint.kind is Kind.END and not is_superseded(checkpoint):
            lineage.turn, lineage.continued_from = checkpoint.turn + checkpoint.num_hits + 1, checkpoint.position
        self._note(lineage, checkpoint.rating, checkpoint.last_used)
        lineage.resumed_from = checkpoint
        checkpoint.last_used = self.clock

    def continued(self, lineage: Lineage, leaf: Node, position: int) -> None:
        """A request goes on from the end of `leaf`, where every block boundary can be resumed."""
        if leaf.parent is None:
            return
        if leaf.children:
            leaf.turn += 1  # one more branches off here
        elif leaf.refs == 1:
            self._note(lineage, leaf.rating, leaf.last_used)
            lineage.turn, lineage.continued_from = leaf.turn + 1, position

    def used_in_part(self, lineage: Lineage, node: Node, num_blocks: int) -> None:
        """A request goes on from inside a run: it was reused if that is most of it."""
        if not node.children and not node.refs and 2 * num_blocks >= node.num_blocks:
            self._note(lineage, node.rating, node.last_used)

    def confirm(self, lineage: Lineage) -> None:
        """The request has computed something: what it reuses counts."""
        for cohort, age in lineage.lessons:
            self._policy.learn_reused(cohort, age)
        lineage.lessons = []
        checkpoint, lineage.resumed_from = lineage.resumed_from, None
        if checkpoint is not None:
            checkpoint.num_hits += 1
            checkpoint.is_news = True

    def _note(self, lineage: Lineage, rating: Rating | None, last_used: int) -> None:
        if rating is not None and rating.cohort:
            lineage.lessons.append((rating.cohort, self.clock - last_used))

    # --- evicted ------------------------------------------------------------------------------------------------------

    def evicted(self, item: Item, rating: Rating | None) -> None:
        """Keep the name of what is about to go, with how it was rated."""
        if rating is None or not rating.cohort:
            return
        if isinstance(item, Node):
            node, position, turn, superseded = item, item.end * self._block_tokens, item.turn + 1, False
        else:
            assert item.node is not None
            node, position = item.node, item.position
            turn, superseded = item.turn + item.num_hits + 1, is_superseded(item)
        block = position // self._block_tokens - 1 - node.start
        if 0 <= block < node.num_blocks:
            self.log.remember(node.keys[block], Eviction(position, turn, rating.cohort, item.last_used, superseded))

    def recall(self, lineage: Lineage, keys: Sequence[bytes]) -> None:
        """A request asks for blocks by these names: did something that was evicted end at one of them?

        What was evicted piece by piece has left several entries: one request reuses it once.
        """
        eviction = self.log.recall(keys)
        if eviction is None or eviction.position <= lineage.continued_from:
            return
        if not lineage.has_recalled:
            self._policy.learn_reused(eviction.cohort, self.clock - eviction.last_used)
            lineage.has_recalled = True
        if not eviction.is_superseded:
            lineage.turn, lineage.continued_from = eviction.turn, eviction.position
