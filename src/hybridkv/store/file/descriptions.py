"""Descriptions of namespaces in a directory of small files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from stat import S_ISREG

from hybridkv.store.descriptions import MOST_BYTES, decode_description
from hybridkv.store.names import is_namespace

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_descriptions(directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json" and is_namespace(path.stem):
            info = decode_description(_read(path))
            if info is not None:
                found[path.stem] = info
    return found


def _read(path: Path) -> bytes:
    """Content of a regular file; empty for anything else."""
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return b""
        raise
    try:
        return os.read(fd, MOST_BYTES + 1) if S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
