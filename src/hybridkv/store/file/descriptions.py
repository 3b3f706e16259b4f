"""Human-readable descriptions of namespaces, in small JSON files. Their content is untrusted."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG

from hybridkv.errors import StoreInputError
from hybridkv.store.names import is_namespace

_MOST_BYTES = 1 << 16
_MOST_LETTERS = 256
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def encode_description(info: Mapping[str, str]) -> bytes:
    raw = json.dumps(dict(info), indent=1).encode()
    if len(raw) > _MOST_BYTES:
        raise StoreInputError(f"a description of {len(raw):,} bytes: at most {_MOST_BYTES:,} are kept")
    return raw


def decode_description(raw: bytes) -> dict[str, str] | None:
    """None if `raw` is not a JSON object. Keys and values that are not short printable strings are left out."""
    try:
        info = json.loads(raw) if len(raw) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(info, dict):
        return None
    return {key: value for key, value in info.items() if _is_plain(key) and _is_plain(value)}


def read_descriptions(directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json" and is_namespace(path.stem):
            info = decode_description(_read(path))
            if info is not None:
                found[path.stem] = info
    return found


def _is_plain(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _MOST_LETTERS and text.isprintable()


def _read(path: Path) -> bytes:
    """Content of a regular file; empty for anything else."""
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return b""
        raise
    try:
        return os.read(fd, _MOST_BYTES + 1) if S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
