"""The sessions of a control server: their keys, and the highest number that each has used.

A session is *proven* after its first authenticated call. Sessions that are not have a table of their own: hellos of
clients without the secret never drop a proven session.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Session:
    key: bytes
    last_number: int
    used_at: float


class Sessions:
    """A bounded number of sessions, the least recently used first. Safe on any thread."""

    def __init__(self, most: int, idle_s: float) -> None:
        self._most = most
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._new: OrderedDict[str, _Session] = OrderedDict()
        self._proven: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._new) + len(self._proven)

    def open(self, name: str, key: bytes) -> None:
        """Add a session, which is not proven yet."""
        with self._lock:
            self._new[name] = _Session(key, 0, time.monotonic())
            self._drop_old(self._new)
            self._drop_old(self._proven)

    def key_of(self, name: str, number: int) -> bytes | None:
        """The session's key, or None for an unknown session. Empty: the number was used before."""
        with self._lock:
            session = self._find(name)
            if session is None:
                return None
            return session.key if number > session.last_number else b""

    def accept(self, name: str, number: int) -> bool:
        """Use up the number of an authenticated call. False: another call has used it meanwhile."""
        with self._lock:
            session = self._find(name)
            if session is None or number <= session.last_number:
                return False
            session.last_number = number
            session.used_at = time.monotonic()
            self._new.pop(name, None)
            self._proven[name] = session
            self._proven.move_to_end(name)
            self._drop_old(self._proven)
            return True

    def _find(self, name: str) -> _Session | None:
        session = self._proven.get(name) or self._new.get(name)
        return session if session is not None and time.monotonic() - session.used_at <= self._idle_s else None

    def _drop_old(self, table: OrderedDict[str, _Session]) -> None:
        oldest_kept = time.monotonic() - self._idle_s
        while table and (len(table) > self._most or next(iter(table.values())).used_at < oldest_kept):
            table.popitem(last=False)
