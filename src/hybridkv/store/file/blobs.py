"""Blobs as files. Several processes share one directory and its size limit.

An object is written to a pending file, which is renamed when the object is complete. A killed process leaves at most
pending files; they are removed once their locks are free. An object's age is counted from its file's modification time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hybridkv.errors import MissingObject, StoreFault, StoreInputError
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage
from hybridkv.store.buffers import Buffers
from hybridkv.store.descriptions import encode_description
from hybridkv.store.eviction import chosen, ranked, with_slack
from hybridkv.store.file.descriptions import read_descriptions
from hybridkv.store.file.folder import ROOT, Folder
from hybridkv.store.file.io import BouncePool, Direct, FileBlob, can_read_directly, faults, write_all
from hybridkv.store.file.pending import LockedFile, PendingFiles
from hybridkv.store.file.usage_file import Counts, UsageFile
from hybridkv.store.names import ObjectName
from hybridkv.store.store import Leftovers, Stored
from hybridkv.store.values import ValueReader

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
        self._pending = PendingFiles(self.folder.pending)
        self._values = ValueReader(self.open_all)
        self._described: dict[str, bytes] = {}
        with faults("open the store at", path):
            self.usage_file = UsageFile(self.folder.usage_file, self.recount, self.folder.mend)
        if direct is Direct.ON and not can_read_directly(str(self.folder.usage_file)):
            self.usage_file.close()
            raise StoreInputError(f"direct=on: the file system of {path} has no direct reads; use direct=auto")
        if collect:
            with faults("open the store at", path), self.usage_file.open() as counts:
                counts.nbytes -= self._pending.remove_dead().nbytes

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

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        with faults("begin", name):
            if self.folder.has(name):
                return None
            gone: list[tuple[ObjectName, Blob]] = []
            pending = None
            try:
                with self.usage_file.open() as counts:
                    if nbytes <= self.size and counts.nbytes + nbytes > self.size:
                        self._evict(counts, self.size - nbytes, gone)
                    if counts.nbytes + nbytes <= self.size:
                        pending = PendingFileBlob(self, name, self._pending.new(nbytes), nbytes)
                        counts.nbytes += nbytes
                    else:
                        self.dropped += 1
            except OSError:
                if pending is not None:
                    pending.discard()
                raise
            finally:
                self._tell(gone)
            return pending

    def publish(self, name: ObjectName, pending: str) -> bool:
        with self.usage_file.open() as counts:
            if self.folder.has(name):
                return False
            self.folder.make_parents(name)
            if name.namespace in self._described and not self.folder.describes(name.namespace):
                self._describe(name.namespace)  # the directory was deleted and made again
            os.rename(pending, self.folder.path(name))
            counts.objects += 1
        if self.sync:
            _sync_directories(self.folder.path(name), str(self.folder.objects))
        return True

    def discard(self, pending: str, nbytes: int) -> None:
        if not os.path.lexists(pending):  # the directory was deleted
            return
        with self.usage_file.open() as counts:
            os.unlink(pending)
            counts.nbytes -= nbytes

    def delete(self, names: Sequence[ObjectName]) -> int:
        with faults("delete objects"), self.usage_file.open() as counts:
            return sum(self._remove(counts, name) for name in names)

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
        with faults("describe", namespace), self.usage_file.open():
            self._describe(namespace)

    def descriptions(self) -> dict[str, dict[str, str]]:
        with faults("read descriptions"):
            return read_descriptions(self.folder.about)

    def usage(self) -> Usage:
        with faults("read the usage file"):
            counts = self.usage_file.glance()
            if counts is None:
                with self.usage_file.open() as counts:
                    pass
        return Usage(counts.objects, counts.nbytes)

    def collect(self) -> Leftovers:
        with faults("collect leftovers"), self.usage_file.open() as counts:
            found = self._pending.remove_dead()
            self.folder.remove_empty()
            counted = self.recount()
            counts.objects, counts.nbytes = counted.objects, counted.nbytes
        return found

    def shrink(self, nbytes: int) -> int:
        gone: list[tuple[ObjectName, Blob]] = []
        try:
            with faults("evict objects"), self.usage_file.open() as counts:
                return self._evict(counts, nbytes, gone, slack=False)
        finally:
            self._tell(gone)

    def close(self) -> None:
        self.usage_file.close()

    def recount(self) -> Counts:
        """Count the files themselves. The result is exact only while the usage file is open."""
        sizes = [found.nbytes for found in self.folder.survey()]
        return Counts(len(sizes), sum(sizes) + self._pending.nbytes())

    def _describe(self, namespace: str) -> None:
        pending = self._pending.new(0)
        try:
            write_all(pending.fd, 0, [memoryview(self._described[namespace])])
            os.rename(pending.path, self.folder.description(namespace))
        finally:
            os.close(pending.fd)

    def _evict(self, counts: Counts, goal: int, gone: list[tuple[ObjectName, Blob]], slack: bool = True) -> int:
        """Evict objects until at most `goal` bytes are used. Returns the number of evicted objects.

        The files are counted first, since other processes may have changed the directory. If `on_evict` is set, evicted
        objects are appended to `gone`, opened for reading.
        """
        found = list(self.folder.survey())
        counts.objects = len(found)
        counts.nbytes = sum(one.nbytes for one in found) + self._pending.nbytes()
        excess = counts.nbytes - goal
        if slack:
            excess = with_slack(excess, self.size, is_told=self.on_evict is not None)
        count = 0
        for one in chosen(ranked(self._values.candidates(found, excess), time.time()), excess):
            if self.on_evict is not None:
                with suppress(MissingObject, StoreFault):
                    gone.append((one.name, self.open(one.name)))
            count += self._remove(counts, one.name)
        self.evicted += count
        return count

    def _remove(self, counts: Counts, name: ObjectName) -> bool:
        path = self.folder.path(name)
        try:
            nbytes = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return False
        counts.objects -= 1
        counts.nbytes -= nbytes
        return True

    def _tell(self, gone: list[tuple[ObjectName, Blob]]) -> None:
        """Pass evicted blobs to `on_evict`. Call while the usage file is closed: the hook may be slow."""
        hook = self.on_evict
        for name, blob in gone:
            if hook is None:
                blob.close()
            else:
                hook(name, blob)


class PendingFileBlob(PendingBlob):
    def __init__(self, blobs: FileBlobs, name: ObjectName, file: LockedFile, nbytes: int) -> None:
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
    """Objects in a directory shared with other processes, at most `size` bytes in total."""

    def __init__(
        self, path: Path, size: int, direct: Direct = Direct.AUTO, sync: bool = False, collect: bool = True
    ) -> None:
        """`sync`: objects also survive a power loss. `collect`: remove pending files of dead writers now."""
        super().__init__(FileBlobs(path, size, direct, sync, collect))

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether `path` already has a file store."""
        return (path / ROOT).is_dir()


def _sync_directories(path: str, top: str) -> None:
    while path != top:
        path = os.path.dirname(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
