"""Finder: looks up how far a store can extend the prefix that memory has for a request. No pages, and no torch.

The finder may run in another process than the mover (`mover`): only plain data passes between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait

from hybridkv.store import ObjectName, Store
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.keys import BlockKeys
from hybridkv.stream.lookup import Found, Prompt, last_stored
from hybridkv.stream.stats import StreamStats
from hybridkv.workers import Workers

_THREADS = 2
LOOKUP_TIMEOUT_S = 2.0


class Fetch:
    """One lookup: how far a store can extend a prompt's prefix. The answer may come later, or never."""

    def __init__(self, start: int, found: Future[Found], deadline: float, clock: Callable[[], float]) -> None:
        self._start = start
        self._found = found
        self._deadline = deadline
        self._clock = clock

    @property
    def is_answered(self) -> bool:
        return self._found.done()

    def wait(self, most_s: float) -> None:
        """Wait for the answer."""
        wait([self._found], most_s)

    @property
    def is_late(self) -> bool:
        return not self._found.done() and self._clock() >= self._deadline

    @property
    def has_failed(self) -> bool:
        return self._found.done() and self._found.exception() is not None

    @property
    def position(self) -> int:
        """Position at which the prompt can resume with the store's objects; 0 without an answer or without a gain.

        The answer is valid only while memory still has the tokens before `start`, as it had at the lookup.
        """
        if not self._found.done() or self.has_failed or self._found.result().position <= self._start:
            return 0
        return self._found.result().position

    @property
    def start(self) -> int:
        """Memory had the tokens before this position when the store was asked."""
        return self._start

    @property
    def matched(self) -> int:
        """Full-attention KV is stored up to here, maybe deeper than `position`. Valid once there is an answer."""
        return self._start if self.has_failed else self._found.result().matched


class Finder:
    """Runs lookups in one store, on its own threads."""

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
        """Whether lookups hang on all threads. Then another lookup would only wait."""
        self._asked = [fetch for fetch in self._asked if not fetch.is_answered]
        return sum(fetch.is_late for fetch in self._asked) >= self._workers.count

    def block_keys(self, root_key: bytes) -> BlockKeys:
        return BlockKeys(root_key, self.catalogue.block_tokens)

    def find(
        self, keys: BlockKeys, tokens: bytes, start: int, limit: int, *, matched: int = 0, taps: Collection[str] = ()
    ) -> Fetch | None:
        """Look up a prompt after `start`, up to `limit`. None: no full block to gain, or `is_blocked`.

        `matched`: memory has its full-attention KV up to here. `taps`: groups of tapped layers that it needs, too.
        """
        size = self.catalogue.block_tokens
        if limit // size <= start // size:
            return None
        if self.is_blocked:
            self._stats.skipped_lookups += 1
            return None
        self._stats.lookups += 1
        prompt = Prompt(lambda ends: keys.at(ends, tokens), start, limit, matched, taps)
        found = self._workers.submit(lambda: last_stored(self._store, self.catalogue, prompt))
        found.add_done_callback(lambda _: self._on_answer())
        fetch = Fetch(start, found, self._clock() + self._timeout_s, self._clock)
        self._asked.append(fetch)
        return fetch

    def prefetch(self, fetch: Fetch, keys: BlockKeys, tokens: bytes, taps: Collection[str] = ()) -> None:
        """Have the store copy what a lookup has found to its fastest tier: the request will load it later."""

        def ask() -> None:
            ends = self.catalogue.load_ends(fetch.start, fetch.position, taps)
            found = keys.at(ends, tokens)
            self._store.prefetch(self.catalogue.load_names(fetch.start, fetch.position, found, taps))

        if fetch.position and self._store.can_prefetch and not self.is_blocked:
            self._workers.submit(ask)

    def touch(self, names: Sequence[ObjectName]) -> None:
        """Mark objects as used, so that the store evicts them later. `names`: in the order in which they are needed."""
        self._workers.submit(lambda: self._store.touch(list(reversed(names))))

    def close(self, timeout_s: float) -> None:
        """Stop the threads. `close` does not wait for threads that hang."""
        self._workers.close(0.0 if self.is_blocked else timeout_s)
