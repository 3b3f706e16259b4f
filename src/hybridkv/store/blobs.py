"""What a backend has to offer so that `BlobStore` makes a store of it: bytes by name, nothing about their meaning.

Objects become visible at once and whole. No rename, no append: object stores and key-value servers have neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.store.names import ObjectName
from hybridkv.store.objects import Header, read_header
from hybridkv.store.store import Leftovers, Stored


class Usage(NamedTuple):
    objects: int
    nbytes: int


class Blob(ABC):
    """Bytes under a name, open for reading."""

    nbytes: int
    piece_bytes: int = 1 << 62
    """Read at most so much at once: where reading is a copy, checksums are faster on bytes still in the CPU's cache."""

    @abstractmethod
    def read_at(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> int:
        """Fill the buffers, which take `nbytes`; fewer only where the blob ends. Raises StoreFault."""

    @abstractmethod
    def close(self) -> None: ...


class PendingBlob(ABC):
    """Bytes on their way in, of a size known from the start."""

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Runs of bytes that do not overlap, in any order, from any thread. Raises StoreFault."""

    @abstractmethod
    def publish(self) -> bool:
        """Make it visible. False: the name is taken by now, and this one is discarded. Raises StoreFault."""

    @abstractmethod
    def discard(self) -> None:
        """Leave nothing. Never raises: what cannot be removed is left to `collect`."""


class Blobs(ABC):
    """All blobs of one backend. `evicted` and `dropped` count what had to go and what found no room."""

    size: int = 1 << 62
    """At most so many bytes."""
    evicted: int = 0
    dropped: int = 0
    on_evict: Callable[[ObjectName, Blob], None] | None = None
    """Gets each blob that is evicted, open, and closes it."""

    @abstractmethod
    def lookup(self, names: Sequence[ObjectName]) -> list[bool]: ...

    @abstractmethod
    def open(self, name: ObjectName) -> Blob:
        """Raises MissingObject or StoreFault."""

    @abstractmethod
    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        """None: it is there already, or finds no room even after evicting others."""

    @abstractmethod
    def delete(self, names: Sequence[ObjectName]) -> int: ...

    @abstractmethod
    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        """Value and position only where they take no read."""

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
    """The header of the object that a blob is; raises CorruptObject if it is none."""

    def read(offset: int, length: int) -> bytes:
        raw = bytearray(length)
        return bytes(raw[: blob.read_at(offset, [memoryview(raw)], length)])

    return read_header(name, blob.nbytes, read)
