"""Books that several processes keep together: how many bytes a directory holds, behind one lock.

The lock is flock's, so it goes with the process that held it. The books are void while they are open: if that process
is killed, the next one sees it and counts again. No file appears or goes except while they are open.

Books whose directory has gone are nobody's: whoever opens them is told so, and the next one to open them looks for the
directory that is there by then.
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
from hybridkv.store.file_io import kind_of

_COUNTS = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")
_PATIENCE_S = 2.0
"""Closing waits this long for a thread that is at the books."""


@dataclass(slots=True)
class Books:
    objects: int = 0
    nbytes: int = 0
    """Of objects and of drafts."""


class _Gone(StoreFault):
    """The books are not where others look for them."""


class Ledger:
    def __init__(self, path: Path, recount: Callable[[], Books], mend: Callable[[], None]) -> None:
        """`mend` puts the directory in order, or raises StoreFault."""
        self._path = path
        self._recount = recount
        self._mend = mend
        self._threads = Lock()
        self._closed = False
        self._is_ill = False
        """Something failed: the directory may have gone, or be another by now."""
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
    def open(self) -> Iterator[Books]:
        """Alone among all threads and processes. What is set in the books stays."""
        with self._threads:
            self._check_open()
            if self._is_ill:
                self._recover()
            try:
                with self._locked():
                    self._check_place()
                    books = self._read()
                    os.pwrite(self._fd, bytes(_COUNTS.size + _CHECKSUM.size), 0)
                    books = self._recount() if books is None else books
                    yield books
                    self._write(books)
            except (OSError, _Gone):
                self._is_ill = True
                raise

    def glance(self) -> Books | None:
        """The counts as they are, without waiting. None: someone is at them."""
        with self._threads:
            self._check_open()
            self._check_place()
            return self._read()

    def close(self) -> None:
        """Whoever hangs inside is left to itself, and so is the file."""
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
        """A lock on a file that others do not find keeps nobody out."""
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

    def _read(self) -> Books | None:
        raw = os.pread(self._fd, _COUNTS.size + _CHECKSUM.size, 0)
        counts, checksum = raw[: _COUNTS.size], raw[_COUNTS.size :]
        if len(checksum) != _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != xxh3_64_intdigest(counts):
            return None
        return Books(*_COUNTS.unpack(counts))

    def _write(self, books: Books) -> None:
        counts = _COUNTS.pack(max(books.objects, 0), max(books.nbytes, 0))
        os.pwrite(self._fd, counts + _CHECKSUM.pack(xxh3_64_intdigest(counts)), 0)


def _open(path: Path) -> int:
    """A FIFO opens too: without waiting, and only to be refused."""
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
    """A message, if something other than a file is where the books belong."""
    if not os.path.lexists(path) or path.is_file():
        return None
    return (
        f"{path} is a {kind_of(path)}: the store counts what it holds in a file there; "
        f"remove it, and the store counts again"
    )
