"""Usage file: the numbers of objects and bytes in a directory, shared by several processes and guarded by a lock.

The lock is `flock`, so it is released when its process ends. The counts are zeroed while the file is open: if the
process is killed, the next one finds them invalid and counts again. Files of the store are added and removed only while
the usage file is open.

If the directory is removed, `open` raises StoreFault once. The next `open` uses the directory that exists by then, or
makes it again.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from threading import Lock

from xxhash import xxh3_64_intdigest

from hybridkv.errors import StoreFault, StoreInputError
from hybridkv.files import kind_of

_COUNTS = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")
_PATIENCE_S = 2.0
"""`close` waits this long for a thread that has the file open."""


@dataclass(slots=True)
class Counts:
    objects: int = 0
    nbytes: int = 0
    """Bytes of objects and of pending files."""


class _Gone(StoreFault):
    """The open usage file is no longer the file at its path, which other processes lock."""


class UsageFile:
    def __init__(self, path: Path, recount: Callable[[], Counts], mend: Callable[[], None]) -> None:
        """`mend` makes missing directories again, or raises StoreFault."""
        self._path = path
        self._recount = recount
        self._mend = mend
        self._threads = Lock()
        self._closed = False
        self._is_ill = False
        """A call failed: the directory may have been removed or replaced."""
        self._fd = _open(path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            os.close(self._fd)
            raise StoreInputError(
                f"{path.parent} cannot be locked ({error.strerror}): choose another file system"
            ) from None

    @contextmanager
    def open(self) -> Iterator[Counts]:
        """Lock the file and yield its counts: one thread of one process at a time. Changes to the counts are saved."""
        with self._threads:
            self._check_open()
            if self._is_ill:
                self._recover()
            try:
                with self._locked():
                    self._check_place()
                    counts = self._read()
                    os.pwrite(self._fd, bytes(_COUNTS.size + _CHECKSUM.size), 0)
                    counts = self._recount() if counts is None else counts
                    yield counts
                    self._write(counts)
            except (OSError, _Gone):
                self._is_ill = True
                raise

    def glance(self) -> Counts | None:
        """Read the counts without waiting for the lock. None: another process has the file open."""
        with self._threads:
            self._check_open()
            self._check_place()
            return self._read()

    def close(self) -> None:
        """Close the file. It is left open if another thread hangs inside `open`."""
        if not self._threads.acquire(timeout=_PATIENCE_S):
            return
        try:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
        finally:
            self._threads.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreFault("the store is closed")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _check_place(self) -> None:
        """Raise _Gone if the path leads to another file: other processes lock that one, so our lock has no effect."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._fd)):
            raise _Gone(_misplaced(self._path) or f"{self._path.parent} has gone")

    def _recover(self) -> None:
        self._mend()
        old, self._fd = self._fd, _open(self._path)
        self._is_ill = False
        os.close(old)

    def _read(self) -> Counts | None:
        raw = os.pread(self._fd, _COUNTS.size + _CHECKSUM.size, 0)
        packed, checksum = raw[: _COUNTS.size], raw[_COUNTS.size :]
        if len(checksum) != _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != xxh3_64_intdigest(packed):
            return None
        return Counts(*_COUNTS.unpack(packed))

    def _write(self, counts: Counts) -> None:
        packed = _COUNTS.pack(max(counts.objects, 0), max(counts.nbytes, 0))
        os.pwrite(self._fd, packed + _CHECKSUM.pack(xxh3_64_intdigest(packed)), 0)


def _open(path: Path) -> int:
    """Open the file without blocking. Anything but a regular file (a FIFO, say) raises StoreFault."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError:
        if (fault := _misplaced(path)) is not None:
            raise StoreFault(fault) from None
        raise
    if not S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreFault(_misplaced(path) or f"{path} has gone")
    return fd


def _misplaced(path: Path) -> str | None:
    """An error message if something other than a file is at `path`."""
    if not os.path.lexists(path) or path.is_file():
        return None
    return (
        f"{path} is a {kind_of(path)}: the store counts what it holds in a file there; "
        f"remove it, and the store counts again"
    )
