"""Tiered store, the fastest tier first. Reads promote objects; the write policy says when they reach lower tiers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from threading import Lock
from typing import NamedTuple

from hybridkv.errors import StoreError, StoreFault, StoreInputError
from hybridkv.store.counters import Counters
from hybridkv.store.names import ObjectName
from hybridkv.store.objects import layout
from hybridkv.store.store import EvictionHook, Leftovers, Reader, Store, Stored, StoreStats, Writer
from hybridkv.store.tiers.copy_queue import CopyQueue, CopyTask
from hybridkv.store.tiers.io import Opened, TieredReader, TieredWriter, begin_writing, copy_object, open_highest
from hybridkv.store.tiers.prefetch import Prefetcher
from hybridkv.store.tiers.promotion import Promotion

logger = logging.getLogger("hybridkv.store")

_MOST_WAITING_BYTES = 256 << 20
_BATCH = 256
_PATIENCE_S = 10.0


class WritePolicy(Enum):
    """When objects reach the tier below: at once (write-through), or on eviction and on close (write-back)."""

    THROUGH = "through"
    BACK = "back"


class Tier(NamedTuple):
    store: Store
    write: WritePolicy = WritePolicy.THROUGH


class TieredStore(Store):
    def __init__(
        self, tiers: Sequence[Tier], most_waiting_bytes: int = _MOST_WAITING_BYTES, patience_s: float = _PATIENCE_S
    ) -> None:
        """`patience_s`: how long `close` waits for one copy to end."""
        if not tiers:
            raise StoreInputError("no tiers: a tiered store has at least one")
        self.tiers = tuple(tier.store for tier in tiers)
        self._back = [level for level, tier in enumerate(tiers[:-1]) if tier.write is WritePolicy.BACK]
        self._written = self.tiers[: self._back[0] + 1] if self._back else self.tiers
        """The tiers that new objects are written to."""
        self._copies = CopyQueue(most_waiting_bytes)
        self._patience_s = patience_s
        self._prefetcher = Prefetcher(self.tiers, self._count_prefetched)
        self._counters = Counters()
        self._lock = Lock()
        self._promoting: set[ObjectName] = set()
        self._closed = False
        for level in self._back:
            self.tiers[level].on_evict(lambda reader, level=level: self._demote(reader, level + 1))  # type: ignore[misc]

    @property
    def size(self) -> int:
        return sum(store.size for store in self.tiers)

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        found = self._find(names)
        with self._counters as stats:
            stats.hits += sum(found)
            stats.misses += len(found) - sum(found)
        return found

    @property
    def opens_together(self) -> int:
        return max(store.opens_together for store in self.tiers)

    def open(self, name: ObjectName) -> Reader:
        (found,) = self.open_all([name])
        if isinstance(found, StoreError):
            raise found
        return found

    def open_all(self, names: Sequence[ObjectName]) -> list[Reader | StoreError]:
        self._prefetcher.opened(names)
        return [self._reader(found) for found in open_highest(self.tiers, names)]

    def _reader(self, found: Opened | StoreError) -> Reader | StoreError:
        if isinstance(found, StoreError):
            return found
        with self._counters as stats:
            stats.opened += 1
        reader = TieredReader(self.tiers, found.level, found.reader, self._counters)
        if found.level:
            reader.listener = self._promote(reader)
        return reader

    @property
    def can_prefetch(self) -> bool:
        return len(self.tiers) > 1

    def prefetch(self, names: Sequence[ObjectName]) -> None:
        if self.can_prefetch:
            self._prefetcher.want(names)

    def _count_prefetched(self) -> None:
        with self._counters as stats:
            stats.prefetched += 1

    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        if self._closed:  # it would keep `close` waiting
            return None
        writers = begin_writing(self._written, name, row_bytes, value=value, position=position)
        return TieredWriter(writers, layout(name.group, row_bytes).nbytes, self._counters) if writers else None

    def create_spare(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        """Begin to write to the fastest tier alone."""
        writer = None if self._closed else self.tiers[0].create_spare(name, row_bytes, value=value, position=position)
        return None if writer is None else TieredWriter([writer], layout(name.group, row_bytes).nbytes, self._counters)

    @property
    def idle_bytes(self) -> int:
        return self.tiers[0].idle_bytes

    def delete(self, names: Sequence[ObjectName]) -> int:
        found = self._find(names)
        for store in self.tiers:
            store.delete(names)
        return sum(found)

    def objects(
        self, namespace: str | None = None, group: str | None = None, *, headers: bool = False
    ) -> Iterator[Stored]:
        """List each object once, as in the fastest tier that has it."""
        seen: set[ObjectName] = set()
        for store in self.tiers:
            for stored in store.objects(namespace, group, headers=headers):
                if stored.name not in seen:
                    seen.add(stored.name)
                    yield stored

    def touch(self, names: Sequence[ObjectName]) -> None:
        for store in self.tiers:
            store.touch(names)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        for store in self.tiers:
            store.describe(namespace, info)

    def descriptions(self) -> dict[str, dict[str, str]]:
        return {key: info for store in reversed(self.tiers) for key, info in store.descriptions().items()}

    @property
    def stats(self) -> StoreStats:
        """Hits, reads and writes are counted once per call; gauges, evictions and errors are sums over all tiers."""
        stats = self._counters.copy()
        for tier in (store.stats for store in self.tiers):
            stats.objects += tier.objects
            stats.nbytes += tier.nbytes
            stats.spare_bytes += tier.spare_bytes
            stats.evicted += tier.evicted
            stats.dropped += tier.dropped
            stats.corrupt += tier.corrupt
            stats.unknown += tier.unknown
            stats.faults += tier.faults
            stats.skipped += tier.skipped
            stats.round_trips += tier.round_trips
        return stats

    def collect(self) -> Leftovers:
        found = [store.collect() for store in self.tiers]
        return Leftovers(sum(one.files for one in found), sum(one.nbytes for one in found))

    def shrink(self, nbytes: int) -> int:
        """Shrink all tiers to `nbytes` in total: each tier gets an equal share."""
        return sum(store.shrink(nbytes // len(self.tiers)) for store in self.tiers)

    def on_evict(self, hook: EvictionHook | None) -> None:
        self.tiers[-1].on_evict(hook)

    def drain(self) -> None:
        """Wait until all queued copies have ended."""
        self._copies.drain()

    def close(self) -> None:
        """Demote objects that only write-back tiers have, and wait for queued copies.

        `close` does not wait for a store that hangs.
        """
        if self._closed:
            return
        self._closed = True
        self._prefetcher.close(self._patience_s)
        for level in self._back:
            self._demote_all(level)
        if not self._copies.close(self._patience_s):
            logger.warning("copies between tiers hang: what has not been written by now is lost")
        for store in self.tiers:
            store.close()

    def _find(self, names: Sequence[ObjectName]) -> list[bool]:
        found, pending = [False] * len(names), list(range(len(names)))
        for store in self.tiers:
            if not pending:
                break
            for number, there in zip(pending, store.lookup([names[number] for number in pending]), strict=True):
                found[number] = there
            pending = [number for number in pending if not found[number]]
        return found

    def _promote(self, reader: TieredReader) -> Promotion | None:
        """Begin to promote an object to the tiers above its own. None: under way, closed, or the queue is full."""
        name, nbytes = reader.header.name, reader.header.nbytes

        def end(is_copied: bool) -> None:
            with self._lock:
                self._promoting.discard(name)
            with self._counters as stats:
                stats.promoted += is_copied

        with self._lock:
            if self._closed or name in self._promoting:
                return None
            self._promoting.add(name)
        if not self._copies.reserve(nbytes):
            end(False)
            self._drop()
            return None
        return Promotion(reader.header, self.tiers[: reader.level], self._copies, end)

    def _demote(self, reader: Reader, level: int) -> None:
        """Queue a copy of an object, evicted from the tier above, to tier `level`."""
        if not self._copies.offer(CopyTask(reader.header.nbytes, lambda: self._demote_now(reader, level))):
            reader.close()
            self._drop()

    def _demote_now(self, reader: Reader, level: int) -> None:
        with reader:
            try:
                copy_object(reader, self.tiers[level])
            except (StoreError, MemoryError):
                self._drop()

    def _demote_all(self, level: int) -> None:
        try:
            stored = [one.name for one in self.tiers[level].objects() if not one.is_spare]
        except StoreFault:  # its objects are lost; the other tiers must still be closed
            self._drop()
            return
        for start in range(0, len(stored), _BATCH):
            batch = stored[start : start + _BATCH]
            for name, there in zip(batch, self.tiers[level + 1].lookup(batch), strict=True):
                if not there and not self._demote_stored(name, level):
                    return

    def _demote_stored(self, name: ObjectName, level: int) -> bool:
        """Queue a copy of a stored object to the tier below. False: the queue does not move, so stop."""
        try:
            reader = self.tiers[level].open(name)
        except StoreError:
            self._drop()
            return True
        task = CopyTask(reader.header.nbytes, lambda: self._demote_now(reader, level + 1))
        is_taken = self._copies.hand_over(task, self._patience_s)
        if not is_taken:
            reader.close()
            self._drop()
        return is_taken

    def _drop(self) -> None:
        with self._counters as stats:
            stats.dropped += 1
