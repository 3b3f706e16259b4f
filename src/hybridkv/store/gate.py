"""Something that several threads use and one closes: the last one out shuts the door.

A file descriptor that is closed while another thread reads is given to the next file: the read would be of that one.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from hybridkv.errors import StoreError


class Gate:
    """Runs `shut` once: when it is closed and nobody is inside. `with gate:` is being inside."""

    def __init__(self, what: str, shut: Callable[[], None]) -> None:
        self._what = what
        self._shut = shut
        self._lock = Lock()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._what} is closed")
            self._inside += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._lock:
            self._inside -= 1
            last = self._closed and self._inside == 0
        if last:
            self._shut()

    def close(self) -> None:
        with self._lock:
            now = not self._closed and self._inside == 0
            self._closed = True
        if now:
            self._shut()
