"""The one object an engine talks to: find, load and dump. It decides nothing about requests."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from hybridkv.cache import NULL_PAGE, CacheLayout, StepTables
from hybridkv.memory import Memory
from hybridkv.store import Store
from hybridkv.stream.catalogue import STRETCH_TOKENS, Catalogue, StoredGroup
from hybridkv.stream.dump import Dumper, Outgoing
from hybridkv.stream.finder import Finder
from hybridkv.stream.keys import BlockKeys
from hybridkv.stream.load import Load
from hybridkv.stream.pages import page_bytes
from hybridkv.stream.stats import StreamStats
from hybridkv.stream.workers import Workers

LOG = logging.getLogger("hybridkv.stream")
_READERS = 8
_FINDERS = 2
_LAST_READS_S = 2.0
"""For reads and lookups under way when the streamer is closed: nobody waits for what they bring."""
_MAX_WAITING_BYTES = 256 * 2**20
_NEWS = 0.3
"""How much a load changes what is expected of the next."""
LOAD_TIMEOUT_S = 30.0
LOOKUP_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 30.0
"""For what is on its way to a store when it is closed."""


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

        What was in memory when it was asked may be gone by now: that is nothing the store has said a word about.
        """
        if not self._found.done() or self.has_failed or self._found.result() <= self._start:
            return 0
        return self._found.result()


class Streamer:
    """One engine's traffic with its stores. Called on the engine's thread; the work is done on others."""

    def __init__(
        self,
        store: Store,
        memory: Memory,
        layout: CacheLayout,
        identity: str,
        *,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        stretch_tokens: int = STRETCH_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity`: a digest of the weights. `max_waiting_bytes`: of rows that wait to be written.

        `stretch_tokens`: of an object. Those of other stretches are not found.
        """
        self.store = store
        self.catalogue = Catalogue(memory.plan, layout, identity, stretch_tokens=stretch_tokens)
        self.stats = StreamStats()
        self.on_event: Callable[[], None] = _nobody
        """Called on any thread when something is over that the engine may wait for."""
        self._pages = page_bytes(memory)
        self.dumper = Dumper(store, self._pages, self.stats, max_waiting_bytes)
        self._finder = Finder(store, self.catalogue)
        self._load_timeout_s = load_timeout_s
        self._lookup_timeout_s = lookup_timeout_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._readers = Workers(_READERS, "hybridkv-load")
        self._finders = Workers(_FINDERS, "hybridkv-find")
        self._bytes_per_s = 0.0
        """Of the last loads; older ones count less and less."""
        self._asked: list[Fetch] = []
        """Lookups that have not been answered yet."""
        self._loads: list[Load] = []
        """Loads that still occupy readers."""
        self._finders.submit(lambda: store.describe(self.catalogue.namespace, self.catalogue.description))

    def block_keys(self, root_key: bytes) -> BlockKeys:
        return BlockKeys(root_key, self.catalogue.block_tokens)

    # --- in -----------------------------------------------------------------------------------------------------------

    def find(self, keys: BlockKeys, tokens: bytes, start: int, limit: int) -> Fetch | None:
        """Ask the store what it has of a prompt after `start`, up to `limit`. None: nothing worth asking for."""
        size = self.catalogue.block_tokens
        if limit // size <= start // size:
            return None
        if self._is_blocked():
            self.stats.skipped_lookups += 1
            return None
        self.stats.lookups += 1
        found = self._finders.submit(lambda: self._finder.find(keys.first(limit // size, tokens), start))
        found.add_done_callback(lambda _: self.on_event())
        fetch = Fetch(start, found, self._clock() + self._lookup_timeout_s, self._clock)
        self._asked.append(fetch)
        return fetch

    def _is_blocked(self) -> bool:
        """Whether all threads that look up, or all that read, hang: then no request waits for them."""
        self._asked = [fetch for fetch in self._asked if not fetch.is_answered]
        self._loads = [load for load in self._loads if load.is_reading]
        num_hanging = sum(load.num_hanging for load in self._loads)
        return sum(fetch.is_late for fetch in self._asked) >= self._finders.count or num_hanging >= self._readers.count

    def load(self, tables: StepTables, keys: BlockKeys, tokens: bytes | bytearray) -> Load:
        """Start to fill the pages of a step that begins with loaded tokens."""
        load = Load(
            self.store,
            self.catalogue,
            self._pages,
            tables,
            keys.first(tables.start // self.catalogue.block_tokens, tokens),
            deadline=self._clock() + self._load_timeout_s,
            clock=self._clock,
        )
        self._loads.append(load)
        load.submit(self._readers, lambda: self.on_event())
        return load

    def predicted_seconds(self, start: int, end: int) -> float | None:
        """What a load would take, going by the last ones; None before there were any."""
        if not self._bytes_per_s:
            return None
        return self.catalogue.load_bytes(start, end) / self._bytes_per_s

    def ended(self, load: Load, mode: str) -> None:
        """A load is over, or is given up: count it."""
        stats = self.stats
        if load.failure is not None:
            stats.failures[load.failure] += 1
            if load.failure == "error":  # no store should raise it: a bug, and the request does not tell
                LOG.error("a load failed", exc_info=load.error)
        else:
            stats.loads[mode] += 1
            rate = load.num_bytes / max(load.seconds, 1e-6)
            self._bytes_per_s += (rate - self._bytes_per_s) * (_NEWS if self._bytes_per_s else 1.0)
            stats.loaded_tokens += load.end - load.start
            self._finders.submit(lambda: self.store.touch(list(reversed(load.names))))
        stats.loaded_bytes += load.num_bytes
        stats.load_seconds += load.seconds

    # --- out ----------------------------------------------------------------------------------------------------------

    def has_pages(self, group: StoredGroup, end: int, table: Sequence[int]) -> bool:
        """Whether all pages of the object that ends at `end` are there."""
        stretch = self.catalogue.stretch(group, end)
        return NULL_PAGE not in table[stretch.first : stretch.last]

    def token_object(self, group: StoredGroup, key: bytes, end: int, table: Sequence[int]) -> Outgoing | None:
        """The object of a token group that ends at `end`, if all its pages are there and it shall be written."""
        stretch = self.catalogue.stretch(group, end)
        pages = list(table[stretch.first : stretch.last])
        if not pages or NULL_PAGE in pages:
            return None
        return self._begin(group, key, [pages] * len(group.rows), end, stretch.num_blocks * self.catalogue.block_tokens)

    def state_object(
        self, group: StoredGroup, key: bytes, end: int, pages: Sequence[int], num_tokens: int
    ) -> Outgoing | None:
        """The object of a state at `end`. `num_tokens`: since the one before it."""
        return self._begin(group, key, [[pages[row.page]] for row in group.rows], end, num_tokens)

    def settle(self) -> None:
        """After a step: what it has left may be overwritten."""
        self._pages.settle()

    def _begin(
        self, group: StoredGroup, key: bytes, pages: Sequence[Sequence[int]], end: int, num_tokens: int
    ) -> Outgoing | None:
        name = self.catalogue.name(group, key)
        outgoing = Outgoing(name, group, pages, position=end, num_tokens=num_tokens)
        return outgoing if self.dumper.begin(outgoing) else None

    def snapshot(self) -> StreamStats:
        """The counters as they are now; a copy."""
        stats = self.stats
        return replace(stats, loads=Counter(stats.loads), failures=Counter(stats.failures))

    def drain(self) -> None:
        """Wait until everything dumped so far is written."""
        self.dumper.drain()

    def close(self) -> None:
        """Write what has been dumped, then close the store. What hangs is left to itself."""
        for load in self._loads:
            load.give_up("aborted", RuntimeError("the engine was closed"))
        self.dumper.close(self._close_timeout_s)
        is_hanging = self._is_blocked()
        self._finders.close(0.0 if is_hanging else _LAST_READS_S)
        self._readers.close(0.0 if is_hanging else _LAST_READS_S)
        self.store.close()


def _nobody() -> None:
    """Nobody waits."""
