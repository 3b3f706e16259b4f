"""Reading and writing object files.

Bytes in the page cache are copied straight into the caller's buffers. Other bytes are read with O_DIRECT, through
aligned bounce buffers, if the file system supports it. Direct reads are faster for random rows and for several threads,
never much slower, and they do not displace other data from the page cache. docs/store.md has the figures.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from threading import Lock

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import Blob
from hybridkv.store.buffers import Buffers, scatter, skip

PIECE_BYTES = 1 << 20
_ALIGNMENT = 4096
_SMALLEST_DIRECT = 1 << 16
_MOST_BUFFERS = 1024
"""Largest number of buffers in one preadv or pwritev call (IOV_MAX)."""


class Direct(Enum):
    """Which rows to read with O_DIRECT: those not in the page cache, all, or none."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class faults:  # noqa: N801 - used as a verb
    """`with faults("read", path):` raises StoreFault in place of OSError."""

    __slots__ = ("_what",)

    def __init__(self, *what: object) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            what = " ".join(map(str, self._what))
            place = error.filename2 or error.filename
            where = f" ({place})" if isinstance(place, str) and place not in what else ""
            raise StoreFault(f"cannot {what}: {error.strerror or error}{where}") from error


class BouncePool:
    """Aligned buffers that direct reads are made into."""

    def __init__(self, keep: int = 16) -> None:
        self._keep = keep
        self._lock = Lock()
        self._free: list[memoryview] = []

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        with self._lock:
            view = self._free.pop() if self._free else None
        if view is None:
            view = memoryview(mmap.mmap(-1, PIECE_BYTES))
        try:
            yield view
        finally:
            with self._lock:
                if len(self._free) < self._keep:
                    self._free.append(view)


class FileBlob(Blob):
    """An open file. It stays readable after it is deleted."""

    piece_bytes = PIECE_BYTES

    def __init__(self, path: str, fd: int, direct: Direct, pool: BouncePool) -> None:
        self.nbytes = os.fstat(fd).st_size
        self._path = path
        self._fd = fd
        self._direct = direct
        self._direct_fd: int | None = None
        self._lock = Lock()
        self._pool = pool

    def read_at(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        with faults("read", self._path):
            if self._direct is Direct.OFF or not _SMALLEST_DIRECT <= nbytes <= PIECE_BYTES or offset % _ALIGNMENT:
                return self._read(offset, buffers)
            if self._direct is Direct.AUTO and self._read_cached(offset, buffers) == nbytes:
                return nbytes
            return self._read_direct(offset, buffers, nbytes)

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _read(self, offset: int, buffers: Buffers) -> int:
        return _in_full(lambda some, at: os.preadv(self._fd, some, at), offset, buffers)

    def _read_cached(self, offset: int, buffers: Buffers) -> int:
        """Read as much as the page cache has, without waiting for the disk."""
        try:
            return os.preadv(self._fd, buffers[:_MOST_BUFFERS], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._direct = Direct.OFF  # most likely a file system in memory
            return 0

    def _read_direct(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        fd = self._open_direct()
        if fd is None:
            return self._read(offset, buffers)
        with self._pool.borrow() as bounce:
            found = os.preadv(fd, [bounce[: -(-nbytes // _ALIGNMENT) * _ALIGNMENT]], offset)
            if found < nbytes:  # end of file or a short read: `_read` handles both
                return self._read(offset, buffers)
            return scatter(bounce[:nbytes], buffers)

    def _open_direct(self) -> int | None:
        """Open the same file with O_DIRECT. Its path may belong to another file by now, so /proc is used."""
        with self._lock:
            if self._direct_fd is None and self._direct is not Direct.OFF:
                try:
                    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
                    self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", flags)
                except OSError:
                    self._direct = Direct.OFF
            return self._direct_fd


def write_all(fd: int, offset: int, buffers: Buffers) -> None:
    _in_full(lambda some, at: os.pwritev(fd, some, at), offset, buffers)


def can_read_directly(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _in_full(move: Callable[[Buffers, int], int], offset: int, buffers: Buffers) -> int:
    """Call `move` until all buffers are done or it returns 0. Returns the number of bytes moved."""
    done, rest = 0, [view for view in buffers if len(view)]
    while rest:
        moved = move(rest[:_MOST_BUFFERS], offset + done)
        if moved == 0:
            break
        done += moved
        rest = skip(rest, moved)
    return done
