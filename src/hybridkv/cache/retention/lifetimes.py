"""Lifetimes: how long clients would like to have checkpoints kept. A hint for the eviction queue, not a pin.

Until its lifetime has passed, a checkpoint is worth `_FACTOR` times what the eviction policy says. Each request that
names it again starts its lifetime anew. All checkpoints with lifetimes take at most `_MOST_PART` of the memory, in
equal shares of the clients that have any. A client over its share loses the lifetimes of the checkpoints that it named
first: they stay as long as others do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from hybridkv.cache.index.tree import Checkpoint

_FACTOR = 4.0
"""Larger: checkpoints with lifetimes push out others that are used more often. Smaller: lifetimes say less."""
_MOST_PART = 0.5
"""Larger: less memory for requests without lifetimes. Smaller: fewer checkpoints can have one."""


class Lifetimes:
    """The lifetimes of one cache's checkpoints."""

    def __init__(self, total_bytes: int, seconds: Callable[[], float] = time.monotonic) -> None:
        """`total_bytes`: the memory of the cache."""
        self._total_bytes = total_bytes
        self._seconds = seconds
        self._by_client: dict[str, OrderedDict[Checkpoint, int]] = {}
        """The bytes of checkpoints that have a lifetime, by client. Those named first come first."""
        self._ends: list[tuple[float, int, Checkpoint]] = []
        """A heap. Entries are stale if the checkpoint ends at another time."""
        self._tickets = count()

    @property
    def num_clients(self) -> int:
        """Number of clients with checkpoints that have lifetimes."""
        return len(self._by_client)

    def share(self) -> float:
        """Bytes that one client may have."""
        return self._total_bytes * _MOST_PART / max(1, len(self._by_client))

    def start(self, checkpoint: Checkpoint, client: str, lifetime_s: float, num_bytes: int) -> list[Checkpoint]:
        """Start the lifetime of a checkpoint, or start it anew. Returns the checkpoints that lost theirs for it.

        A checkpoint belongs to the client that named it last, and keeps the later end.
        """
        until = max(checkpoint.wanted_until, self._seconds() + lifetime_s)
        self.forget(checkpoint)
        is_new = client not in self._by_client
        self._by_client.setdefault(client, OrderedDict())[checkpoint] = num_bytes
        checkpoint.wanted_until, checkpoint.wanted_by = until, client
        heappush(self._ends, (until, next(self._tickets), checkpoint))
        lost: list[Checkpoint] = []
        for one in list(self._by_client) if is_new else [client]:
            lost += self._trim(one)
        return lost

    def forget(self, checkpoint: Checkpoint) -> None:
        """End the lifetime of a checkpoint, if it has one."""
        if not checkpoint.wanted_until:
            return
        checkpoint.wanted_until = 0.0
        own = self._by_client[checkpoint.wanted_by]
        del own[checkpoint]
        if not own:
            del self._by_client[checkpoint.wanted_by]

    def take_ended(self) -> list[Checkpoint]:
        """Checkpoints whose lifetime has passed since the last call."""
        ended: list[Checkpoint] = []
        while self._ends and (self._ends[0][0] <= self._seconds() or self._is_stale(self._ends[0])):
            entry = heappop(self._ends)
            if not self._is_stale(entry):
                self.forget(entry[2])
                ended.append(entry[2])
        return ended

    def _is_stale(self, entry: tuple[float, int, Checkpoint]) -> bool:
        return entry[2].wanted_until != entry[0]

    def _trim(self, client: str) -> list[Checkpoint]:
        """Take lifetimes from a client until it is within its share."""
        own, lost = self._by_client[client], list[Checkpoint]()
        num_bytes, share = sum(own.values()), self.share()
        while num_bytes > share:
            checkpoint = next(iter(own))
            num_bytes -= own[checkpoint]
            self.forget(checkpoint)
            lost.append(checkpoint)
        return lost


def weighted(value: float, *, is_wanted: bool) -> float:
    """The value of an item that may have a lifetime. Values of policies may be negative."""
    if not is_wanted:
        return value
    return value * _FACTOR if value > 0 else value / _FACTOR
