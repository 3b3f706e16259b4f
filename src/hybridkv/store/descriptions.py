"""Human-readable descriptions of namespaces, as small JSON texts. Their content is untrusted."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hybridkv.errors import StoreInputError
from hybridkv.files import FileError, parse_json

MOST_BYTES = 1 << 16
_MOST_LETTERS = 256


def encode_description(info: Mapping[str, str]) -> bytes:
    raw = json.dumps(dict(info), indent=1).encode()
    if len(raw) > MOST_BYTES:
        raise StoreInputError(f"a description of {len(raw):,} bytes: at most {MOST_BYTES:,} are kept")
    return raw


def decode_description(raw: bytes) -> dict[str, str] | None:
    """None if `raw` is not a JSON object. Keys and values that are not short printable strings are left out."""
    try:
        info = parse_json(raw) if len(raw) <= MOST_BYTES else None
    except FileError:
        return None
    if not isinstance(info, dict):
        return None
    return {key: value for key, value in info.items() if _is_plain(key) and _is_plain(value)}


def _is_plain(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _MOST_LETTERS and text.isprintable()
