"""Circuit breaker with exponential backoff."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0

logger = logging.getLogger("hybridkv.store")


class Breaker:
    """Closed (well), open (resting) or half-open (on trial). Logs one line when it opens and one when it closes."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._lock = Lock()
        self._well = True
        self._on_trial = False
        self._has_passed = False
        """A call of the trial has succeeded, at whatever stage."""
        self._failed_at = 0.0
        self._reach = 0
        """Stage that a trial call must reach to close the breaker: the latest stage that failed."""
        self._rest = _FIRST_REST_S
        self._until = 0.0

    @property
    def resting(self) -> bool:
        return not self._well and not self._on_trial

    def admit(self, *, again: bool = False) -> bool:
        """Whether a call may run. After the backoff one trial may; without a result, another after `_rest` seconds.

        `again`: calls of this kind are cheap, and a later stage comes only after several of them. So they may run
        once one has succeeded in the trial.
        """
        with self._lock:
            if self._well or (again and self._on_trial and self._has_passed):
                return True
            if self._clock() < self._until:
                return False
            self._on_trial, self._has_passed = True, False
            self._until = self._clock() + self._rest
            return True

    def fail(self, reach: int, error: Exception) -> None:
        with self._lock:
            if self._well:
                self._rest, self._reach, self._failed_at = _FIRST_REST_S, reach, self._clock()
                logger.warning("%s: %s; going on without it, trying again from time to time", self._what, error)
            elif self._on_trial:
                self._rest = min(2 * self._rest, _LONGEST_REST_S)
                self._reach = max(self._reach, reach)
            else:
                return  # a call from before the breaker opened: nothing new
            self._well = self._on_trial = False
            self._until = self._clock() + self._rest

    def succeed(self, reach: int) -> None:
        if self._well:
            return
        with self._lock:
            self._has_passed = True
            if self._on_trial and reach >= self._reach:
                self._well, self._on_trial = True, False
                logger.info("%s: back after %.0f s", self._what, self._clock() - self._failed_at)
