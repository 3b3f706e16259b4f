"""The workers of one role, and which of them is next. It sends nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Worker:
    """One server."""

    url: str
    in_flight: int = 0
    down_until: float = 0.0

    @property
    def is_up(self) -> bool:
        return time.monotonic() >= self.down_until

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one more request while the context lasts."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Pool:
    """All workers of a role."""

    def __init__(self, role: str, urls: Sequence[str], rest_s: float) -> None:
        self.role = role
        self.workers = [Worker(url) for url in urls]
        self._rest_s = rest_s
        self._next = 0

    def choose(self, tried: Collection[Worker] = ()) -> Worker | None:
        """The worker that is up and has the fewest requests in flight; those with equally many take turns."""
        return self._least_busy([one for one in self.workers if one.is_up and one not in tried])

    def choose_any(self, tried: Collection[Worker] = ()) -> Worker | None:
        """Like `choose`, and if no worker is up, one that was down a moment ago."""
        return self.choose(tried) or self._least_busy([one for one in self.workers if one not in tried])

    def mark_down(self, worker: Worker) -> None:
        """Skip a worker for `rest_s`."""
        worker.down_until = time.monotonic() + self._rest_s

    def _least_busy(self, workers: Sequence[Worker]) -> Worker | None:
        if not workers:
            return None
        count = len(self.workers)
        turns = {one: (self.workers.index(one) - self._next) % count for one in workers}
        chosen = min(workers, key=lambda one: (one.in_flight, turns[one]))
        self._next = (self.workers.index(chosen) + 1) % count
        return chosen
