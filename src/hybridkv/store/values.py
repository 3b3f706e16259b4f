"""Values of stored objects, for eviction. A value is in the object's header: only the oldest objects are read, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault, UnknownFormat
from hybridkv.store.blobs import Blob, header_of
from hybridkv.store.eviction import Evictable
from hybridkv.store.names import ObjectName

_FEWEST = 64
_TIMES = 4
_AT_ONCE = 64


class _Worth(NamedTuple):
    value: float | None
    position: int


class Found(Protocol):
    """An object of a listing."""

    @property
    def name(self) -> ObjectName: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def used_at(self) -> float: ...


class ValueReader:
    """Reads values, and caches those of objects that are still among the oldest."""

    def __init__(self, open_all: Callable[[Sequence[ObjectName]], list[Blob | StoreError]]) -> None:
        self._open_all = open_all
        self._known: dict[ObjectName, _Worth] = {}

    def candidates(self, found: Sequence[Found], nbytes: int) -> list[Evictable]:
        """The oldest objects: several times the `nbytes` to free."""
        oldest: dict[ObjectName, Found] = {}
        room = _TIMES * nbytes
        for one in sorted(found, key=lambda one: one.used_at):
            if room <= 0 and len(oldest) >= _FEWEST:
                break
            oldest[one.name] = one
            room -= one.nbytes
        self._known = {name: self._known[name] for name in oldest if name in self._known}
        unknown = [name for name in oldest if name not in self._known]
        for begin in range(0, len(unknown), _AT_ONCE):
            names = unknown[begin : begin + _AT_ONCE]
            self._known.update(zip(names, map(_worth, names, self._open_all(names)), strict=True))
        return [Evictable(name, one.nbytes, one.used_at, *self._known[name]) for name, one in oldest.items()]


def _worth(name: ObjectName, found: Blob | StoreError) -> _Worth:
    """The object's value and position: 0 if it cannot be read, a value of None if its format is unknown."""
    try:
        if isinstance(found, StoreError):
            raise found
        try:
            header = header_of(name, found)
        finally:
            found.close()
    except (MissingObject, CorruptObject, StoreFault):
        return _Worth(0.0, 0)
    except UnknownFormat:
        return _Worth(None, 0)
    return _Worth(header.value, header.position)
