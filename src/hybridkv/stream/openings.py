"""Opens the objects of one load several at a time, if that is cheaper for the store: on a server, in one round trip."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice

from hybridkv.errors import StoreError
from hybridkv.store import ObjectName, Reader, Store


class _Batch:
    """Objects that one call opens. A thread that needs one of them waits for all."""

    def __init__(self, names: list[ObjectName]) -> None:
        self.names = names
        self.found: Future[dict[ObjectName, Reader | StoreError]] = Future()

    def open(self, store: Store) -> None:
        try:
            self.found.set_result(dict(zip(self.names, store.open_all(self.names), strict=True)))
        except BaseException as error:  # raised again wherever one of the objects is needed
            self.found.set_exception(error)


class Openings:
    """Thread-safe. `close` closes readers that `open` has not returned."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._expected: dict[ObjectName, None] = {}
        """Objects that no batch has yet, in the order in which they will be needed."""
        self._batches: dict[ObjectName, _Batch] = {}
        """The batch of each object that `open` has not returned yet."""

    def expect(self, names: Iterable[ObjectName]) -> None:
        """These will be opened: any of them may be opened together with others."""
        with self._lock:
            self._expected.update(dict.fromkeys(names))

    def open(self, name: ObjectName) -> Reader:
        """Open an object, together with those that are expected next. The caller closes it."""
        if self._store.opens_together == 1:
            return self._store.open(name)
        with self._lock:
            batch = self._batches.pop(name, None)
            is_first = batch is None
            if batch is None:
                batch = self._next_batch(name)
        if is_first:
            batch.open(self._store)
        found = batch.found.result()[name]
        if isinstance(found, StoreError):
            raise found
        return found

    def _next_batch(self, name: ObjectName) -> _Batch:
        self._expected.pop(name, None)
        others = list(islice(self._expected, self._store.opens_together - 1))
        batch = _Batch([name, *others])
        for other in others:
            del self._expected[other]
            self._batches[other] = batch
        return batch

    def close(self) -> None:
        """Close what `open` has not returned. A batch under way is closed when it ends."""
        with self._lock:
            self._expected.clear()
            left, self._batches = self._batches, {}
        for name, batch in left.items():
            batch.found.add_done_callback(lambda done, name=name: _close(done, name))  # type: ignore[misc]


def _close(done: Future[dict[ObjectName, Reader | StoreError]], name: ObjectName) -> None:
    if done.exception() is None and isinstance(found := done.result()[name], Reader):
        with suppress(StoreError, OSError):
            found.close()
