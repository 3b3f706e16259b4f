"""A folder of hidden states.

    manifest.json                           what it holds; written first
    hidden_states/hs_<index>.safetensors    one sample each, as speculators reads them
    shards/shard_<number>.safetensors       many samples each, if shards were asked for
    .lock                                   locked by the process that writes

Files with other names are never touched.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hybridkv.errors import DiskError, InputError, is_disk_failure
from hybridkv.taps.files import is_partial, sample_indices, write_atomically
from hybridkv.taps.manifest import NAME, Manifest, read_manifest

_SAMPLE = re.compile(r"hs_(\d+)\.safetensors")
_SHARD = re.compile(r"shard_(\d+)\.safetensors")


class Place(NamedTuple):
    """Where a sample lies."""

    path: Path
    is_shard: bool


class TapFolder:
    """The paths of a folder, and the samples in it. Used in a `with` block, it is locked against other writers."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.samples = self.directory / "hidden_states"
        self.shards = self.directory / "shards"
        self._lock = -1

    def sample_path(self, index: int) -> Path:
        return self.samples / f"hs_{index}.safetensors"

    def shard_path(self, number: int) -> Path:
        return self.shards / f"shard_{number:05}.safetensors"

    def manifest(self) -> Manifest | None:
        return read_manifest(self.directory)

    def write_manifest(self, manifest: Manifest) -> None:
        write_atomically(self.directory / NAME, [memoryview(manifest.as_json().encode())])
        self.sync()

    def places(self) -> dict[int, Place]:
        """Where each sample lies. One that was packed, and whose own file was not removed yet, is in its shard."""
        found = {int(match[1]): Place(path, False) for path, match in _matching(self.samples, _SAMPLE)}
        for path, _ in sorted(_matching(self.shards, _SHARD)):
            found.update(dict.fromkeys(sample_indices(path), Place(path, True)))
        return found

    def next_shard(self) -> int:
        return max((int(match[1]) for _, match in _matching(self.shards, _SHARD)), default=-1) + 1

    def recover(self) -> dict[int, Place]:
        """Remove what a killed process left behind, and files that are cut off. Returns the samples that are there."""
        for directory in (self.directory, self.samples, self.shards):
            for path in directory.glob(".*") if directory.is_dir() else ():
                if is_partial(path.name):
                    _remove(path)
        places = self.places()
        for path, match in _matching(self.samples, _SAMPLE):
            index = int(match[1])
            if places[index].is_shard:
                _remove(path)  # it was packed
            elif not _is_whole(path):
                _remove(path)
                del places[index]
        return places

    def sync(self) -> None:
        """Names of files that were renamed or removed are on the disk afterwards."""
        for directory in filter(Path.is_dir, (self.directory, self.samples, self.shards)):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                raise DiskError(f"cannot write {directory}: {error.strerror}") from error
            finally:
                os.close(fd)

    def __enter__(self) -> TapFolder:
        """Make the folder, and lock it. Raises InputError if it cannot be made, or another process writes to it."""
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            kind = DiskError if is_disk_failure(error) else InputError
            way_out = "name a folder that can be written to"
            raise kind(f"cannot make {self.directory}: {error.strerror}; {way_out}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(f"{self.directory} is being written by another process: wait for it to end") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._lock)


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"cannot read {directory}: {error.strerror}; name another folder, or extract again") from None
    return [(directory / name, match) for name in names if (match := pattern.fullmatch(name))]


def _is_whole(path: Path) -> bool:
    """Whether a file has a sample. Raises InputError if it is no file: hybridkv has not put it there, and leaves it."""
    try:
        return len(sample_indices(path)) == 1
    except InputError:
        if not path.is_file():
            raise
        return False


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise InputError(f"cannot remove {path}: {error.strerror}; remove it, and run the command again") from None
