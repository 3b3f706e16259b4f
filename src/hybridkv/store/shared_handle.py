"""A handle that several threads use and one closes: the close takes effect when the last thread has left it.

If a file descriptor is closed while another thread reads, the kernel may give its number to another file, and the read
continues in that file.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from hybridkv.errors import StoreError


class SharedHandle:
    """Calls `shut` once: after `close`, when no thread is inside `with handle:`."""

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
