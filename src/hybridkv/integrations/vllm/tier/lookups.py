"""Lookups of chunks. They run on a thread of their own: one call of the store for all that a step has asked.

Answers are kept for each request until it finishes. A new request asks again: what one request missed, another may have
stored since. Within a request an answer changes only if a load fails, so that no chunk is tried again and again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey

from hybridkv.integrations.vllm.tier.counts import Counts
from hybridkv.workers import Workers

_CLOSE_S = 2.0

logger = logging.getLogger("vllm.hybridkv")


class _Batch(NamedTuple):
    keys: list[OffloadKey]
    found: Future[list[bool]]
    deadline: float


class Lookups:
    """All methods are for one thread, the scheduler's, and never wait; only `close` does."""

    def __init__(
        self,
        ask: Callable[[Sequence[OffloadKey]], list[bool]],
        counts: Counts,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._counts = counts
        self._timeout_s = timeout_s
        self._clock = clock
        self._workers = Workers(1, "hybridkv-tier-lookup")
        self._answers: dict[str, dict[OffloadKey, bool]] = {}
        """By request."""
        self._waiting: dict[OffloadKey, set[str]] = {}
        """Chunks without an answer yet, and the requests that asked."""
        self._new: list[OffloadKey] = []
        """Chunks to ask for at the end of the step."""
        self._batches: deque[_Batch] = deque()
        """Under way, the oldest first."""
        self._late: list[Future[list[bool]]] = []
        """Calls of the store that did not return in time and still run."""

    def find(self, key: OffloadKey, request: str) -> bool | None:
        """Whether the store has a chunk. None: not known yet, ask again in the next step."""
        self._collect()
        answers = self._answers.setdefault(request, {})
        if key in answers:
            return answers[key]
        if key in self._waiting:
            self._waiting[key].add(request)
            return None
        if self._is_blocked:
            self._counts.fail("lookup_failures", "skipped")
            answers[key] = False
            return False
        self._waiting[key] = {request}
        self._new.append(key)
        return None

    def flush(self) -> None:
        """Ask the store for all chunks that are new since the last call."""
        self._collect()
        if not self._new:
            return
        keys, self._new = self._new, []
        found = self._workers.submit(lambda: self._ask(keys))
        self._batches.append(_Batch(keys, found, self._clock() + self._timeout_s))

    def fail(self, keys: Iterable[OffloadKey]) -> None:
        """Chunks that were found and could not be loaded are missing for all requests of now."""
        failed = set(keys)
        for answers in self._answers.values():
            for key in failed & answers.keys():
                answers[key] = False

    def finish(self, request: str) -> None:
        self._answers.pop(request, None)

    def close(self) -> None:
        for batch in self._batches:
            batch.found.cancel()
        self._workers.close(_CLOSE_S)

    @property
    def _is_blocked(self) -> bool:
        """Whether a call of the store hangs. Then another would only wait behind it."""
        self._late = [found for found in self._late if not found.done()]
        return bool(self._late)

    def _collect(self) -> None:
        while self._batches:
            batch = self._batches[0]
            if not batch.found.done() and self._clock() < batch.deadline:
                return
            self._batches.popleft()
            for key, is_found in zip(batch.keys, self._outcome(batch), strict=True):
                for request in self._waiting.pop(key):
                    if request in self._answers:
                        self._answers[request][key] = is_found

    def _outcome(self, batch: _Batch) -> list[bool]:
        nothing = [False] * len(batch.keys)
        if batch.found.cancel() or not batch.found.done():
            self._counts.fail("lookup_failures", "slow", len(nothing))
            self._late.append(batch.found)
            return nothing
        if (error := batch.found.exception()) is not None:
            logger.error("a lookup of %d chunks failed; they are computed", len(nothing), exc_info=error)
            self._counts.fail("lookup_failures", "failed", len(nothing))
            return nothing
        found = batch.found.result()
        self._counts.add("hits", sum(found))
        self._counts.add("misses", len(found) - sum(found))
        return found
