"""Values of stored objects, for eviction. A value is in the object's header: only the oldest objects are read, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hybridkv.errors import CorruptObject, MissingObject, StoreFault, UnknownFormat
from hybridkv.store.blobs import Blob, header_of
from hybridkv.store.eviction import Evictable
from hybridkv.store.names import ObjectName

_FEWEST = 64
_TIMES = 4


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

    def __init__(self, open_blob: Callable[[ObjectName], Blob]) -> None:
        self._open = open_blob
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
        self._known = {name: self._known.get(name) or self._read(name) for name in oldest}
        return [Evictable(name, one.nbytes, one.used_at, *self._known[name]) for name, one in oldest.items()]

    def _read(self, name: ObjectName) -> _Worth:
        """The object's value and position: 0 if it cannot be read, a value of None if its format is unknown."""
        try:
            blob = self._open(name)
            try:
                header = header_of(name, blob)
            finally:
                blob.close()
        except (MissingObject, CorruptObject, StoreFault):
            return _Worth(0.0, 0)
        except UnknownFormat:
            return _Worth(None, 0)
        return _Worth(header.value, header.position)
