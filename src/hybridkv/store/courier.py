"""Copies of objects between stores, made in the background by one thread. What waits is bounded, in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import NamedTuple


class Errand(NamedTuple):
    nbytes: int
    run: Callable[[], None]
    """Must not raise."""


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

    def hand_over(self, errand: Errand) -> bool:
        """Wait until it is taken. False: nothing is taken any more."""
        with self._changed:
            while not self._has_room(errand.nbytes, self._nbytes) and not self._closed:
                self._changed.wait()
            return not self._closed and self._add(errand)

    def drain(self) -> None:
        """Wait until nothing waits and nothing is under way."""
        with self._changed:
            while self._nbytes:
                self._changed.wait()

    def close(self) -> None:
        """After all that was taken is done."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

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
        try:
            while (errand := self._next()) is not None:
                errand.run()
                with self._changed:
                    self._nbytes -= errand.nbytes
                    self._changed.notify_all()
        except BaseException:  # a bug: nobody may wait for what will not be done
            with self._changed:
                self._closed, self._nbytes = True, 0
                self._changed.notify_all()
            raise

    def _next(self) -> Errand | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None
