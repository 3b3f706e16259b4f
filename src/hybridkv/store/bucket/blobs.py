"""Blobs as objects of a bucket, shared by any number of processes.

An object is written by one request that fails if the key exists: it is visible at once and whole, and the first writer
wins. Uses are noted (notes.py). A size limit is approximate: each process estimates how much there is, and lists the
bucket when its estimate reaches the limit. Two processes that evict at once choose mostly the same objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock

import numpy as np

from hybridkv.errors import MissingObject, StoreError, StoreFault
from hybridkv.store.blobs import NO_LIMIT, Blob, Blobs, PendingBlob, Usage
from hybridkv.store.bucket.blob import BucketBlob, PendingBucketBlob
from hybridkv.store.bucket.client import Client, Listed, ObjectStore, Start
from hybridkv.store.bucket.keys import Keys
from hybridkv.store.bucket.lookup import sizes
from hybridkv.store.bucket.notes import UseNotes
from hybridkv.store.bucket.parallel import Parallel
from hybridkv.store.bucket.usage import UsageEstimate
from hybridkv.store.descriptions import MOST_BYTES, decode_description, encode_description
from hybridkv.store.eviction import Evictable, chosen, ranked, with_slack
from hybridkv.store.memory import MemoryBlob
from hybridkv.store.names import ObjectName
from hybridkv.store.store import Leftovers, Stored
from hybridkv.store.values import ValueReader

logger = logging.getLogger("hybridkv.store")

START_BYTES = 1 << 16
"""So many bytes of an object come with `open`: its header, or all of a small object."""
_MOST_PUT_BYTES = 5000 << 20
"""Largest object of one request: 5,000 MiB at Azure, 5 GiB at S3. Larger uploads in parts cannot be conditional."""
_IN_FLIGHT = 128


class BucketBlobs(Blobs):
    opens_together = 64

    def __init__(
        self, connect: Callable[[float], ObjectStore], place: str, prefix: str, size: int, timeout: float
    ) -> None:
        self.size = size
        self.requests = 0
        """Requests sent. Several that are waited for together are one round trip."""
        self._lock = Lock()
        self._room = Lock()
        """Held by the thread that makes room, so that a process evicts once."""
        self._num_faults = 0
        """Times that room could not be made because of a fault."""
        self.keys = Keys(prefix)
        self.client = Client(connect, place, timeout, self._count)
        self._parallel = Parallel(_IN_FLIGHT)
        self.notes = UseNotes(self.client, self._parallel, self.keys)
        self.estimate = UsageEstimate()
        self._values = ValueReader(self.open_all)
        self._has_warned = False

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        keys = [self.keys.object(name) for name in names]
        found = sizes(self.client, self._parallel, keys)
        return [key in found for key in keys]

    def open(self, name: ObjectName) -> Blob:
        key = self.keys.object(name)
        return BucketBlob(self.client, name, key, self.client.start(key, START_BYTES, str(name)))

    def open_all(self, names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        keys = [self.keys.object(name) for name in names]
        if names:
            self.client.counted(len(names))
        calls = [
            partial(self.client.start_async, key, START_BYTES, str(name)) for key, name in zip(keys, names, strict=True)
        ]
        return [
            BucketBlob(self.client, name, key, start) if isinstance(start, Start) else start
            for name, key, start in zip(names, keys, self._parallel.run(calls), strict=True)
        ]

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        if self.lookup([name])[0]:
            return None
        if nbytes > _MOST_PUT_BYTES:
            self._warn(f"{name}: an object of {nbytes:,} bytes is not kept: at most {_MOST_PUT_BYTES:,} are written")
        if nbytes > min(_MOST_PUT_BYTES, self.size) or not self._reserve(nbytes):
            with self._lock:
                self.dropped += 1
            return None
        try:
            return PendingBucketBlob(
                name, nbytes, partial(self._publish, name), partial(self.estimate.end, nbytes, is_kept=False)
            )
        except StoreFault:
            self.estimate.end(nbytes, is_kept=False)
            raise

    def delete(self, names: Sequence[ObjectName]) -> int:
        """Servers do not tell what they deleted: names are looked up first."""
        found = sizes(self.client, self._parallel, [self.keys.object(name) for name in names])
        self.client.delete(list(found))
        self.estimate.remove(len(found), sum(found.values()))
        return len(found)

    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        self.notes.flush()
        uses = self.notes.read()
        for name, listed in self._listed(namespace, group):
            yield Stored(name, listed.nbytes, max(listed.modified_at, uses.get(name, 0.0)), None, None)

    def touch(self, names: Sequence[ObjectName]) -> None:
        self.notes.add(names)

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        self.client.replace(self.keys.description(namespace), encode_description(info), f"the description {namespace}")

    def descriptions(self) -> dict[str, dict[str, str]]:
        found = {}
        for listed in self.client.list(self.keys.about):
            namespace = self.keys.namespace(listed.key)
            if namespace is not None and listed.nbytes <= MOST_BYTES:
                found[namespace] = listed.key
        if found:
            self.client.counted(len(found))
        calls = [
            partial(self.client.start_async, key, MOST_BYTES, f"the description {one}") for one, key in found.items()
        ]
        described = {}
        for namespace, start in zip(found, self._parallel.run(calls), strict=True):
            if isinstance(start, StoreFault):
                raise start
            info = decode_description(bytes(start.data)) if isinstance(start, Start) else None
            if info is not None:
                described[namespace] = info
        return described

    def usage(self) -> Usage:
        if not self.estimate.is_fresh:
            self._recount()
        return self.estimate.usage

    def collect(self) -> Leftovers:
        """Merge notes of uses. There are no leftovers: an upload that was cut off is never stored."""
        self.notes.flush()
        existing = {stored.name for stored in self._recount()}
        self.notes.merge(existing, at_least=2)
        return Leftovers(0, 0)

    def shrink(self, nbytes: int) -> int:
        with self._room:
            return self._evict(nbytes, slack=False)

    def close(self) -> None:
        with suppress(StoreFault):
            self.notes.flush()
        self._parallel.close()
        self.client.close()

    def _count(self, round_trips: int, requests: int) -> None:
        with self._lock:
            self.round_trips += round_trips
            self.requests += requests

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)

    def _reserve(self, nbytes: int) -> bool:
        """Make room for an object that is being written. False: there is none."""
        if self.size >= NO_LIMIT:
            self.estimate.begin(nbytes)
            return True
        num_faults = self._num_faults
        with self._room:
            if num_faults != self._num_faults:  # else threads would wait for a dead server one after another
                raise StoreFault(f"{self.client.place}: no room, since a listing or an eviction failed")
            self._make_room(nbytes)
            fits = self.estimate.usage.nbytes + nbytes <= self.size
            if fits:
                self.estimate.begin(nbytes)
            return fits

    def _make_room(self, nbytes: int) -> None:
        try:
            if not self.estimate.is_fresh:
                self._recount()
            if self.estimate.usage.nbytes + nbytes > self.size:
                self._evict(self.size - nbytes)
        except StoreFault:
            self._num_faults += 1
            raise

    def _publish(self, name: ObjectName, data: memoryview) -> bool:
        is_first = self.client.create(self.keys.object(name), data, str(name))
        self.estimate.end(len(data), is_kept=is_first)
        return is_first

    def _listed(self, namespace: str | None, group: str | None) -> Iterator[tuple[ObjectName, Listed]]:
        for listed in self.client.list(self.keys.listed(namespace, group)):
            name = self.keys.name(listed.key)
            if name is not None and namespace in (None, name.namespace) and group in (None, name.group):
                yield name, listed

    def _recount(self) -> list[Stored]:
        """List everything, without notes of uses."""
        found = [Stored(name, one.nbytes, one.modified_at, None, None) for name, one in self._listed(None, None)]
        self.estimate.set(len(found), sum(one.nbytes for one in found))
        return found

    def _evict(self, goal: int, *, slack: bool = True) -> int:
        """Evict objects until at most `goal` bytes are used, by a new listing. Returns the number of objects."""
        found = list(self.objects(None, None))
        self.estimate.set(len(found), sum(one.nbytes for one in found))
        excess = self.estimate.usage.nbytes - goal
        if slack:
            excess = with_slack(excess, self.size, is_told=self.on_evict is not None)
        if excess <= 0:
            return 0
        going = chosen(ranked(self._values.candidates(found, excess), time.time()), excess)
        self._tell(going)
        count = self.delete([one.name for one in going])
        with self._lock:
            self.evicted += count
        self.notes.merge({one.name for one in found})
        return count

    def _tell(self, going: Sequence[Evictable]) -> None:
        """Pass objects to `on_evict` before they are deleted, as copies in memory: the hook reads them later."""
        hook = self.on_evict
        if hook is None:
            return
        for one in going:
            with suppress(MissingObject, StoreFault):
                blob = self.open(one.name)
                data = np.empty(blob.nbytes, np.uint8)
                blob.read_at(0, [data.data], blob.nbytes)
                hook(one.name, MemoryBlob(data))
