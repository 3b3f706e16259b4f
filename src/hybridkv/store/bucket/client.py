"""Requests to one bucket: counted, bounded in time and memory, with StoreErrors in place of obstore's errors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError

from hybridkv.errors import StoreFault
from hybridkv.store.bucket.faults import ERRORS, faults, is_empty_range, missing_or_fault
from hybridkv.store.buffers import Buffers, scatter, skip

ObjectStore = Any
"""A store of obstore. Its classes share no base that exists at run time."""

PAGE = 1000
"""Entries of one page of a listing, and keys of one bulk deletion."""
_SLOWEST_BYTES_PER_S = 8 << 20
"""A request may take as long as its bytes take at this rate, if that is longer than the timeout."""
_CHUNK_BYTES = 1 << 18


class Listed(NamedTuple):
    key: str
    nbytes: int
    modified_at: float
    """Seconds since 1970, by the server's clock. Most servers cut it to whole seconds."""


class Start(NamedTuple):
    """The first bytes of an object."""

    data: memoryview
    nbytes: int
    """Size of the whole object."""
    e_tag: str | None


class Client:
    def __init__(
        self, connect: Callable[[float], ObjectStore], place: str, timeout: float, count: Callable[[int, int], None]
    ) -> None:
        """`connect` makes a store of obstore with that timeout. `count` is called with round trips and requests."""
        self.place = place
        self._connect = connect
        self._timeout = timeout
        self._count = count
        self._stores: dict[int, ObjectStore] = {}
        self._closed = False
        self._pid = os.getpid()

    def store(self, nbytes: int = 0) -> ObjectStore:
        """The store of obstore for a request with so many bytes. Timeouts double, so that there are few stores."""
        if self._closed:
            raise StoreFault(f"{self.place}: the store is closed")
        if self._pid != os.getpid():  # its threads are not there
            raise StoreFault(f"{self.place}: this process was forked after the store was opened; open it after that")
        doublings = max(0, math.ceil(math.log2(max(nbytes, 1) / _SLOWEST_BYTES_PER_S / self._timeout)))
        if doublings not in self._stores:
            with faults(self.place, "connect"):
                self._stores[doublings] = self._connect(self._timeout * 2**doublings)
        return self._stores[doublings]

    def close(self) -> None:
        self._closed = True
        self._stores = {}

    def counted(self, requests: int, round_trips: int = 1) -> None:
        self._count(round_trips, requests)

    def create(self, key: str, data: memoryview, what: str) -> bool:
        """Write an object in one request. False: the key exists."""
        self.counted(1)
        with faults(self.place, f"write {what}"):
            try:
                obstore.put(self.store(len(data)), key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def replace(self, key: str, data: bytes, what: str) -> None:
        self.counted(1)
        with faults(self.place, f"write {what}"):
            obstore.put(self.store(len(data)), key, data, use_multipart=False)

    def read(self, key: str, e_tag: str | None, offset: int, buffers: Buffers, nbytes: int, what: str) -> None:
        """Fill the buffers with a range of the object. Raises MissingObject if it is not that of `e_tag` any more."""
        self.counted(1)
        options: dict[str, object] = {"range": (offset, offset + nbytes)}
        if e_tag is not None:
            options["if_match"] = e_tag
        with faults(self.place, f"read {what}", missing_or_fault):
            reply = obstore.get(self.store(nbytes), key, options=options)
            rest, left = list(buffers), nbytes
            for chunk in reply.stream(min_chunk_size=_CHUNK_BYTES):
                view = memoryview(chunk)
                if len(view) > left:
                    break
                rest, left = skip(rest, scatter(view, rest)), left - len(view)
        if left or tuple(reply.range) != (offset, offset + nbytes):
            raise StoreFault(f"{self.place}: cannot read {what}: the server sent other bytes than those asked for")

    def start(self, key: str, most: int, what: str) -> Start:
        """The first bytes of an object, at most `most`. Raises MissingObject or StoreFault."""
        self.counted(1)
        with faults(self.place, f"read {what}", missing_or_fault):
            try:
                reply = obstore.get(self.store(most), key, options={"range": (0, most)})
            except ERRORS as error:
                if not is_empty_range(error):
                    raise
                self.counted(1)
                return _empty(obstore.head(self.store(), key))
            parts = _Parts(min(reply.meta["size"], most))
            for chunk in reply.stream(min_chunk_size=most):
                if not parts.add(chunk):
                    break
        return parts.start(reply.meta, f"{self.place}: cannot read {what}")

    async def start_async(self, key: str, most: int, what: str) -> Start:
        """The same as `start`, but the caller counts the request."""
        with faults(self.place, f"read {what}", missing_or_fault):
            try:
                reply = await obstore.get_async(self.store(most), key, options={"range": (0, most)})
            except ERRORS as error:
                if not is_empty_range(error):
                    raise
                self.counted(1)
                return _empty(await obstore.head_async(self.store(), key))
            parts = _Parts(min(reply.meta["size"], most))
            async for chunk in reply.stream(min_chunk_size=most):
                if not parts.add(chunk):
                    break
        return parts.start(reply.meta, f"{self.place}: cannot read {what}")

    def size(self, key: str) -> int | None:
        """Size of an object; None if it is missing. A missing bucket looks the same: the reply has no text."""
        self.counted(1)
        with faults(self.place, "look up objects"):
            try:
                return int(obstore.head(self.store(), key)["size"])
            except FileNotFoundError:
                return None

    async def size_async(self, key: str) -> int | None:
        """The same as `size`, but the caller counts the round trip."""
        self.counted(1, round_trips=0)
        with faults(self.place, "look up objects"):
            try:
                return int((await obstore.head_async(self.store(), key))["size"])
            except FileNotFoundError:
                return None

    async def page(self, pages: Any) -> list[Listed]:
        """The next page of a listing that `listing` began. It is the last if it has fewer than PAGE entries."""
        with faults(self.place, "look up objects"):
            async for page in pages:
                return [_listed(meta) for meta in page]
        return []

    def listing(self, prefix: str) -> Any:
        return obstore.list(self.store(), prefix, chunk_size=PAGE)

    def list(self, prefix: str) -> Iterator[Listed]:
        with faults(self.place, "list objects"):
            pages = iter(self.listing(prefix))
        while True:
            self.counted(1)
            with faults(self.place, "list objects"):
                page = next(pages, None)
            if page is not None:
                yield from map(_listed, page)
            if page is None or len(page) < PAGE:
                return

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Those that are missing are no error."""
        for begin in range(0, len(keys), PAGE):
            some = list(keys[begin : begin + PAGE])
            self.counted(1)
            with faults(self.place, "delete objects"):
                try:
                    obstore.delete(self.store(), some)
                except FileNotFoundError:  # another process was faster with one of them; the rest may be untouched
                    self._delete_each(some)

    def _delete_each(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.counted(1)
            try:
                obstore.delete(self.store(), key)
            except FileNotFoundError:
                continue


class _Parts:
    """Bytes of a reply, never more than wanted."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._parts: list[memoryview] = []
        self._total = 0

    def add(self, chunk: Any) -> bool:
        """False: the reply is longer than it should be, and the rest must not be read."""
        self._parts.append(memoryview(chunk))
        self._total += len(self._parts[-1])
        return self._total <= self._wanted

    def start(self, meta: Any, what: str) -> Start:
        if self._total != self._wanted:
            raise StoreFault(f"{what}: the server sent {self._total:,} bytes in place of {self._wanted:,}")
        data = self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))
        return Start(data, meta["size"], meta["e_tag"])


def _empty(meta: Any) -> Start:
    """No range of an empty object exists, so that a HEAD request was made."""
    if meta["size"]:
        raise ValueError("the object has no first bytes, but a size")
    return Start(memoryview(b""), 0, meta["e_tag"])


def _listed(meta: Any) -> Listed:
    modified: datetime = meta["last_modified"]
    return Listed(meta["path"], meta["size"], modified.timestamp())
