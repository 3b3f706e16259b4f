"""Streamer: the finder and the mover of one engine, in one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from hybridkv.store import Store
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.finder import LOOKUP_TIMEOUT_S, Fetch, Finder
from hybridkv.stream.keys import BlockKeys
from hybridkv.stream.load import Load
from hybridkv.stream.mover import CLOSE_TIMEOUT_S, LOAD_TIMEOUT_S, MAX_WAITING_BYTES, Mover
from hybridkv.stream.row_io import PageBytes
from hybridkv.stream.stats import StreamStats

_LAST_READS_S = 2.0
"""`close` waits at most this long for reads and lookups, which no request needs any more."""


class Streamer:
    """A finder and a mover on one store. It decides nothing about requests."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        pages: PageBytes,
        *,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages`: copies rows into pages and out. `max_waiting_bytes`: bound on rows waiting to be written."""
        self.store = store
        self.catalogue = catalogue
        self.stats = StreamStats()
        self.on_event: Callable[[], None] = _nobody
        """Called on any thread when a lookup or a load has ended."""
        self.finder = Finder(
            store, catalogue, self.stats, timeout_s=lookup_timeout_s, on_answer=self._tell, clock=clock
        )
        self.mover = Mover(
            store,
            catalogue,
            pages,
            self.stats,
            load_timeout_s=load_timeout_s,
            max_waiting_bytes=max_waiting_bytes,
            on_load=self._tell,
            clock=clock,
        )
        self._close_timeout_s = close_timeout_s

    def find(
        self, keys: BlockKeys, tokens: bytes, start: int, limit: int, *, matched: int = 0, taps: Collection[str] = ()
    ) -> Fetch | None:
        """Look up a prompt, as `Finder.find`. None also while loads hang on all threads."""
        if self.mover.is_blocked:
            self.stats.skipped_lookups += 1
            return None
        return self.finder.find(keys, tokens, start, limit, matched=matched, taps=taps)

    def ended(self, load: Load, mode: str) -> None:
        """Count a load that has ended or was given up. Objects of a successful load are touched in the store."""
        self.mover.ended(load, mode)
        if load.failure is None:
            self.finder.touch(load.names)

    @property
    def num_idle_checkpoints(self) -> int:
        """Number of checkpoints that would fill idle room of the store."""
        nbytes = self.catalogue.state_bytes
        return self.store.idle_bytes // nbytes if nbytes else 0

    def snapshot(self) -> StreamStats:
        """A copy of the current counters."""
        stats = self.stats
        return replace(stats, loads=Counter(stats.loads), failures=Counter(stats.failures))

    def drain(self) -> None:
        """Wait until everything dumped so far is written."""
        self.mover.drain()

    def close(self) -> None:
        """Write all dumped objects, then close the store. `close` does not wait for threads that hang."""
        self.mover.close(self._close_timeout_s, _LAST_READS_S)
        self.finder.close(_LAST_READS_S)
        self.store.close()

    def _tell(self) -> None:
        self.on_event()


def _nobody() -> None:
    """Default of `on_event`: no engine listens."""
