"""What people call namespaces: small files of JSON, whose content anyone may have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hybridkv.store.errors import StoreError
from hybridkv.store.names import is_namespace

_MOST_BYTES = 1 << 16


def encode_description(info: Mapping[str, str]) -> bytes:
    raw = json.dumps(dict(info), indent=1).encode()
    if len(raw) > _MOST_BYTES:
        raise StoreError(f"a description of {len(raw):,} bytes: at most {_MOST_BYTES:,} are kept")
    return raw


def decode_description(raw: bytes) -> dict[str, str] | None:
    """None for anything that is no description."""
    try:
        info = json.loads(raw) if len(raw) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(info, dict):
        return None
    return {key: value for key, value in info.items() if isinstance(value, str)}


def read_descriptions(directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json" and is_namespace(path.stem):
            with path.open("rb") as file:
                info = decode_description(file.read(_MOST_BYTES + 1))
            if info is not None:
                found[path.stem] = info
    return found
