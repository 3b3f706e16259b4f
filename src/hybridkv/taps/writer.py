"""Writes samples to a folder, on threads of its own, and packs them into shards if asked to.

A sample is always written to a file of its own first. A shard is made of such files once there are enough of them, and
they are removed when the shard is on the disk. So a process that is killed loses no sample that it had written, with
shards or without.
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import Lock
from types import TracebackType

from torch import Tensor

from hybridkv.errors import DiskError
from hybridkv.taps.files import read_sample, write_sample, write_samples
from hybridkv.taps.folder import Place, TapFolder
from hybridkv.taps.manifest import Manifest
from hybridkv.taps.tensors import encode
from hybridkv.workers import Workers

_THREADS = 2
"""One encodes while the other waits for the disk."""
_PATIENCE_S = 600.0
_MOST_IN_A_SHARD = 10_000
"""The header of a safetensors file has a limit."""


class TapWriter:
    """Use it in a `with` block: all that was submitted is written at its end."""

    def __init__(self, folder: TapFolder, manifest: Manifest, *, shard_bytes: int | None = None) -> None:
        """`folder` is locked, and has this manifest. `shard_bytes`: pack samples into shards of about this size."""
        self._folder = folder
        self._dtype = manifest.dtype
        self._packer = _Packer(folder, shard_bytes) if shard_bytes is not None else None
        self._workers = Workers(_THREADS, "taps")

    def submit(self, index: int, rows: Tensor, token_ids: Tensor) -> Future[int]:
        """Write one sample; the future has the size of its file. Never waits: the caller bounds what is in flight.

        rows: [tokens, layers, hidden], token_ids: [tokens]. The future raises InputError for rows that are no sample,
        and DiskError if the disk is full.
        """
        return self._workers.submit(lambda: self._write(index, rows, token_ids))

    def close(self, *, pack: bool = True) -> None:
        """Write all that was submitted. `pack`: also make a shard of what is left; else the next run does."""
        if not self._workers.close(_PATIENCE_S):
            raise DiskError(f"{self._folder.directory} takes no bytes any more: see to its disk")
        if self._packer is not None and pack:
            self._packer.pack_rest()
        self._folder.sync()

    def _write(self, index: int, rows: Tensor, token_ids: Tensor) -> int:
        tensors = encode(rows, token_ids, self._dtype)
        nbytes = write_sample(self._folder.sample_path(index), index, tensors)
        if self._packer is not None:
            self._packer.add(index, nbytes)
        return nbytes

    def __enter__(self) -> TapWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(pack=kind is None)


class _Packer:
    """Packs files of one sample into shards. May be used on any thread."""

    def __init__(self, folder: TapFolder, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._lock = Lock()
        self._next_shard = folder.next_shard()
        self._waiting = {index: _size(place) for index, place in folder.places().items() if not place.is_shard}
        self._waiting_bytes = sum(self._waiting.values())
        folder.shards.mkdir(exist_ok=True)

    def add(self, index: int, nbytes: int) -> None:
        """Pack a shard if there is enough for one with this sample."""
        with self._lock:
            self._waiting[index] = nbytes
            self._waiting_bytes += nbytes
            is_enough = self._waiting_bytes >= self._shard_bytes or len(self._waiting) >= _MOST_IN_A_SHARD
            chosen = self._take() if is_enough else []
        self._pack(chosen)

    def pack_rest(self) -> None:
        """Pack all that wait, into as many shards as it takes."""
        while True:
            with self._lock:
                chosen = self._take()
            if not chosen:
                return
            self._pack(chosen)

    def _take(self) -> list[int]:
        """The samples of the next shard. Call with the lock held."""
        chosen: list[int] = []
        nbytes = 0
        for index, size in self._waiting.items():
            if chosen and (nbytes + size > self._shard_bytes or len(chosen) == _MOST_IN_A_SHARD):
                break
            chosen.append(index)
            nbytes += size
        for index in chosen:
            del self._waiting[index]
        self._waiting_bytes -= nbytes
        return chosen

    def _pack(self, indices: list[int]) -> None:
        """Tensors are mapped from their files, not read into memory."""
        if not indices:
            return
        with self._lock:
            number, self._next_shard = self._next_shard, self._next_shard + 1
        paths = {index: self._folder.sample_path(index) for index in sorted(indices)}
        samples = {index: read_sample(path, index, is_shard=False) for index, path in paths.items()}
        write_samples(self._folder.shard_path(number), samples, is_shard=True)
        self._folder.sync()  # the shard has its name before the samples lose theirs
        for path in paths.values():
            path.unlink()


def _size(place: Place) -> int:
    return place.path.stat().st_size
