"""Blobs as files, for several processes at once: they share one directory and its size limit.

An object is written under a draft's name and renamed when it is whole; to kill a process at any moment leaves at most a
draft, which is removed when nobody holds its lock any more. Ages are the files' times of modification.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hybridkv.errors import MissingObject, StoreFault, StoreInputError
from hybridkv.store.about import encode_description, read_descriptions
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, Draft, Usage
from hybridkv.store.buffers import Buffers
from hybridkv.store.drafts import DraftFile, Drafts
from hybridkv.store.file_io import BouncePool, Direct, FileBlob, can_read_directly, faults, write_all
from hybridkv.store.folder import ROOT, Folder
from hybridkv.store.ledger import Books, Ledger
from hybridkv.store.names import ObjectName
from hybridkv.store.ranking import chosen, ranked, with_slack
from hybridkv.store.store import Leftovers, Stored
from hybridkv.store.worth import Appraiser

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FileBlobs(Blobs):
    def __init__(self, path: Path, size: int, direct: Direct, sync: bool, collect: bool) -> None:
        if size < 1:
            raise StoreInputError(f"a file store of {size} bytes: give it a size such as 200GiB")
        self.size = size
        self.sync = sync
        self.folder = Folder(path)
        self._direct = direct
        self._pool = BouncePool()
        self._drafts = Drafts(self.folder.drafts)
        self._appraiser = Appraiser(self.open)
        self._described: dict[str, bytes] = {}
        with faults("open the store at", path):
            self.ledger = Ledger(self.folder.ledger, self.recount, self.folder.mend)
        if direct is Direct.ON and not can_read_directly(str(self.folder.ledger)):
            self.ledger.close()
            raise StoreInputError(f"direct=on: the file system of {path} has no direct reads; use direct=auto")
        if collect:
            with faults("open the store at", path), self.ledger.open() as books:
                books.nbytes -= self._drafts.remove_dead().nbytes

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        with faults("look up objects"):
            return [self.folder.has(name) for name in names]

    def open(self, name: ObjectName) -> Blob:
        path = self.folder.path(name)
        with faults("open", path):
            try:
                return FileBlob(path, os.open(path, _READ), self._direct, self._pool)
            except FileNotFoundError:
                raise MissingObject(f"{name}: not in {self.folder.root}") from None

    def draft(self, name: ObjectName, nbytes: int, value: float, position: int) -> Draft | None:
        with faults("begin", name):
            if self.folder.has(name):
                return None
            gone: list[tuple[ObjectName, Blob]] = []
            draft = None
            try:
                with self.ledger.open() as books:
                    if nbytes <= self.size and books.nbytes + nbytes > self.size:
                        self._evict(books, self.size - nbytes, gone)
                    if books.nbytes + nbytes <= self.size:
                        draft = FileDraft(self, name, self._drafts.new(nbytes), nbytes)
                        books.nbytes += nbytes
                    else:
                        self.dropped += 1
            except OSError:
                if draft is not None:
                    draft.discard()
                raise
            finally:
                self._tell(gone)
            return draft

    def publish(self, name: ObjectName, draft: str) -> bool:
        with self.ledger.open() as books:
            if self.folder.has(name):
                return False
            self.folder.make_parents(name)
            if name.namespace in self._described and not self.folder.describes(name.namespace):
                self._describe(name.namespace)  # it has gone with the directory
            os.rename(draft, self.folder.path(name))
            books.objects += 1
        if self.sync:
            _sync_directories(self.folder.path(name), str(self.folder.objects))
        return True

    def discard(self, draft: str, nbytes: int) -> None:
        if not os.path.lexists(draft):  # it has gone with the directory
            return
        with self.ledger.open() as books:
            os.unlink(draft)
            books.nbytes -= nbytes

    def delete(self, names: Sequence[ObjectName]) -> int:
        with faults("delete objects"), self.ledger.open() as books:
            return sum(self._remove(books, name) for name in names)

    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        with faults("list objects"):
            for found in self.folder.survey(namespace, group):
                yield Stored(found.name, found.nbytes, found.used_at, None, None)

    def touch(self, names: Sequence[ObjectName]) -> None:
        with faults("touch objects"):
            now = time.time_ns()
            for name in names:
                with suppress(FileNotFoundError):
                    os.utime(self.folder.path(name), ns=(now, now))

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        self._described[namespace] = encode_description(info)
        with faults("describe", namespace), self.ledger.open():
            self._describe(namespace)

    def descriptions(self) -> dict[str, dict[str, str]]:
        with faults("read descriptions"):
            return read_descriptions(self.folder.about)

    def usage(self) -> Usage:
        with faults("read the ledger"):
            books = self.ledger.glance()
            if books is None:
                with self.ledger.open() as books:
                    pass
        return Usage(books.objects, books.nbytes)

    def collect(self) -> Leftovers:
        with faults("collect leftovers"), self.ledger.open() as books:
            found = self._drafts.remove_dead()
            self.folder.remove_empty()
            counted = self.recount()
            books.objects, books.nbytes = counted.objects, counted.nbytes
        return found

    def shrink(self, nbytes: int) -> int:
        gone: list[tuple[ObjectName, Blob]] = []
        try:
            with faults("evict objects"), self.ledger.open() as books:
                return self._evict(books, nbytes, gone, slack=False)
        finally:
            self._tell(gone)

    def close(self) -> None:
        self.ledger.close()

    def recount(self) -> Books:
        """By what lies there; exact only while the ledger is open."""
        sizes = [found.nbytes for found in self.folder.survey()]
        return Books(len(sizes), sum(sizes) + self._drafts.nbytes())

    def _describe(self, namespace: str) -> None:
        draft = self._drafts.new(0)
        try:
            write_all(draft.fd, 0, [memoryview(self._described[namespace])])
            os.rename(draft.path, self.folder.description(namespace))
        finally:
            os.close(draft.fd)

    def _evict(self, books: Books, goal: int, gone: list[tuple[ObjectName, Blob]], slack: bool = True) -> int:
        """Get down to `goal` bytes. Others may have been at work: what there is is counted first.

        Returns how many went; where someone listens, `gone` gets them, open.
        """
        found = list(self.folder.survey())
        books.objects = len(found)
        books.nbytes = sum(one.nbytes for one in found) + self._drafts.nbytes()
        excess = books.nbytes - goal
        if slack:
            excess = with_slack(excess, self.size, is_told=self.on_evict is not None)
        count = 0
        for one in chosen(ranked(self._appraiser.candidates(found, excess), time.time()), excess):
            if self.on_evict is not None:
                with suppress(MissingObject, StoreFault):
                    gone.append((one.name, self.open(one.name)))
            count += self._remove(books, one.name)
        self.evicted += count
        return count

    def _remove(self, books: Books, name: ObjectName) -> bool:
        path = self.folder.path(name)
        try:
            nbytes = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return False
        books.objects -= 1
        books.nbytes -= nbytes
        return True

    def _tell(self, gone: list[tuple[ObjectName, Blob]]) -> None:
        """With the ledger closed: who listens may take a while."""
        hook = self.on_evict
        for name, blob in gone:
            if hook is None:
                blob.close()
            else:
                hook(name, blob)


class FileDraft(Draft):
    def __init__(self, blobs: FileBlobs, name: ObjectName, file: DraftFile, nbytes: int) -> None:
        self._blobs = blobs
        self._name = name
        self._file = file
        self._nbytes = nbytes

    def write_at(self, offset: int, buffers: Buffers) -> None:
        with faults("write", self._name):
            write_all(self._file.fd, offset, buffers)

    def publish(self) -> bool:
        with faults("publish", self._name):
            if self._blobs.sync:
                os.fdatasync(self._file.fd)
            first = self._blobs.publish(self._name, self._file.path)
        if first:
            os.close(self._file.fd)
        else:
            self.discard()
        return first

    def discard(self) -> None:
        with suppress(OSError, StoreFault):
            self._blobs.discard(self._file.path, self._nbytes)
        os.close(self._file.fd)


class FileStore(BlobStore):
    """Objects in a directory, at most `size` bytes of them, shared with other processes."""

    def __init__(
        self, path: Path, size: int, direct: Direct = Direct.AUTO, sync: bool = False, collect: bool = True
    ) -> None:
        """`sync`: objects also survive a loss of power. `collect`: remove now what writers that died have left."""
        super().__init__(FileBlobs(path, size, direct, sync, collect))

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether there is one already."""
        return (path / ROOT).is_dir()


def _sync_directories(path: str, top: str) -> None:
    while path != top:
        path = os.path.dirname(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
