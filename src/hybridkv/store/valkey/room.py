"""The size limit of a store: how much is used, what must go.

The limit is checked when a write begins. Several processes may begin at the same moment, so it may be exceeded by what
others are writing. One process evicts at a time; a process that does not get the lock drops its write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import numpy as np

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import NO_LIMIT, Blob, Usage
from hybridkv.store.eviction import MOST_TOLD_BYTES, Evictable, chosen, ranked, with_slack
from hybridkv.store.memory import MemoryBlob
from hybridkv.store.names import ObjectName
from hybridkv.store.valkey.exchange import Answer, Command
from hybridkv.store.valkey.index import Index
from hybridkv.store.valkey.keys import INDEX, MOST_VALUE_BYTES, object_key, shard_of
from hybridkv.store.valkey.servers import Servers
from hybridkv.store.valkey.wire import encode

EvictedHook = Callable[[ObjectName, Blob], None]

_KNOWN_S = 0.05
"""How long a known usage counts. What this process writes meanwhile is added."""
_WAIT_S = 0.05
_REST_S = 3.0


class Room:
    def __init__(self, servers: Servers, index: Index, size: int) -> None:
        self.size = size
        self.evicted = 0
        self.dropped = 0
        self._servers = servers
        self._index = index
        self._lock = Lock()
        self._evicting = Lock()
        """Held by the thread that evicts; other threads of this process wait for it."""
        self._pending = 0
        """Bytes that this process is writing."""
        self._used = 0
        self._known_at = float("-inf")
        self._resting_until = 0.0
        self._num_faults = 0
        """Evictions that failed."""

    def commands(self, nbytes: int) -> list[Command]:
        """What `reserve` needs to know, to be asked along with something else."""
        if self.size >= NO_LIMIT:
            return []
        with self._lock:
            is_fresh = time.monotonic() - self._known_at < _KNOWN_S
            fits = self._used + self._pending + nbytes <= self.size
        return [] if is_fresh and fits else self._index.usage_commands()

    def reserve(self, nbytes: int, answers: Sequence[Answer], hook: EvictedHook | None) -> bool:
        """Make room for an object that is written now. `answers`: to `commands`."""
        if answers:
            self._learn(self._index.usage(answers))
        if self._take(nbytes):
            return True
        if nbytes <= self.size:
            num_faults = self._num_faults
            with self._evicting:
                if not self._fits(nbytes):
                    if num_faults != self._num_faults:  # else threads would wait for a dead server one after another
                        raise StoreFault(f"{self._servers.label}: no room, since eviction failed")
                    self._evict_for(nbytes, hook)
                if self._take(nbytes):
                    return True
        self.drop()
        return False

    def drop(self) -> None:
        """Count a write that is not kept."""
        with self._lock:
            self.dropped += 1

    def give_back(self, nbytes: int, *, kept: bool = False) -> None:
        with self._lock:
            self._pending -= nbytes
            if kept:
                self._used += nbytes

    def usage(self) -> Usage:
        """Objects, and bytes including those that this process is writing.

        After a fault it fails at once for some seconds: gauges are read often, and must not wait each time.
        """
        if time.monotonic() < self._resting_until:
            raise StoreFault(f"{self._servers.label}: usage is not known after a fault")
        try:
            found = self._ask()
        except StoreFault:
            self._resting_until = time.monotonic() + _REST_S
            raise
        with self._lock:
            return Usage(found.objects, found.nbytes + self._pending)

    def shrink(self, goal: int, hook: EvictedHook | None) -> int:
        with self._evicting:
            token = self._wait_for_lock()
            try:
                return self._evict(goal, hook, slack=False)
            finally:
                self._unlock(token)

    def _ask(self) -> Usage:
        found = self._index.usage(self._servers.run(self._index.usage_commands()))
        self._learn(found)
        return found

    def _learn(self, usage: Usage) -> None:
        with self._lock:
            self._used, self._known_at, self._resting_until = usage.nbytes, time.monotonic(), 0.0

    def _fits(self, nbytes: int) -> bool:
        with self._lock:
            return self.size >= NO_LIMIT or self._used + self._pending + nbytes <= self.size

    def _take(self, nbytes: int) -> bool:
        with self._lock:
            if self.size < NO_LIMIT and self._used + self._pending + nbytes > self.size:
                return False
            self._pending += nbytes
            return True

    def _evict_for(self, nbytes: int, hook: EvictedHook | None) -> None:
        try:
            self._try_to_evict_for(nbytes, hook)
        except StoreFault:
            self._num_faults += 1
            raise

    def _try_to_evict_for(self, nbytes: int, hook: EvictedHook | None) -> None:
        token = self._index.lock()
        if token is None:
            self._ask()
            return
        try:
            with self._lock:
                goal = self.size - nbytes - self._pending
            self._evict(goal, hook, slack=True)
        finally:
            self._unlock(token)

    def _evict(self, goal: int, hook: EvictedHook | None, *, slack: bool) -> int:
        """Evict objects until at most `goal` bytes are used, apart from those being written."""
        count, before = 0, 1 << 62
        while (excess := (usage := self._ask()).nbytes - goal) > 0 and usage.nbytes < before:
            before = usage.nbytes
            wanted = with_slack(excess, self.size, is_told=hook is not None) if slack else excess
            wanted = wanted if hook is None else min(wanted, MOST_TOLD_BYTES)
            going = chosen(ranked(self._index.oldest(wanted, usage), time.time()), wanted)
            if not going:
                break
            blobs = self._read(going) if hook is not None else {}
            gone = self._index.remove((one.name for one in going), {one.name: one.used_at for one in going})
            count += gone
            with self._lock:
                self.evicted += gone
            if hook is not None:
                for name, blob in blobs.items():
                    hook(name, blob)
        return count

    def _read(self, going: Sequence[Evictable]) -> dict[ObjectName, Blob]:
        """Whole objects in memory, for the eviction hook. Those that cannot be read are left out."""
        going = [one for one in going if 0 < one.nbytes <= MOST_VALUE_BYTES]
        data = [np.empty(one.nbytes, np.uint8) for one in going]
        commands = [
            Command(
                encode("GETRANGE", object_key(one.name), 0, len(part) - 1),
                INDEX[shard_of(one.name)].slot,
                len(part),
                [part.data],
            )
            for one, part in zip(going, data, strict=True)
        ]
        answers = self._servers.run(commands)
        found = zip(going, data, answers, strict=True)
        return {one.name: MemoryBlob(part) for one, part, answer in found if answer == one.nbytes}

    def _wait_for_lock(self) -> str:
        end = time.monotonic() + 5
        while (token := self._index.lock()) is None:
            if time.monotonic() > end:
                raise StoreFault(f"{self._servers.label}: another process is evicting; try again in half a minute")
            time.sleep(_WAIT_S)
        return token

    def _unlock(self, token: str) -> None:
        with suppress(StoreFault):
            self._index.unlock(token)
