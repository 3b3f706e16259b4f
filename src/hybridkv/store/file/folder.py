"""Directory layout of a file store. Everything is below one directory of its own:

    hybridkv-v1/ledger                          numbers of objects and bytes
                objects/<namespace>/<group>/<two digits of the key>/<key>
                drafts/                         objects being written, each locked by its writer
                about/<namespace>.json          description of a namespace

Files with other names are never touched. `ledger` is the usage file, `drafts` has the pending files: existing
directories use these names.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from hybridkv.errors import StoreFault, StoreInputError, is_disk_failure
from hybridkv.files import kind_of
from hybridkv.store.names import ObjectName, is_group, is_key, is_namespace

ROOT = "hybridkv-v1"
_PRIVATE = 0o700
"""Mode of directories: prompts can be reconstructed from cached KV, so only the owner may read it."""


class Found(NamedTuple):
    namespace: str
    group: str
    key: str
    nbytes: int
    used_at: float

    @property
    def name(self) -> ObjectName:
        return ObjectName(self.namespace, self.group, self.key)


class Folder:
    def __init__(self, path: Path) -> None:
        self.root = path / ROOT
        self.usage_file = self.root / "ledger"
        self.objects = self.root / "objects"
        self.pending = self.root / "drafts"
        self.about = self.root / "about"
        self._objects = str(self.objects)
        try:
            self._make()
        except (FileExistsError, NotADirectoryError) as error:
            place = _existing(Path(error.filename))
            raise StoreInputError(
                f"{place} is a {kind_of(place)}: a store needs a directory there; remove it, or name another place"
            ) from None
        except OSError as error:
            kind = StoreFault if is_disk_failure(error) else StoreInputError
            raise kind(
                f"no store can be made at {path}: {error.strerror}; name a directory that can be written to"
            ) from None
        if not os.access(self.pending, os.W_OK | os.X_OK):
            raise StoreInputError(
                f"{self.pending} cannot be written to: name another directory or change its permissions"
            )
        self._device = os.stat(self.root).st_dev

    def mend(self) -> None:
        """Make missing directories again, but never on another disk.

        If the store's disk was unmounted, the disk below the mount point must not be filled in its place.
        """
        if not self.root.is_dir() and _device(self.root) != self._device:
            raise StoreFault(f"{self.root} has gone, and so has its disk")
        self._make()

    def _make(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.root, self.objects, self.pending, self.about):
            directory.mkdir(mode=_PRIVATE, exist_ok=True)

    def path(self, name: ObjectName) -> str:
        return f"{self._objects}/{name.path}"

    def has(self, name: ObjectName) -> bool:
        try:
            return S_ISREG(os.lstat(self.path(name)).st_mode)
        except FileNotFoundError:
            return False

    def make_parents(self, name: ObjectName) -> None:
        """Make the directories between `objects` and the object. Those above are made only by `mend`."""
        path = self._objects
        for part in name.path.split("/")[:-1]:
            path = f"{path}/{part}"
            with suppress(FileExistsError):
                os.mkdir(path, _PRIVATE)

    def description(self, namespace: str) -> str:
        return f"{self.about}/{namespace}.json"

    def describes(self, namespace: str) -> bool:
        return os.path.lexists(self.description(namespace))

    def survey(self, namespace: str | None = None, group: str | None = None) -> Iterator[Found]:
        """List objects from directory entries alone. Objects added or removed meanwhile may be left out."""
        for space in [namespace] if namespace else sorted(filter(is_namespace, _names(self._objects))):
            above = f"{self._objects}/{space}"
            for kind in [group] if group else sorted(filter(is_group, _names(above))):
                for digits in _names(f"{above}/{kind}"):
                    yield from _files(f"{above}/{kind}/{digits}", space, kind)

    def remove_empty(self) -> None:
        """Remove empty directories."""
        for directory, _, _ in os.walk(self._objects, topdown=False):
            if directory != self._objects:
                with suppress(OSError):
                    os.rmdir(directory)


def _device(path: Path) -> int:
    """Device number of the disk that `path` would be made on."""
    for place in path.parents:
        with suppress(FileNotFoundError):
            return os.stat(place).st_dev
    raise StoreFault(f"nothing is left above {path}")


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


@contextmanager
def _unless_foreign() -> Iterator[None]:
    """Pass over a directory that has gone, or that never was one: a file or a link in a circle, which is not ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise


def _names(directory: str) -> list[str]:
    with _unless_foreign():
        return os.listdir(directory)
    return []


def _files(directory: str, namespace: str, group: str) -> Iterator[Found]:
    with _unless_foreign(), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if is_key(entry.name) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    yield Found(namespace, group, entry.name, stat.st_size, stat.st_mtime)
