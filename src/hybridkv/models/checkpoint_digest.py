"""Digest of a checkpoint's files: equal for equal weights and configuration, however the weights are cut into files.

Engines with weights of different forms in memory get the same digest from the same directory, and can share a store.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from hybridkv.errors import ConfigError
from hybridkv.files import FileError, open_file, parse_json
from hybridkv.models.reader import read_config_file

NOT_THE_MODEL = ("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype")
"""Configuration fields that do not affect the computation. The dtype that weights are computed in is given apart."""
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth")


def checkpoint_digest(directory: Path, *computed: str) -> str:
    """A digest of all weights and of config.json. Reads every file of weights once.

    `computed`: how the weights are computed with, such as their dtype.
    """
    digest = xxh3_128()
    config = _read_config(directory / "config.json")
    digest.update(json.dumps([config, *computed], sort_keys=True).encode())
    tensors = sorted(one for file in sorted(directory.glob("*.safetensors")) for one in _tensors(file))
    for name, about, part in tensors:
        digest.update(f"{name} {about}".encode() + part)
    if not tensors:
        digest.update(directory_digest(directory).encode())
    return digest.hexdigest()


def directory_digest(directory: Path, *others: str) -> str:
    """A digest of all files of weights in a directory. `others`: patterns of more files that belong to it."""
    digest = xxh3_128()
    files = sorted(file for pattern in ("*.safetensors", *_OTHER_WEIGHTS, *others) for file in directory.glob(pattern))
    if not files:
        raise ConfigError(f"{directory} has no weights: name a directory that a model was saved to")
    for file in files:
        digest.update(file.name.encode() + _digest_of(file))
    return digest.hexdigest()


def adapter_digest(directory: Path) -> str:
    """A digest of the files of an adapter, its configuration included."""
    return directory_digest(directory, "adapter_config.json")


def _read_config(path: Path) -> dict[str, Any]:
    return {name: value for name, value in read_config_file(path).items() if name not in NOT_THE_MODEL}


def _tensors(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, type with shape, and digest of each tensor in a safetensors file."""
    try:
        with open_file(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            size = int.from_bytes(mapped[:8], "little")
            if size > min(_MOST_HEADER_BYTES, len(mapped) - 8):
                raise ValueError(f"its header would have {size:,} bytes")
            header = parse_json(mapped[8 : 8 + size])
            header.pop("__metadata__", None)
            for name, about in header.items():
                first, last = about["data_offsets"]
                if not 0 <= first <= last <= len(mapped) - 8 - size:
                    raise ValueError(f"no bytes {first} to {last} for {name}")
                with memoryview(mapped) as view, view[8 + size + first : 8 + size + last] as data:
                    yield name, f"{about['dtype']} {about['shape']}", xxh3_128(data).digest()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} is cut off or damaged ({error}); get it again") from None


def _digest_of(file: Path) -> bytes:
    digest = xxh3_128()
    try:
        with open_file(file) as opened:
            while part := opened.read(1 << 24):
                digest.update(part)
    except FileError as error:
        raise ConfigError(f"cannot read {file}: {error}; get it again") from None
    return digest.digest()
