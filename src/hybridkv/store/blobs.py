"""Backend interface: bytes by name, nothing about their meaning. `BlobStore` turns a backend into a store.

Blobs become visible atomically. The interface has no rename and no append: object stores and key-value servers have
neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.errors import StoreError
from hybridkv.store.names import ObjectName
from hybridkv.store.objects import Header, read_header
from hybridkv.store.store import Leftovers, Stored

NO_LIMIT = 2**60 - 1
"""The size of a store that evicts nothing itself."""


class Usage(NamedTuple):
    objects: int
    nbytes: int


class Blob(ABC):
    """One blob, open for reading."""

    nbytes: int
    piece_bytes: int = 1 << 62
    """Largest read. Backends that copy set it small, so that checksums find the bytes still in the CPU's cache."""

    @abstractmethod
    def read_at(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> int:
        """Fill the buffers, which hold `nbytes`. Returns fewer only at the blob's end. Raises StoreFault."""

    @abstractmethod
    def close(self) -> None: ...


class PendingBlob(ABC):
    """A blob that is being written. Its size is known from the start."""

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write ranges that do not overlap, in any order, from any thread. Raises StoreFault."""

    @abstractmethod
    def publish(self) -> bool:
        """Make the blob visible. False: the name exists by now, and this blob is discarded. Raises StoreFault."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the blob. Never raises: bytes that cannot be removed are left to `collect`."""


class Blobs(ABC):
    """All blobs of one backend. `evicted` counts evicted blobs, `dropped` those that found no room."""

    size: int = NO_LIMIT
    """Size limit in bytes."""
    evicted: int = 0
    dropped: int = 0
    opens_together: int = 1
    """Number of blobs that `open_all` opens at less cost than `open` one by one."""
    round_trips: int = 0
    """Times that a thread waited for a server. Requests that travel together, to one host or several, count once."""
    spare_bytes: int = 0
    """Bytes of blobs that only fill idle room."""
    on_evict: Callable[[ObjectName, Blob], None] | None = None
    """Called with each evicted blob, opened for reading. It must close the blob."""

    @abstractmethod
    def lookup(self, names: Sequence[ObjectName]) -> list[bool]: ...

    @abstractmethod
    def open(self, name: ObjectName) -> Blob:
        """Open a blob. Raises MissingObject or StoreFault."""

    def open_all(self, names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        """Open several blobs. An error stands in the place of a blob that cannot be opened."""
        return [self._opened(name) for name in names]

    def _opened(self, name: ObjectName) -> Blob | StoreError:
        try:
            return self.open(name)
        except StoreError as error:
            return error

    @abstractmethod
    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        """Begin to write a blob. None: it exists already, or there is no room even after eviction."""

    def begin_spare(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        """Begin to write a blob that only fills idle room. None: it exists already, or no room is idle."""
        return None

    @property
    def idle_bytes(self) -> int:
        """Room for spare blobs: free, or taken by other spare ones."""
        return 0

    @abstractmethod
    def delete(self, names: Sequence[ObjectName]) -> int: ...

    @abstractmethod
    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        """List blobs, with value and position only if that takes no read."""

    @abstractmethod
    def touch(self, names: Sequence[ObjectName]) -> None: ...

    @abstractmethod
    def describe(self, namespace: str, info: Mapping[str, str]) -> None: ...

    @abstractmethod
    def descriptions(self) -> dict[str, dict[str, str]]: ...

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    def collect(self) -> Leftovers: ...

    @abstractmethod
    def shrink(self, nbytes: int) -> int: ...

    @abstractmethod
    def close(self) -> None: ...


def header_of(name: ObjectName, blob: Blob) -> Header:
    """Read the header of a blob. Raises CorruptObject or UnknownFormat if the blob is no object that can be read."""

    def read(offset: int, length: int) -> bytes:
        raw = bytearray(length)
        return bytes(raw[: blob.read_at(offset, [memoryview(raw)], length)])

    return read_header(name, blob.nbytes, read)
