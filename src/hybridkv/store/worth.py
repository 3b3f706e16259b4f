"""What the objects in a directory are worth. That takes a read of each: only the oldest are looked at, and once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridkv.errors import CorruptObject, MissingObject, StoreFault
from hybridkv.store.blobs import Blob, header_of
from hybridkv.store.folder import Found
from hybridkv.store.names import ObjectName
from hybridkv.store.ranking import Candidate

_FEWEST = 64
_TIMES = 4


class _Worth(NamedTuple):
    value: float
    position: int


class Appraiser:
    def __init__(self, open_blob: Callable[[ObjectName], Blob]) -> None:
        self._open = open_blob
        self._known: dict[ObjectName, _Worth] = {}

    def candidates(self, found: Sequence[Found], nbytes: int) -> list[Candidate]:
        """Among whom to choose when `nbytes` have to go: the oldest, several times as many."""
        oldest: dict[ObjectName, Found] = {}
        room = _TIMES * nbytes
        for one in sorted(found, key=lambda one: one.used_at):
            if room <= 0 and len(oldest) >= _FEWEST:
                break
            oldest[one.name] = one
            room -= one.nbytes
        self._known = {name: self._known.get(name) or self._read(name) for name in oldest}
        return [Candidate(name, one.nbytes, one.used_at, *self._known[name]) for name, one in oldest.items()]

    def _read(self, name: ObjectName) -> _Worth:
        """What cannot be read is worth nothing."""
        try:
            blob = self._open(name)
            try:
                header = header_of(name, blob)
            finally:
                blob.close()
        except (MissingObject, CorruptObject, StoreFault):
            return _Worth(0.0, 0)
        return _Worth(header.value, header.position)
