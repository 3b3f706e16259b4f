"""Pending files: objects that are being written. A writer holds a lock on its file.

A pending file that can be locked is a leftover of a dead writer. Pending files are made, checked and removed only while
the usage file is open, so a new file cannot be mistaken for a leftover before its writer has locked it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hybridkv.store.store import Leftovers

_numbers = itertools.count()


class LockedFile(NamedTuple):
    fd: int
    path: str


class PendingFiles:
    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def new(self, nbytes: int) -> LockedFile:
        """Make and lock a file of `nbytes` zero bytes."""
        path = f"{self._directory}/{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return LockedFile(fd, path)

    def nbytes(self) -> int:
        return sum(os.stat(path).st_size for path in self._paths())

    def remove_dead(self) -> Leftovers:
        files = nbytes = 0
        for path in self._paths():
            size = _remove_if_dead(path)
            if size is not None:
                files, nbytes = files + 1, nbytes + size
        return Leftovers(files, nbytes)

    def _paths(self) -> list[str]:
        with os.scandir(self._directory) as entries:
            return [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]


def _remove_if_dead(path: str) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with suppress(BlockingIOError):  # its writer is alive
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            return os.fstat(fd).st_size
        return None
    finally:
        os.close(fd)
