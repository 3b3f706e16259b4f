"""Reuse history for the eviction policy: which items were kept, used, superseded, evicted, and requested again.

It holds no pages. A lease reports what it reuses at its first commit, so a lease that found no room reports nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from hybridkv.cache.index.tree import Checkpoint, Node
from hybridkv.cache.retention.eviction import EvictionQueue, Item, is_superseded
from hybridkv.cache.retention.eviction_log import Eviction, EvictionLog
from hybridkv.cache.retention.partings import Partings
from hybridkv.cache.retention.policy import Kind, Numbers, Rating

_NUM_TIMES = 1 << 16


class Lineage:
    """The earlier requests that one request continues, and the items it reuses. Only `History` changes it."""

    __slots__ = ("continued_from", "has_recalled", "lessons", "recalled", "resumed_from", "turn")

    def __init__(self) -> None:
        self.turn = 0
        """Conversation turn: the number of earlier requests that this one continues."""
        self.continued_from = 0
        """The position at which the last of them ended."""
        self.lessons: list[tuple[Numbers, int]] = []
        """Cohort and age of the items it reuses. The eviction policy gets them at the first commit."""
        self.resumed_from: Checkpoint | None = None
        self.has_recalled = False
        """Whether its reuse of an evicted item has been counted."""
        self.recalled: Eviction | None = None
        """The deepest evicted item whose blocks it has computed again."""

    def fork(self) -> Lineage:
        """Lineage of a fork: the same turn. Reused items count once, for the lease that was forked."""
        twin = Lineage()
        twin.turn, twin.continued_from = self.turn, self.continued_from
        return twin


class History:
    """The reuse history of one cache. Time is counted in requests."""

    def __init__(self, queue: EvictionQueue, block_tokens: int, seconds: Callable[[], float] = time.monotonic) -> None:
        self.clock = 0
        """Number of times that a lease was attached to the index."""
        self.log = EvictionLog()
        self.partings = Partings()
        self._seconds = seconds
        self._times = array("d", [seconds()]) * _NUM_TIMES
        """A ring: the time of each of the last values of `clock`."""
        self._queue = queue
        self._policy = queue.policy
        self._block_tokens = block_tokens

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Count a request."""
        self.clock += 1
        self._times[self.clock % _NUM_TIMES] = self._seconds()

    def seconds_since(self, clock: int) -> float:
        """Seconds since `clock` had this value; too few if that was more than `_NUM_TIMES` requests ago."""
        known = max(clock, self.clock - _NUM_TIMES + 1)
        return max(0.0, self._seconds() - self._times[known % _NUM_TIMES])

    # --- kept ---------------------------------------------------------------------------------------------------------

    def kept(self, item: Item) -> None:
        """Record a new item that may be reused or evicted."""
        rating = self._queue.offer(item)
        if not rating.is_spare:
            self._policy.learn_kept(rating.cohort, 1)

    def superseded(self, checkpoint: Checkpoint) -> None:
        """Record that a deeper item is kept on the checkpoint's path."""
        before = checkpoint.rating
        if before is None or not checkpoint.is_news:
            return
        if not checkpoint.num_hits and not before.is_spare:  # superseded by its own request, before any other used it
            self._policy.learn_kept(before.cohort, -1)
        self.kept(checkpoint)
        checkpoint.is_news = False

    def deepest_again(self, checkpoint: Checkpoint) -> None:
        """Record that no deeper item is kept on the checkpoint's path any more."""
        checkpoint.is_news = True
        self.kept(checkpoint)

    # --- used ---------------------------------------------------------------------------------------------------------

    def used(self, lineage: Lineage, checkpoint: Checkpoint) -> None:
        """Record that a request resumes from a checkpoint."""
        if checkpoint.kind is Kind.END and not is_superseded(checkpoint):
            lineage.turn, lineage.continued_from = checkpoint.turn + checkpoint.num_hits + 1, checkpoint.position
        self._note(lineage, checkpoint.rating, checkpoint.last_used)
        lineage.resumed_from = checkpoint
        checkpoint.last_used = self.clock

    def continued(self, lineage: Lineage, leaf: Node, position: int) -> None:
        """Record that a request continues from the end of `leaf`; for layouts that need no checkpoints."""
        if leaf.parent is None:
            return
        if leaf.children:
            leaf.turn += 1  # another request branches off here
        elif leaf.refs == 1:
            self._note(lineage, leaf.rating, leaf.last_used)
            lineage.turn, lineage.continued_from = leaf.turn + 1, position

    def used_in_part(self, lineage: Lineage, node: Node, num_blocks: int) -> None:
        """Record that a request continues from inside a node. It counts as reuse if at least half of it is used."""
        if not node.children and not node.refs and 2 * num_blocks >= node.num_blocks:
            self._note(lineage, node.rating, node.last_used)

    def confirm(self, lineage: Lineage) -> None:
        """Report the items that a request reuses to the policy, at its first commit."""
        for cohort, age in lineage.lessons:
            self._policy.learn_reused(cohort, age)
        lineage.lessons = []
        checkpoint, lineage.resumed_from = lineage.resumed_from, None
        if checkpoint is not None:
            checkpoint.num_hits += 1
            checkpoint.is_news = True
            if checkpoint.rating is not None and checkpoint.rating.is_spare:
                self._queue.offer(checkpoint)

    def _note(self, lineage: Lineage, rating: Rating | None, last_used: int) -> None:
        if rating is not None and rating.cohort and not rating.is_spare:
            lineage.lessons.append((rating.cohort, self.clock - last_used))

    # --- evicted ------------------------------------------------------------------------------------------------------

    def evicted(self, item: Item, rating: Rating | None) -> None:
        """Log an item that is about to be evicted, with its rating."""
        if rating is None or rating.is_spare:
            return
        if isinstance(item, Node):
            node, position, turn, superseded = item, item.end * self._block_tokens, item.turn + 1, False
        else:
            assert item.node is not None
            node, position = item.node, item.position
            turn, superseded = item.turn + item.num_hits + 1, is_superseded(item)
        block = position // self._block_tokens - 1 - node.start
        if 0 <= block < node.num_blocks:
            eviction = Eviction(position, turn, rating.cohort, item.last_used, superseded, self.clock)
            self.log.remember(node.keys[block], eviction)

    def recall(self, lineage: Lineage, keys: Sequence[bytes]) -> None:
        """Record that a request uses blocks with these keys, in case an evicted item ended at one of them.

        An item that was evicted in several pieces has several entries, but counts once per request.
        """
        eviction = self.log.recall(keys)
        if eviction is None:
            return
        if lineage.recalled is None or lineage.recalled.position < eviction.position:
            lineage.recalled = eviction
        if eviction.position <= lineage.continued_from or not eviction.cohort:
            return
        if not lineage.has_recalled:
            self._policy.learn_reused(eviction.cohort, self.clock - eviction.last_used)
            lineage.has_recalled = True
        if not eviction.is_superseded:
            lineage.turn, lineage.continued_from = eviction.turn, eviction.position
