"""Copies of objects between stores, made in the background by one thread. What waits is bounded, in bytes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import NamedTuple

logger = logging.getLogger("hybridkv.store")


class Errand(NamedTuple):
    nbytes: int
    run: Callable[[], None]
    """Should not raise: it is logged, and forgotten."""


class Courier:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changed = Condition()
        self._waiting: deque[Errand] = deque()
        self._nbytes = 0
        """Of what waits and what is under way."""
        self._reserved = 0
        """Of what may be sent yet."""
        self._closed = False
        self._thread: Thread | None = None

    def offer(self, errand: Errand) -> bool:
        """False: too much waits already. One that is larger than the bound is taken when nothing else waits."""
        with self._changed:
            return self._has_room(errand.nbytes, self._nbytes) and self._add(errand)

    def reserve(self, nbytes: int) -> bool:
        """Keep room for what is sent later, or released. False: too much waits or is reserved already.

        What is offered meanwhile takes no account of it: that may be all there is of an object, this never is.
        """
        with self._changed:
            has_room = self._has_room(nbytes, self._nbytes + self._reserved)
            self._reserved += nbytes if has_room else 0
            return has_room

    def send(self, errand: Errand) -> bool:
        """One that room was reserved for. False: it is too late, nothing is taken any more."""
        with self._changed:
            self._reserved -= errand.nbytes
            return not self._closed and self._add(errand)

    def release(self, nbytes: int) -> None:
        """What was reserved is not sent after all."""
        with self._changed:
            self._reserved -= nbytes

    def hand_over(self, errand: Errand, patience_s: float) -> bool:
        """Wait until it is taken. False: nothing is taken any more, or nothing was done for so long."""
        with self._changed:
            while not self._has_room(errand.nbytes, self._nbytes):
                if self._closed or not self._changed.wait(patience_s):
                    return False
            return self._add(errand)

    def drain(self, patience_s: float | None = None) -> bool:
        """Wait until nothing waits and nothing is under way. False: nothing was done for so long."""
        with self._changed:
            while self._nbytes:
                if not self._changed.wait(patience_s):
                    return False
        return True

    def close(self, patience_s: float) -> bool:
        """After all that was taken is done. False: it hangs; the rest is not done any more."""
        is_done = self.drain(patience_s)
        with self._changed:
            self._closed = True
            if not is_done:
                self._waiting.clear()
            self._changed.notify_all()
        if is_done and self._thread is not None:
            self._thread.join()
        return is_done

    def _has_room(self, nbytes: int, taken: int) -> bool:
        return not self._closed and (not taken or taken + nbytes <= self._most_bytes)

    def _add(self, errand: Errand) -> bool:
        self._nbytes += errand.nbytes
        self._waiting.append(errand)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="hybridkv-store", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return True

    def _work(self) -> None:
        while (errand := self._next()) is not None:
            try:
                errand.run()
            except BaseException:  # no store should raise it: a bug, and nobody else would hear of it
                logger.exception("an object could not be copied between tiers")
            with self._changed:
                self._nbytes -= errand.nbytes
                self._changed.notify_all()

    def _next(self) -> Errand | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None
