"""Interface of stores.

All methods block and may be called from any thread; stores start no threads for their callers. An object that a lookup
found may be missing, corrupt or of an unknown format when it is read: every byte is checked then, and the read raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from hybridkv.errors import StoreError
from hybridkv.store.names import ObjectName
from hybridkv.store.objects import Header


class Stored(NamedTuple):
    """An object in a listing."""

    name: ObjectName
    nbytes: int
    used_at: float
    """Seconds since 1970."""
    value: float | None
    position: int | None
    """`value` and `position` are None if they are only in the object's header, and the header was not read."""
    is_spare: bool = False
    """It only fills idle room."""


class Leftovers(NamedTuple):
    """Files of dead writers that were removed."""

    files: int
    nbytes: int


@dataclass(slots=True)
class StoreStats:
    """Gauges, then counters since the store was opened."""

    objects: int = 0
    nbytes: int = 0
    """Bytes of objects, including those being written."""
    spare_bytes: int = 0
    """Bytes of objects that only fill idle room."""
    hits: int = 0
    """Names looked up and found."""
    misses: int = 0
    opened: int = 0
    read_bytes: int = 0
    saved: int = 0
    """Objects committed."""
    saved_bytes: int = 0
    evicted: int = 0
    """Objects evicted, but for those that only filled idle room."""
    dropped: int = 0
    """Objects that were not kept: no room in the store or in the copy queue, or a copy between tiers failed."""
    promoted: int = 0
    """Objects copied to a faster tier while they were read."""
    prefetched: int = 0
    """Objects copied to the fastest tier while the request that needs them was waiting."""
    corrupt: int = 0
    unknown: int = 0
    """Times that an object was not opened because a later version of hybridkv has written it."""
    faults: int = 0
    skipped: int = 0
    """Names and objects not looked up, read or written while the circuit breaker was open."""
    round_trips: int = 0
    """Times that a thread waited for a server."""


class Reader(ABC):
    """One open object. If the object is deleted meanwhile, reads succeed or raise."""

    header: Header

    @abstractmethod
    def read(self, row: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, with exactly this row. The buffers must not overlap.

        Raises CorruptObject or StoreFault; the content of the buffers is then undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the object. Reads under way in other threads end first or raise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Writer(ABC):
    """One object that is being written. It is invisible until `commit`; without `commit` nothing is kept."""

    @abstractmethod
    def write(self, row: int, buffers: Sequence[memoryview]) -> None:
        """Write each row once, in any order, from any thread. The buffers may be reused on return."""

    @abstractmethod
    def commit(self) -> bool:
        """Make the object visible after all rows are written. False: another writer was first; its object is kept."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the object. Does nothing after `commit`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


EvictionHook = Callable[[Reader], None]


class Store(ABC):
    """Objects by name. A corrupt object is deleted when a read detects it, and is missing from then on.

    An object of an unknown format exists for `lookup`, and `open` refuses it. Only `delete` and eviction remove it.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Size limit in bytes."""

    @abstractmethod
    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        """Whether each of these exists, in one round trip."""

    @abstractmethod
    def open(self, name: ObjectName) -> Reader:
        """Open an object. Raises MissingObject, CorruptObject, UnknownFormat or StoreFault."""

    @property
    def opens_together(self) -> int:
        """Number of objects that `open_all` opens at less cost than `open` one by one."""
        return 1

    def open_all(self, names: Sequence[ObjectName]) -> list[Reader | StoreError]:
        """Open several objects, in one round trip. An error stands in the place of one that cannot be opened."""
        return [self._opened(name) for name in names]

    def _opened(self, name: ObjectName) -> Reader | StoreError:
        try:
            return self.open(name)
        except StoreError as error:
            return error

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch` does something."""
        return False

    def prefetch(self, names: Sequence[ObjectName]) -> None:
        """Say that these will be opened soon, in this order: tiers copy them to the fastest one. Never waits."""
        return

    @abstractmethod
    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        """Begin to write an object. None: it exists already, or the store has no room for it."""

    def create_spare(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        """Begin to write an object that only fills idle room. None: it exists already, or no room is idle.

        It is evicted before all others, and copied to no other store. It becomes a normal object when it is touched, or
        created as one.
        """
        return None

    @property
    def idle_bytes(self) -> int:
        """Room for spare objects: free, or taken by other spare ones. 0 for stores that should not be filled."""
        return 0

    @abstractmethod
    def delete(self, names: Sequence[ObjectName]) -> int:
        """Delete objects. Returns how many of them existed."""

    @abstractmethod
    def objects(
        self, namespace: str | None = None, group: str | None = None, *, headers: bool = False
    ) -> Iterator[Stored]:
        """List objects. `headers`: read value and position from object headers if the listing alone lacks them."""

    @abstractmethod
    def touch(self, names: Sequence[ObjectName]) -> None:
        """Mark objects as used just now, so that they are evicted later. Reading alone does not do this."""

    @abstractmethod
    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        """Attach a human-readable description to a namespace: the model's name, its type ..."""

    @abstractmethod
    def descriptions(self) -> dict[str, dict[str, str]]:
        """Descriptions by namespace."""

    @property
    @abstractmethod
    def stats(self) -> StoreStats:
        """A copy. Never raises: while the store fails, gauges keep their last known values. Counters never decrease."""

    @abstractmethod
    def collect(self) -> Leftovers:
        """Remove files that dead writers have left."""

    @abstractmethod
    def shrink(self, nbytes: int) -> int:
        """Evict until at most `nbytes` are used. Returns the number of evicted objects."""

    @abstractmethod
    def on_evict(self, hook: EvictionHook | None) -> None:
        """Call `hook` with each evicted object. The hook must close the reader, and must not call this store."""

    @abstractmethod
    def close(self) -> None:
        """Close the store. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
