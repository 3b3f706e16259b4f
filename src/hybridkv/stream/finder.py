"""The half that finds: which blocks a request has, and what a store can add to it. No pages, and no torch.

It may live in another process than the half that moves (`mover`): all that goes from one to the other is plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hybridkv.store import ObjectName, Store
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.keys import BlockKeys
from hybridkv.stream.lookup import last_stored
from hybridkv.stream.stats import StreamStats
from hybridkv.workers import Workers

_THREADS = 2
LOOKUP_TIMEOUT_S = 2.0


class Fetch:
    """What a store can add to a prompt: known at once, soon, or never."""

    def __init__(self, start: int, found: Future[int], deadline: float, clock: Callable[[], float]) -> None:
        self._start = start
        self._found = found
        self._deadline = deadline
        self._clock = clock

    @property
    def is_answered(self) -> bool:
        return self._found.done()

    @property
    def is_late(self) -> bool:
        return not self._found.done() and self._clock() >= self._deadline

    @property
    def has_failed(self) -> bool:
        return self._found.done() and self._found.exception() is not None

    @property
    def position(self) -> int:
        """Where the store would let the prompt resume; 0 if it adds nothing, does not answer, or has failed.

        What was in memory when it was asked may be gone by now: the store has said nothing about that part.
        """
        if not self._found.done() or self.has_failed or self._found.result() <= self._start:
            return 0
        return self._found.result()


class Finder:
    """Asks one store, on threads of its own."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        stats: StreamStats,
        *,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        on_answer: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_answer`: called on any thread when a lookup has ended."""
        self.catalogue = catalogue
        self._store = store
        self._stats = stats
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._clock = clock
        self._workers = Workers(_THREADS, "hybridkv-find")
        self._asked: list[Fetch] = []
        """Lookups that have not been answered yet."""
        self._workers.submit(lambda: store.describe(catalogue.namespace, catalogue.description))

    @property
    def is_blocked(self) -> bool:
        """Whether lookups hang on all threads: then no request waits for another one."""
        self._asked = [fetch for fetch in self._asked if not fetch.is_answered]
        return sum(fetch.is_late for fetch in self._asked) >= self._workers.count

    def block_keys(self, root_key: bytes) -> BlockKeys:
        return BlockKeys(root_key, self.catalogue.block_tokens)

    def find(self, keys: BlockKeys, tokens: bytes, start: int, limit: int) -> Fetch | None:
        """Ask the store what it has of a prompt after `start`, up to `limit`. None: nothing worth asking for."""
        size = self.catalogue.block_tokens
        if limit // size <= start // size:
            return None
        if self.is_blocked:
            self._stats.skipped_lookups += 1
            return None
        self._stats.lookups += 1
        found = self._workers.submit(
            lambda: last_stored(self._store, self.catalogue, keys.first(limit // size, tokens), start)
        )
        found.add_done_callback(lambda _: self._on_answer())
        fetch = Fetch(start, found, self._clock() + self._timeout_s, self._clock)
        self._asked.append(fetch)
        return fetch

    def touch(self, names: Sequence[ObjectName]) -> None:
        """Objects have been of use: the store keeps them longer. The first object is needed first."""
        self._workers.submit(lambda: self._store.touch(list(reversed(names))))

    def close(self, timeout_s: float) -> None:
        """What hangs is left to itself."""
        self._workers.close(0.0 if self.is_blocked else timeout_s)
