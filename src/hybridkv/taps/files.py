"""Files of samples: safetensors with a checksum for each sample in their metadata.

A file has one sample, or many (a shard). In a shard the names of tensors begin with the sample's index: `17.token_ids`.
The checksum of a sample is the same in both. Files are written under another name and renamed when they are on the
disk: under its own name a file is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_128

from hybridkv.errors import DiskError, InputError
from hybridkv.files import FileError, open_file, parse_json
from hybridkv.store.file.io import write_all

_CHECKSUMS = "hybridkv_checksums"
_PARTIAL = ".partial"
_CODES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
"""Names of dtypes in safetensors."""

_open: Any = safe_open  # its methods have no types
Sample = dict[str, Tensor]


class Stored(NamedTuple):
    """A sample as it lies in a file."""

    tensors: Sample
    checksum: str


def checksum(index: int, tensors: Mapping[str, Tensor]) -> str:
    """Checksum of a sample: covers its index, and the names, types, shapes and bytes of its tensors."""
    digest = xxh3_128(f"sample {index}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def write_sample(path: Path, index: int, tensors: Sample, *, mode: int = 0o666) -> int:
    """Write a file of one sample, as `write_samples` does."""
    return write_samples(path, {index: Stored(tensors, checksum(index, tensors))}, is_shard=False, mode=mode)


def write_samples(path: Path, samples: Mapping[int, Stored], *, is_shard: bool, mode: int = 0o666) -> int:
    """Write one file and rename it into place. Returns its size. Raises DiskError; then no file is left behind."""
    tensors = {
        f"{index}.{name}" if is_shard else name: tensor
        for index, stored in samples.items()
        for name, tensor in stored.tensors.items()
    }
    checksums = {str(index): stored.checksum for index, stored in samples.items()}
    # The largest elements first: then each tensor begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = _header(ordered, {"format": "pt", _CHECKSUMS: json.dumps(checksums)})
    return write_atomically(path, [memoryview(header), *(_bytes_of(tensor) for _, tensor in ordered)], mode)


def write_atomically(path: Path, buffers: list[memoryview], mode: int = 0o666) -> int:
    """The file is on the disk before it gets its name: after a power cut, too, it is complete or not there."""
    partial = partial_path(path)
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            write_all(fd, 0, buffers)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(partial, path)
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            os.unlink(partial)
    return sum(map(len, buffers))


def partial_path(path: Path) -> Path:
    """The name of a file while it is written."""
    return path.with_name(f".{path.name}{_PARTIAL}")


def is_partial(name: str) -> bool:
    """Whether a file of this name is what a killed process left behind."""
    return name.startswith(".") and name.endswith(_PARTIAL)


def sample_indices(path: Path) -> list[int]:
    """Indices of the samples in a file. Reads its header alone; raises InputError if the file is cut off."""
    with _opened(path) as file:
        return list(_checksums(path, file.metadata()))


def read_sample(path: Path, index: int, *, is_shard: bool) -> Stored:
    """Read one sample and compare it with its checksum. Raises InputError that names the file."""
    prefix = f"{index}." if is_shard else ""
    with _opened(path) as file:
        stated = _checksums(path, file.metadata()).get(index)
        if stated is None:
            raise InputError(f"{path} has no sample {index}; remove the file and extract again")
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - it is no dictionary
        tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    if checksum(index, tensors) != stated:
        raise InputError(f"{path}: sample {index} is not what was written; remove the file and extract again")
    return Stored(tensors, stated)


class _opened:  # noqa: N801 - used as a verb
    """`with _opened(path) as file:` raises InputError, which names the file, if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        try:
            with open_file(self._path) as file:  # the library would open a path again, and wait on a FIFO
                self._file = _open(f"/proc/self/fd/{file.fileno()}", "pt")
        except (FileError, OSError, SafetensorError) as error:
            raise self._refusal(error) from None
        return self._file.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.__exit__(None, None, None)
        if isinstance(error, (OSError, SafetensorError)):
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> InputError:
        return InputError(f"cannot read {self._path}: {error}; remove it and extract again")


def _checksums(path: Path, metadata: dict[str, str] | None) -> dict[int, str]:
    try:
        found = {int(index): str(value) for index, value in parse_json((metadata or {})[_CHECKSUMS]).items()}
    except (KeyError, ValueError, AttributeError):
        raise InputError(f"{path} has no checksums: it is no file of hidden states that hybridkv wrote") from None
    return found


def _header(tensors: list[tuple[str, Tensor]], metadata: dict[str, str]) -> bytes:
    """8 bytes of length, then JSON, padded so that the data begins at a multiple of 8."""
    about: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors:
        about[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
