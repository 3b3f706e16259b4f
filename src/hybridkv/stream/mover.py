"""Mover: copies rows of stored objects into pages, and rows of pages into objects. It makes no lookups.

It knows a request only as a `PageRequest` and the keys of the blocks at which objects end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from hybridkv.cache import NULL_PAGE
from hybridkv.store import Store
from hybridkv.stream.boxes import Span
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.dump import Dumper, Outgoing
from hybridkv.stream.dump_rule import DumpPoint
from hybridkv.stream.form import StoredGroup
from hybridkv.stream.load import Load
from hybridkv.stream.requests import PageRequest
from hybridkv.stream.row_io import PageBytes
from hybridkv.stream.stats import StreamStats
from hybridkv.stream.step import StepTransfers
from hybridkv.workers import Workers

LOG = logging.getLogger("hybridkv.stream")
_READERS = 8
_BANDWIDTH_EMA_WEIGHT = 0.3
LOAD_TIMEOUT_S = 30.0
MAX_WAITING_BYTES = 256 * 2**20
CLOSE_TIMEOUT_S = 30.0
"""`close` waits this long at most for objects to be written."""


class Mover:
    """Called on the thread that owns the pages. Other threads do the work."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        pages: PageBytes,
        stats: StreamStats,
        *,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        on_load: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_waiting_bytes`: bound on rows waiting for a write. `on_load`: called on any thread when a load ends."""
        self.catalogue = catalogue
        self._store = store
        self._pages = pages
        self._stats = stats
        self._load_timeout_s = load_timeout_s
        self._on_load = on_load
        self._clock = clock
        self._dumper = Dumper(store, pages, stats, max_waiting_bytes)
        self._readers = Workers(_READERS, "hybridkv-load")
        self._loads: list[Load] = []
        """Loads that still occupy readers."""
        self._bytes_per_s = 0.0
        """Exponential moving average of load bandwidth; 0 before the first load."""

    # --- in -----------------------------------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether reads hang on all threads. Then another load would only wait."""
        self._loads = [load for load in self._loads if load.is_reading]
        return sum(load.num_hanging for load in self._loads) >= self._readers.count

    def load(self, request: PageRequest, keys: Mapping[int, bytes], pages: PageBytes | None = None) -> Load:
        """Start to fill the request's pages. `keys`: at the catalogue's `load_ends`. `pages`: if not the mover's."""
        load = Load(
            self._store,
            self.catalogue,
            pages or self._pages,
            request,
            keys,
            deadline=self._clock() + self._load_timeout_s,
            clock=self._clock,
        )
        self._loads.append(load)
        load.submit(self._readers, self._on_load)
        return load

    def predicted_seconds(self, start: int, end: int, names: Collection[str] = ()) -> float | None:
        """Predicted time of a load at the current bandwidth; None before the first load. `names`: with these taps."""
        if not self._bytes_per_s:
            return None
        return self.catalogue.load_bytes(start, end, names) / self._bytes_per_s

    def ended(self, load: Load, mode: str) -> None:
        """Count a load that has ended or was given up."""
        stats = self._stats
        if load.failure is not None:
            stats.failures[load.failure] += 1
            if load.failure == "error":  # no store should raise it: this log line is the only sign of the bug
                LOG.error("a load failed", exc_info=load.error)
        else:
            stats.loads[mode] += 1
            rate = load.num_bytes / max(load.seconds, 1e-6)
            self._bytes_per_s += (rate - self._bytes_per_s) * (_BANDWIDTH_EMA_WEIGHT if self._bytes_per_s else 1.0)
            stats.loaded_tokens += load.end - load.start
        stats.loaded_bytes += load.num_bytes
        stats.load_seconds += load.seconds

    # --- out ----------------------------------------------------------------------------------------------------------

    def step(self, others_wait: Callable[[], bool] | None = None) -> StepTransfers:
        """Empty transfers for a new step. `others_wait`: as of `StepTransfers`."""
        return StepTransfers(self._dumper, others_wait)

    def dump(self, request: PageRequest, points: Iterable[DumpPoint], keys: Mapping[int, bytes]) -> list[Outgoing]:
        """Begin objects that end at `points`, for a step that computes them. `keys`: at their ends.

        Objects are left out if a page is missing, if they are being written already, or if too many bytes wait.
        """
        found: list[Outgoing] = []
        for point in points:
            tokens = {
                group: self._block_spans(group, request, point.end) for group in self.catalogue.needed(request.blocks)
            }
            states = {group: _state_spans(group, request, point.end) for group in self.catalogue.state_groups}
            resumes = point.resumes and None not in (*tokens.values(), *states.values())
            if point.is_spare and self._store.idle_bytes < self.catalogue.state_bytes:
                resumes = False
            if resumes or self.catalogue.ends_stretch(point.end):
                found += self._begin({**tokens, **states} if resumes else tokens, point, keys[point.end])
        return found

    def dump_now(self, request: PageRequest, points: Iterable[DumpPoint], keys: Mapping[int, bytes]) -> None:
        """Write objects of tokens that are computed already, without a step."""
        for outgoing in self.dump(request, points, keys):
            for number in range(len(outgoing.group.chunks)):
                self._dumper.chunk(outgoing, number)
            self._dumper.judge(outgoing, True)
        self.settle()

    def settle(self) -> None:
        """Call after a step: pages that were copied out may be overwritten from now on."""
        self._pages.settle()

    def _block_spans(self, group: StoredGroup, request: PageRequest, end: int) -> list[Span] | None:
        """The pages of each chunk of the object that ends at `end`; None if one is missing. Empty: no blocks."""
        stretch, num_tokens = self.catalogue.stretch(group, end), self.catalogue.num_tokens(group, end)
        if not num_tokens:
            return []
        pages = [request.blocks[chunk.table][stretch.first : stretch.last] for chunk in group.chunks]
        if any(NULL_PAGE in one for one in pages):
            return None
        return [Span(one, num_tokens, self.catalogue.block_tokens) for one in pages]

    def _begin(self, spans: Mapping[StoredGroup, list[Span] | None], point: DumpPoint, key: bytes) -> list[Outgoing]:
        """Objects of those groups that have all pages, and whose run of slices this rank writes."""
        begun, end = [], point.end
        for group, found in spans.items():
            if found and group.is_writer:
                saved = self.catalogue.grid_tokens if group.is_state else found[0].num_tokens
                is_spare = point.is_spare and (group.is_state or not self.catalogue.ends_stretch(end))
                name = self.catalogue.name(group, key)
                begun.append(Outgoing(name, group, found, position=end, num_tokens=saved, is_spare=is_spare))
        return [outgoing for outgoing in begun if self._dumper.begin(outgoing)]

    def drain(self) -> None:
        """Wait until everything dumped so far is written."""
        self._dumper.drain()

    def close(self, timeout_s: float, reads_timeout_s: float) -> None:
        """Give up all loads, and write all dumped objects. `close` does not wait for threads that hang."""
        for load in self._loads:
            load.give_up("aborted", RuntimeError("the engine was closed"))
        self._dumper.close(timeout_s)
        self._readers.close(0.0 if self.is_blocked else reads_timeout_s)


def _state_spans(group: StoredGroup, request: PageRequest, end: int) -> list[Span] | None:
    """The page of each chunk of the state at `end`; None if there is no state."""
    states = [request.states[chunk.table].get(end) for chunk in group.chunks]
    if None in states:
        return None
    return [Span([pages[chunk.row.page]], 1, 1) for chunk, pages in zip(group.chunks, states, strict=True) if pages]
