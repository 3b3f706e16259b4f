"""Calls of the store that no request waits for: marks of use, and the description of the namespace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Lock

from vllm.v1.kv_offload.base import OffloadKey

from hybridkv.integrations.vllm.tier.naming import ChunkNames
from hybridkv.store import Store
from hybridkv.workers import Workers

_CLOSE_S = 2.0
_MOST_MARKS = 65_536
"""More marks are forgotten while the store is slow: the chunks are only evicted earlier."""

logger = logging.getLogger("vllm.hybridkv")


class Chores:
    """One thread. `flush` hands it all marks since the last, unless it is still busy with those."""

    def __init__(self, store: Store, names: ChunkNames) -> None:
        self._store = store
        self._names = names
        self._workers = Workers(1, "hybridkv-tier-chores")
        self._lock = Lock()
        self._used: dict[OffloadKey, None] = {}
        self._marking: Future[None] | None = None
        self._is_described = False

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Any thread may call this."""
        with self._lock:
            for key in keys:
                if len(self._used) < _MOST_MARKS:
                    self._used[key] = None

    def describe(self) -> None:
        if not self._is_described:
            self._is_described = True
            self._run(lambda: self._store.describe(self._names.namespace, self._names.description))

    def flush(self) -> None:
        if self._marking is not None and not self._marking.done():
            return
        with self._lock:
            used, self._used = list(self._used), {}
        if used:
            self._marking = self._run(lambda: self._store.touch([self._names.of(key) for key in used]))

    def close(self) -> None:
        self._workers.close(_CLOSE_S)

    def _run(self, chore: Callable[[], None]) -> Future[None]:
        ran = self._workers.submit(chore)
        ran.add_done_callback(_log_error)
        return ran


def _log_error(ran: Future[None]) -> None:
    if (error := ran.exception()) is not None:
        logger.error("a store was not told what was used, or by which model", exc_info=error)
