"""The interface of stores: what the rest of the house knows of them.

All methods block and may be called from any thread; callers bring the threads. What a store says it has may be gone or
bad when it is read: every byte is checked then, and an error tells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from hybridkv.store.names import ObjectName
from hybridkv.store.objects import Header


class Stored(NamedTuple):
    """An object as a listing shows it."""

    name: ObjectName
    nbytes: int
    used_at: float
    """Seconds since 1970."""
    value: float | None
    position: int | None
    """None, as is `value`: it would have to be read from the object, and nobody asked."""


class Leftovers(NamedTuple):
    """What writers that died had left, now removed."""

    files: int
    nbytes: int


@dataclass(slots=True)
class StoreStats:
    """Gauges, then counters since the store was opened."""

    objects: int = 0
    nbytes: int = 0
    """Of objects, and of those being written."""
    hits: int = 0
    """Names looked up and found."""
    misses: int = 0
    opened: int = 0
    read_bytes: int = 0
    saved: int = 0
    """Objects committed."""
    saved_bytes: int = 0
    evicted: int = 0
    dropped: int = 0
    """Objects that found no room, or no time."""
    promoted: int = 0
    """Objects copied to a faster tier."""
    corrupt: int = 0
    faults: int = 0
    skipped: int = 0
    """Names and objects that were not asked for, or not written, while the store rested after a fault."""


class Reader(ABC):
    """One object, open. It stays readable, or fails with an error, when the object is deleted meanwhile."""

    header: Header

    @abstractmethod
    def read(self, row: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with exactly this row. No two of them overlap.

        Raises CorruptObject or StoreFault; the buffers then hold anything.
        """

    @abstractmethod
    def close(self) -> None:
        """Reads under way in other threads end first or fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Writer(ABC):
    """One object on its way in: invisible until `commit`. Left without it, nothing stays."""

    @abstractmethod
    def write(self, row: int, buffers: Sequence[memoryview]) -> None:
        """Each row once, in any order, from any thread. The bytes are taken before it returns."""

    @abstractmethod
    def commit(self) -> bool:
        """Make it visible, now that all rows are written. False: another was faster, and that one stays."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing. Does nothing after `commit`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


EvictionHook = Callable[[Reader], None]


class Store(ABC):
    """Objects by name. A corrupt one is deleted when it is noticed, and missing from then on."""

    @abstractmethod
    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        """Which of these are there, in one round trip."""

    @abstractmethod
    def open(self, name: ObjectName) -> Reader:
        """Raises MissingObject, CorruptObject or StoreFault."""

    @abstractmethod
    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        """None: nothing to write, because it is there already or the store has no room for it."""

    @abstractmethod
    def delete(self, names: Sequence[ObjectName]) -> int:
        """How many of them were there."""

    @abstractmethod
    def objects(
        self, namespace: str | None = None, group: str | None = None, *, headers: bool = False
    ) -> Iterator[Stored]:
        """With `headers`, value and position are read from each object where that takes a read."""

    @abstractmethod
    def touch(self, names: Sequence[ObjectName]) -> None:
        """They were used: keep them longer. Reading alone does not count."""

    @abstractmethod
    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        """What people call this namespace: a model's name, its types ..."""

    @abstractmethod
    def descriptions(self) -> dict[str, dict[str, str]]:
        """By namespace."""

    @property
    @abstractmethod
    def stats(self) -> StoreStats:
        """A copy. Never raises: while the store cannot tell, gauges are as last known; counters never fall."""

    @abstractmethod
    def collect(self) -> Leftovers:
        """Remove what writers that died have left."""

    @abstractmethod
    def shrink(self, nbytes: int) -> int:
        """Evict until at most so many bytes are used; how many objects went."""

    @abstractmethod
    def on_evict(self, hook: EvictionHook | None) -> None:
        """Call `hook` with each object evicted to make room; it closes the reader. It must not call this store."""

    @abstractmethod
    def close(self) -> None:
        """Twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
