"""`manifest.json`: what a folder of hidden states holds, and what it was computed from.

It is written once, before the first sample, and never changes: a run that resumes must ask for the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridkv.errors import InputError
from hybridkv.files import FileError, read_json

FORMAT = "hybridkv-taps"
VERSION = 1
NAME = "manifest.json"
DTYPES = ("bf16", "fp32", "fp8")
"""How hidden states are stored. fp8: e4m3, with one scale for each token and layer."""

_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "model_digest": str,
    "input_digest": str,
    "layers": list,
    "dtype": str,
    "hidden_size": int,
    "num_samples": int,
    "max_tokens": (int, type(None)),
}
_MEANINGS = {
    "model_digest": "the digest of the model",
    "input_digest": "the digest of the input",
    "layers": "--layers",
    "dtype": "--dtype",
    "hidden_size": "the hidden size",
    "num_samples": "the number of samples",
    "max_tokens": "--max-tokens",
}
"""Fields that a run which resumes must have in common with the folder. The model may have another name."""


@dataclass(frozen=True, slots=True)
class Manifest:
    model: str
    model_digest: str
    """Digest of the weights and the configuration."""
    input_digest: str
    """Digest of the prompts."""
    layers: tuple[int | str, ...]
    """In the order of the tensors' second axis. i: what enters decoder layer i; "final": after the final norm."""
    dtype: str
    """One of `DTYPES`."""
    hidden_size: int
    num_samples: int
    """Samples of the whole input. A run that was interrupted has written fewer."""
    max_tokens: int | None
    """Prompts were cut to so many tokens."""

    def as_json(self) -> str:
        about = {"format": FORMAT, "version": VERSION, **asdict(self), "layers": list(self.layers)}
        return json.dumps(about, indent=2) + "\n"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a folder; None if there is none. Raises InputError if it cannot be used."""
    path = directory / NAME
    try:
        raw = read_json(path)
    except FileError as error:
        if error.is_missing:
            return None
        raise InputError(f"cannot read {path}: {error}; name another folder, or extract again") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise InputError(f"{path} is no manifest of hidden states: name another folder")
    if raw.get("version") != VERSION:
        raise InputError(f"{path} has format version {raw.get('version')!r}: this hybridkv reads version {VERSION}")
    for name, kind in _REQUIRED.items():
        if name not in raw or not isinstance(raw[name], kind) or isinstance(raw[name], bool):
            raise InputError(f"{path}: {name} is {raw.get(name)!r}; the manifest is damaged, extract again")
    if raw["dtype"] not in DTYPES:
        raise InputError(f"{path}: dtype {raw['dtype']!r} is none of {', '.join(DTYPES)}")
    fields = {name: raw[name] for name in _REQUIRED}
    return Manifest(**{**fields, "layers": tuple(raw["layers"])})


def check_same(directory: Path, found: Manifest, wanted: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder that holds something else. `wanted`: values by the names of fields."""
    for name, value in wanted.items():
        there = getattr(found, name)
        if name in _MEANINGS and there != value:
            raise InputError(
                f"{directory} was begun with another value of {_MEANINGS[name]}: {_text(there)} instead of "
                f"{_text(value)}; ask for the same again, or name another --out"
            )


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
