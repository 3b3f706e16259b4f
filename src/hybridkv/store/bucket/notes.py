"""Notes of uses: object storage cannot touch an object, so each writer notes from time to time which ones were used.

A note is an object `used/<milliseconds>-<writer>-<kind>` that is never changed: lines of a name and a time. Times in
notes of kind `t` (touched) are by the writer's clock. If that clock differs from the server's, they are corrected when
the note is read: the note's key has the time of writing by the one, and the server knows it by the other. Notes of kind
`m` (merged) have corrected times.

Any process may merge notes at any time: it writes the merged notes first, then deletes those it has read.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock

from hybridkv.errors import MissingObject, StoreError, StoreInputError
from hybridkv.store.bucket.client import Client, Listed
from hybridkv.store.bucket.keys import Keys
from hybridkv.store.bucket.parallel import Parallel
from hybridkv.store.names import ObjectName

Uses = dict[ObjectName, float]

_INTERVAL_S = 60.0
_MOST_LINES = 10_000
"""Most names in one note, and most names that one process keeps in memory before it writes them."""
_MOST_BYTES = 4 << 20
"""Longer notes are not read."""
_MOST_NOTES = 256
"""Only the latest are read."""
_MOST_NAMES = 200_000
"""Merging keeps the latest uses."""
_MANY_NOTES = 64
_FLUSHES_PER_MERGE = 60
_CLOCKS_EQUAL_S = 5.0
_TRIES = 3
_KEY = re.compile(r"(\d{13})-[0-9a-f]{16}-([tm])")


class UseNotes:
    def __init__(self, client: Client, parallel: Parallel, keys: Keys, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._parallel = parallel
        self._keys = keys
        self._clock = clock
        self._writer = secrets.token_hex(8)
        self._lock = Lock()
        self._new: Uses = {}
        self._written_at = clock()
        self._number = 0
        self._flushes = 0
        self._known: dict[str, Uses] = {}
        """Notes that were read before: they never change."""

    def add(self, names: Sequence[ObjectName]) -> None:
        """Remember uses. They are written if the last note is a minute old, or if they are many."""
        now = self._clock()
        with self._lock:
            self._new.update(dict.fromkeys(names, now))
            due = len(self._new) >= _MOST_LINES or not 0 <= now - self._written_at < _INTERVAL_S
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what was remembered. If that fails, it is remembered for the next time, up to a limit."""
        with self._lock:
            new, self._new, self._written_at = self._new, {}, self._clock()
        if not new:
            return
        try:
            self._write("t", new)
        except StoreError:
            with self._lock:
                self._new = _latest(new | self._new, _MOST_LINES - 1)
            raise
        self._flushes += 1
        if self._flushes % _FLUSHES_PER_MERGE == 0:
            self.merge()

    def read(self) -> Uses:
        """Latest use of each object, by the server's clock."""
        return _union(self._read_all().values())

    def merge(self, existing: Container[ObjectName] | None = None, *, at_least: int = _MANY_NOTES) -> None:
        """Merge notes if there are many. Names that are not among `existing` are left out."""
        notes = self._read_all()
        if len(notes) < at_least:
            return
        uses = _union(notes.values())
        if existing is not None:
            uses = {name: used_at for name, used_at in uses.items() if name in existing}
        self._write("m", _latest(uses, _MOST_NAMES))
        self._client.delete(list(notes))

    def _write(self, kind: str, uses: Mapping[ObjectName, float]) -> None:
        lines = [f"{name} {used_at:.3f}\n" for name, used_at in uses.items()]
        for begin in range(0, len(lines), _MOST_LINES):
            self._client.replace(self._new_key(kind), "".join(lines[begin : begin + _MOST_LINES]).encode(), "uses")

    def _new_key(self, kind: str) -> str:
        with self._lock:
            self._number = max(self._number + 1, int(self._clock() * 1000))
            return f"{self._keys.used}/{self._number:013}-{self._writer}-{kind}"

    def _read_all(self) -> dict[str, Uses]:
        """Notes by key. If one disappears, another process has merged it: its uses are in a later note."""
        for _ in range(_TRIES):
            found = [one for one in self._client.list(self._keys.used) if self._kind(one.key) is not None]
            found = sorted(found, key=lambda one: one.key)[-_MOST_NOTES:]
            new = [one for one in found if one.key not in self._known]
            if new:
                self._client.counted(len(new))
            results = self._parallel.run([partial(self._read, one) for one in new])
            known = {one.key: self._known[one.key] for one in found if one.key in self._known}
            for one, result in zip(new, results, strict=True):
                if isinstance(result, dict):
                    known[one.key] = result
                elif not isinstance(result, MissingObject):
                    raise result
            self._known = known
            if len(known) == len(found):
                break
        return known

    async def _read(self, note: Listed) -> Uses:
        if not 0 < note.nbytes <= _MOST_BYTES:
            return {}
        start = await self._client.start_async(note.key, _MOST_BYTES, "uses")
        uses = dict(_lines(start.data))
        written_at = int(note.key.rpartition("/")[2][:13]) / 1000
        ahead = written_at - note.modified_at
        if self._kind(note.key) == "m" or abs(ahead) <= _CLOCKS_EQUAL_S:
            ahead = 0.0
        latest = note.modified_at + _CLOCKS_EQUAL_S
        return {name: min(used_at - ahead, latest) for name, used_at in uses.items()}

    def _kind(self, key: str) -> str | None:
        match = _KEY.fullmatch(key.removeprefix(f"{self._keys.used}/"))
        return None if match is None else match[2]


def _lines(data: memoryview) -> Iterator[tuple[ObjectName, float]]:
    """Names and times. Lines that are not both are skipped: anyone may have written them."""
    for line in bytes(data).decode("ascii", "replace").splitlines():
        with suppress(ValueError, StoreInputError):
            path, text = line.split(" ")
            namespace, group, key = path.split("/")
            used_at = float(text)
            if math.isfinite(used_at):
                yield ObjectName(namespace, group, key), used_at


def _union(notes: Iterable[Uses]) -> Uses:
    uses: Uses = {}
    for note in notes:
        for name, used_at in note.items():
            if used_at > uses.get(name, -math.inf):
                uses[name] = used_at
    return uses


def _latest(uses: Uses, most: int) -> Uses:
    if len(uses) <= most:
        return uses
    return dict(sorted(uses.items(), key=lambda item: item[1])[-most:])
