"""The queue of a concurrent replay: first come, first served."""

from __future__ import annotations

from bisect import insort

from hybridkv.cache import Cache
from hybridkv.replay.jobs import Job
from hybridkv.replay.loading import Loading
from hybridkv.replay.meter import Meter
from hybridkv.replay.serial import Requests
from hybridkv.replay.traces import TraceRequest

_LOOK_AHEAD = 8
"""Waiting requests that are looked at when a prefill starts: do they share its prefix?"""


class Waiting:
    """Requests that have arrived and do not run, the oldest first."""

    def __init__(self, cache: Cache, requests: Requests, meter: Meter, loads: Loading) -> None:
        self._cache = cache
        self._requests = requests
        self._meter = meter
        self._loads = loads
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def request(self, job: Job) -> TraceRequest:
        return self._requests[job.index]

    def add(self, job: Job) -> None:
        insort(self._jobs, job, key=lambda job: job.rank)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def next(self) -> Job | None:
        """The oldest, but none whose prefix is being loaded for another."""
        jobs = self._jobs[: 1 + _LOOK_AHEAD]
        return next((job for job in jobs if not self._loads.is_followed_by(self.request(job).prompt)), None)

    def arrived(self, job: Job, *, is_prefilling: bool) -> None:
        self.add(job)
        if is_prefilling and len(self._jobs) <= _LOOK_AHEAD:
            self._look_for_leader(job)

    def look_for_leaders(self, starting: Job) -> None:
        """Call when a job has its lease and its step is not sent off: it can still be told to keep a state."""
        for job in self._jobs[: 1 + _LOOK_AHEAD]:
            if job is not starting:
                self._look_for_leader(job)

    def _look_for_leader(self, job: Job) -> None:
        """If a running request computes its prefix, have it leave a checkpoint where the two part."""
        if not job.has_started and self._cache.follow(self._cache.match(self.request(job).prompt)):
            self._meter.followed += not job.follows
            job.follows = True
