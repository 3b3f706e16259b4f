"""Jobs that vLLM gives the tier: each moves some chunks, every chunk on whichever thread is free.

A chunk that is being copied is never given up, since its thread uses vLLM's memory. One that still waits can be.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition

from vllm.v1.kv_offload.base import OffloadKey

from hybridkv.integrations.vllm.tier.counts import Counts
from hybridkv.workers import Workers

logger = logging.getLogger("vllm.hybridkv")

Move = Callable[[OffloadKey, int], bool]
"""Copies a chunk that lies at an index of vLLM's memory. False: it failed, and the reason is counted."""


@dataclass(eq=False)
class Job:
    number: int
    keys: Sequence[OffloadKey]
    is_load: bool
    begun: float
    left: int
    """Chunks that have not ended."""
    done: list[OffloadKey] = field(default_factory=list)
    """Chunks that were moved."""
    seconds: float = 0.0
    """Sum over chunks of the time that their copy took."""
    chunks: list[Future[bool]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.done) == len(self.keys)


class Jobs:
    def __init__(self, threads: tuple[int, int], chunk_bytes: int, waiting_bytes: int, counts: Counts) -> None:
        """`threads`: how many read and how many write."""
        self._readers = Workers(threads[0], "hybridkv-tier-read")
        self._writers = Workers(threads[1], "hybridkv-tier-write")
        self._chunk_bytes = chunk_bytes
        self._waiting_bytes = waiting_bytes
        self._counts = counts
        self._changed = Condition()
        self._running: dict[int, Job] = {}
        self._ended: deque[Job] = deque()
        self._writing = 0
        """Chunks that are written or wait for it."""
        self.is_stuck = False
        """Whether loads were given up, and those that kept the threads busy still run."""

    @property
    def is_busy(self) -> bool:
        """Whether some job runs, or has ended and was not taken."""
        return bool(self._running or self._ended)

    def load(self, number: int, keys: Sequence[OffloadKey], chunks: Sequence[int], move: Move) -> None:
        self._submit(self._readers, Job(number, keys, True, time.monotonic(), len(keys)), chunks, move)

    def save(self, number: int, keys: Sequence[OffloadKey], chunks: Sequence[int], move: Move) -> None:
        """Fails at once if too many bytes wait. A job that finds none waiting is taken, however large."""
        job = Job(number, keys, False, time.monotonic(), len(keys))
        with self._changed:
            is_full = self._writing and (self._writing + len(keys)) * self._chunk_bytes > self._waiting_bytes
            self._writing += 0 if is_full else len(keys)
        if is_full:
            self._counts.fail("save_failures", "dropped", len(keys))
            self._ended.append(job)
        else:
            self._submit(self._writers, job, chunks, move)

    def take_ended(self) -> list[Job]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def expire(self, timeout_s: float) -> None:
        """Give up chunks that have waited too long for a thread to load them."""
        latest = time.monotonic() - timeout_s
        with self._changed:
            old = [job for job in self._running.values() if job.is_load and job.begun <= latest]
        given_up = sum(chunk.cancel() for job in old for chunk in job.chunks if not chunk.done())
        self._counts.fail("load_failures", "timeout", given_up)
        self.is_stuck = given_up > 0 or (self.is_stuck and bool(old))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs have ended. False: some still run after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let jobs end, give up what still waits. False: some copy hangs, and may still use vLLM's memory."""
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s / 2)
        with self._changed:
            waiting = [chunk for job in self._running.values() for chunk in job.chunks]
        for chunk in waiting:
            chunk.cancel()
        ended = [workers.close(max(0.0, deadline - time.monotonic())) for workers in (self._readers, self._writers)]
        return all(ended)

    def _submit(self, workers: Workers, job: Job, chunks: Sequence[int], move: Move) -> None:
        if not job.keys:
            self._ended.append(job)
            return
        with self._changed:
            self._running[job.number] = job
        for key, chunk in zip(job.keys, chunks, strict=True):
            job.chunks.append(workers.submit(partial(self._timed, job, move, key, chunk)))
        for key, moved in zip(job.keys, job.chunks, strict=True):
            moved.add_done_callback(partial(self._chunk_ended, job, key))

    def _timed(self, job: Job, move: Move, key: OffloadKey, chunk: int) -> bool:
        begun = time.monotonic()
        try:
            return move(key, chunk)
        finally:
            with self._changed:
                job.seconds += time.monotonic() - begun

    def _chunk_ended(self, job: Job, key: OffloadKey, moved: Future[bool]) -> None:
        """Called on the chunk's thread, or on the one that gave it up."""
        error = None if moved.cancelled() else moved.exception()
        if error is not None:
            logger.error("a chunk was not %s", "loaded" if job.is_load else "saved", exc_info=error)
            self._counts.fail("load_failures" if job.is_load else "save_failures", "error")
        with self._changed:
            if error is None and not moved.cancelled() and moved.result():
                job.done.append(key)
            if not job.is_load:
                self._writing -= 1
            job.left -= 1
            if job.left == 0:
                del self._running[job.number]
                self._ended.append(job)
                self._changed.notify_all()
