"""The directory that the server writes hidden states to: names, space, locks, and removal of files that expired.

    hidden_<32 hex digits>.safetensors         one request's sample; its reader deletes it
    hidden_<32 hex digits>.safetensors.lock    locked (flock) while the sample is written; its reader deletes it

Names are random, and nothing of a request is in them. Files with other names are neither counted nor touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hybridkv.errors import DiskError, HybridKVError, InputError, ReplyError, RequestError
from hybridkv.taps.files import partial_path, write_sample
from hybridkv.taps.tensors import bytes_per_token, encode
from hybridkv.units import format_bytes

DTYPE = "bf16"
"""Type of the tensors in files. Trainers of draft models read it."""
_MODE = 0o600
_HEADER_BYTES = 1024
"""Room for the header of a file; it has about 400 bytes."""
_OURS = re.compile(r"\.?(hidden_[0-9a-f]{32}\.safetensors)")


class NoSpaceError(HybridKVError):
    """Files of other requests fill the directory; the client should retry later."""


class Usage(NamedTuple):
    files: int
    nbytes: int


class _Entry(NamedTuple):
    """A sample with its lock, or what is left of both."""

    nbytes: int
    changed: float
    """When the youngest of its files was written, in seconds since the epoch."""


class HiddenFolder:
    """Makes the directory. Methods that write are called on one thread; `usage` may be called on any."""

    def __init__(self, directory: str | Path, *, max_bytes: int = 10 * 2**30, ttl_s: float = 600.0) -> None:
        """`ttl_s`: seconds after which a file that was not read is removed. Raises InputError."""
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self.directory = Path(directory).resolve(strict=True)
            if not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(None, "it cannot be read and written")
        except OSError as error:
            raise InputError(
                f"cannot write hidden states to {directory}: {error.strerror}; name another directory"
            ) from None
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.num_written = 0
        self.num_expired = 0
        self._reserved: dict[str, int] = {}
        """Bytes by name, of samples that are not written yet."""

    def path(self, name: str) -> Path:
        return self.directory / name

    def reserve(self, name: str, num_tokens: int, num_layers: int, hidden_size: int) -> None:
        """Set space aside. Raises RequestError if there never is enough, and NoSpaceError if there is none now."""
        nbytes = num_tokens * bytes_per_token(DTYPE, num_layers, hidden_size) + _HEADER_BYTES
        if nbytes > self.max_bytes:
            raise RequestError(
                f"hidden states of {num_tokens} tokens and {num_layers} layers are {format_bytes(nbytes)}: "
                f"--hidden-states-size allows {format_bytes(self.max_bytes)}; shorten the prompt, ask for fewer "
                "layers, or set hidden_states to false",
                "hidden_states",
            )
        if self._free_bytes() < nbytes:
            self.sweep()
        if self._free_bytes() < nbytes:
            raise NoSpaceError(
                f"hidden states of {format_bytes(nbytes)}: others that were not read yet fill the "
                f"{format_bytes(self.max_bytes)} of --hidden-states-size; read and delete them, or try again"
            )
        self._reserved[name] = nbytes

    def write(self, name: str, rows: Tensor, token_ids: Tensor) -> Path:
        """Write a sample for which space is reserved. The lock stays when this returns, and is free.

        rows: [tokens, layers, hidden], token_ids: [tokens]. Raises DiskError, and ReplyError for rows of no use.
        """
        path = self.path(name)
        try:
            lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise DiskError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_sample(path, 0, encode(rows, token_ids, DTYPE), mode=_MODE)
        except InputError as error:
            raise ReplyError(str(error)) from error
        finally:
            os.close(lock)
        del self._reserved[name]
        self.num_written += 1
        return path

    def discard(self, name: str) -> None:
        """Remove a sample, or give back the space that is reserved for it."""
        self._reserved.pop(name, None)
        self._remove(name)

    def sweep(self) -> None:
        """Remove what has not been read in time."""
        oldest = time.time() - self.ttl_s
        for name, entry in self._entries().items():
            if entry.changed < oldest and name not in self._reserved:
                self.num_expired += self._remove(name)

    def usage(self) -> Usage:
        """What lies there, with what other servers wrote. Raises DiskError."""
        entries = self._entries().values()
        return Usage(len(entries), sum(entry.nbytes for entry in entries))

    def _free_bytes(self) -> int:
        lying = sum(entry.nbytes for name, entry in self._entries().items() if name not in self._reserved)
        return self.max_bytes - lying - sum(self._reserved.values())

    def _entries(self) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        for name, status in self._statuses():
            before = found.get(name, _Entry(0, 0.0))
            found[name] = _Entry(before.nbytes + status.st_size, max(before.changed, status.st_mtime))
        return found

    def _statuses(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yields the name of the sample and the status of each file that belongs to a sample."""
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    match = _OURS.match(entry.name)
                    if match is not None and self.path(entry.name) in self._paths(match[1]):
                        with suppress(FileNotFoundError):  # its reader was faster
                            yield match[1], entry.stat(follow_symlinks=False)
        except OSError as error:
            raise DiskError(f"cannot read {self.directory}: {error.strerror}") from error

    def _remove(self, name: str) -> bool:
        """Whether it is gone. The next sweep tries again if not."""
        with suppress(OSError):
            for path in self._paths(name):
                path.unlink(missing_ok=True)
            return True
        return False

    def _paths(self, name: str) -> tuple[Path, Path, Path]:
        """The lock comes last: it is never removed before its sample."""
        path = self.path(name)
        return partial_path(path), path, _lock_path(path)


def new_name() -> str:
    """A name that others cannot guess."""
    return f"hidden_{secrets.token_hex(16)}.safetensors"


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
