"""Jobs that vLLM gives the tier: each moves some chunks, on as many threads as are free.

A chunk that is being copied is never given up, since its thread uses vLLM's memory. One that still waits can be.
Threads take the chunks of a job one by one. So the scheduler submits a few calls for a job of any size: with one for
each chunk, it would compete with threads that run already for the GIL.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
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
    waiting: deque[tuple[OffloadKey, int]]
    """Chunks that no thread has taken."""
    left: int
    """Chunks that have not ended."""
    begun: float = field(default_factory=time.monotonic)
    done: list[OffloadKey] = field(default_factory=list)
    """Chunks that were moved."""
    seconds: float = 0.0
    """Sum over chunks of the time that their copy took."""

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
        job = Job(number, keys, True, deque(zip(keys, chunks, strict=True)), len(keys))
        self._submit(self._readers, job, move)

    def save(self, number: int, keys: Sequence[OffloadKey], chunks: Sequence[int], move: Move) -> None:
        """Fails at once if too many bytes wait. A job that finds none waiting is taken, however large."""
        job = Job(number, keys, False, deque(zip(keys, chunks, strict=True)), len(keys))
        with self._changed:
            is_full = self._writing and (self._writing + len(keys)) * self._chunk_bytes > self._waiting_bytes
            self._writing += 0 if is_full else len(keys)
        if is_full:
            self._counts.fail("save_failures", "dropped", len(keys))
            self._ended.append(job)
        else:
            self._submit(self._writers, job, move)

    def take_ended(self) -> list[Job]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def expire(self, timeout_s: float) -> None:
        """Give up chunks that have waited too long for a thread to load them."""
        latest = time.monotonic() - timeout_s
        with self._changed:
            old = [job for job in self._running.values() if job.is_load and job.begun <= latest]
            given_up = sum(self._give_up(job) for job in old)
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
            for job in list(self._running.values()):
                self._give_up(job)
        ended = [workers.close(max(0.0, deadline - time.monotonic())) for workers in (self._readers, self._writers)]
        return all(ended)

    def _submit(self, workers: Workers, job: Job, move: Move) -> None:
        if not job.keys:
            self._ended.append(job)
            return
        with self._changed:
            self._running[job.number] = job
        for _ in range(min(workers.count, len(job.keys))):
            workers.submit(partial(self._work, job, move))

    def _work(self, job: Job, move: Move) -> None:
        """Move chunks of a job until none waits. Runs on several threads for one job."""
        while True:
            try:
                key, chunk = job.waiting.popleft()
            except IndexError:
                return
            begun, is_moved = time.monotonic(), False
            try:
                is_moved = move(key, chunk)
            except Exception:
                logger.exception("a chunk was not %s", "loaded" if job.is_load else "saved")
                self._counts.fail("load_failures" if job.is_load else "save_failures", "error")
            with self._changed:
                job.seconds += time.monotonic() - begun
                if is_moved:
                    job.done.append(key)
                self._count_down(job, 1)

    def _give_up(self, job: Job) -> int:
        """Forget the chunks that wait. Returns how many. The caller holds the lock."""
        count = 0
        while job.waiting:
            try:
                job.waiting.pop()
            except IndexError:  # a thread has taken it
                break
            count += 1
        if count:
            self._count_down(job, count)
        return count

    def _count_down(self, job: Job, count: int) -> None:
        job.left -= count
        if not job.is_load:
            self._writing -= count
        if job.left == 0:
            del self._running[job.number]
            self._ended.append(job)
            self._changed.notify_all()
