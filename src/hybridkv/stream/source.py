"""Source: the objects that hold what one rank needs of one group at one position."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from hybridkv.errors import StoreError
from hybridkv.store import CorruptObject, MissingObject, ObjectName, Reader, Store, UnknownFormat
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.form import Chunk, Share, StoredGroup
from hybridkv.stream.openings import Openings


class Source:
    """What a load reads. The first read opens its objects.

    The slices may have been divided among more writers or fewer than there are readers now: `ways`.
    """

    def __init__(
        self, store: Store, openings: Openings, catalogue: Catalogue, group: StoredGroup, key: bytes, end: int
    ) -> None:
        self.group = group
        self.num_tokens = catalogue.num_tokens(group, end)
        self.names: list[ObjectName] = []
        """Objects that were opened."""
        self._store = store
        self._openings = openings
        self._held = group.share.slices(group.slices)
        self._ways = [
            [
                (share, catalogue.name(group, key, share))
                for share in way
                if _overlap(share.slices(group.slices), self._held)
            ]
            for way in group.ways
        ]
        self._lock = threading.Lock()
        self._readers: list[tuple[Share, Reader]] = []
        self._error: Exception | None = None
        """Error of the first open. Later rows raise it too; a second open of a deleted corrupt object would differ."""

    def read(self, chunk: Chunk, staged: memoryview) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._readers:
                try:
                    self._readers = self._open()
                except Exception as error:
                    self._error = error
                    raise
            readers = self._readers
        for share, reader in readers:
            for number, place in chunk.pieces(self.num_tokens):
                self._read_row(reader, share.slices(self.group.slices), number, staged[place])

    def _read_row(self, reader: Reader, theirs: range, number: int, mine: memoryview) -> None:
        """Read one row, which has the slices `theirs`. A row is verified whole, so it is read whole."""
        size = len(mine) // len(self._held)
        first = theirs.start - self._held.start
        if first >= 0 and len(theirs) <= len(self._held):
            reader.read(number, [mine[first * size : (first + len(theirs)) * size]])
        else:
            whole = memoryview(bytearray(len(theirs) * size))
            reader.read(number, [whole])
            mine[:] = whole[-first * size : -first * size + len(mine)]

    @property
    def expected(self) -> list[ObjectName]:
        """Objects that the first read will most likely open."""
        return [name for _, name in self._ways[0]]

    def close(self) -> None:
        """Call after the last read."""
        with self._lock:
            readers, self._readers = self._readers, []
            self._error = self._error or RuntimeError("closed")
        _close(readers)

    def _open(self) -> list[tuple[Share, Reader]]:
        """Open the objects of the first way that is there."""
        missing: MissingObject | UnknownFormat | None = None
        for needed in self._ways:
            readers: list[tuple[Share, Reader]] = []
            try:
                for share, name in needed:
                    readers.append((share, self._open_one(share, name)))
            except (MissingObject, UnknownFormat) as error:
                _close(readers)
                missing = missing or error
            except BaseException:
                _close(readers)
                raise
            else:
                self.names = [name for _, name in needed]
                return readers
        assert missing is not None
        raise missing

    def _open_one(self, share: Share, name: ObjectName) -> Reader:
        reader, expected = self._openings.open(name), self.group.row_bytes(self.num_tokens, share)
        found = [row.nbytes for row in reader.header.rows]
        if found != expected:
            reader.close()
            self._store.delete([name])  # while it exists, a correct one cannot be written
            raise CorruptObject(f"{name}: rows of {found[:3]}... bytes instead of {expected[:3]}...")
        return reader


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _close(readers: Sequence[tuple[Share, Reader]]) -> None:
    for _, reader in readers:
        with suppress(StoreError, OSError):
            reader.close()
