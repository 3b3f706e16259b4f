"""Published models by name: the part of their configs that tells what they keep and compute, kept in catalogue.json.

A name is the repository's, lower-cased, without owner and without what sets variants of one architecture apart. An
entry is *verified* when a transformers config class says the same (a test compares them); all others are our own record
and are marked as unverified wherever they show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

# What publishers append to the name of one and the same architecture.
_VARIANTS = ("-instruct", "-base", "-base-8k", "-it", "-pt", "-thinking", "-chat", "-hf", "-fp8", "-bf16")
# What some put before it.
_OWNERS = ("meta-", "ai21-", "nvidia-")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    config: Mapping[str, Any]
    verified_by: str | None
    """The transformers config class whose defaults are this model, if there is one."""

    @property
    def source(self) -> str:
        if self.verified_by is None:
            return "catalogue, unverified: no config in the transformers source to check it against"
        return f"catalogue, checked against {self.verified_by} of transformers"


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """All entries by name."""
    text = files("hybridkv.models").joinpath("catalogue.json").read_text(encoding="utf-8")
    return {
        name: CatalogueEntry(name, entry["config"], entry.get("verified_by"))
        for name, entry in sorted(json.loads(text).items())
    }


def find(name: str) -> CatalogueEntry | None:
    """The entry for `name`, in any case, with or without owner and the usual suffixes."""
    wanted = name.lower().rstrip("/").rsplit("/", 1)[-1]
    entries = catalogue()
    while wanted not in entries:
        shorter = wanted
        for prefix in _OWNERS:
            shorter = shorter.removeprefix(prefix)
        for suffix in _VARIANTS:
            shorter = shorter.removesuffix(suffix)
        if shorter == wanted:
            return None
        wanted = shorter
    return entries[wanted]


def similar(name: str) -> list[str]:
    """Up to three names close to `name`."""
    return get_close_matches(name.lower().rsplit("/", 1)[-1], catalogue(), n=3, cutoff=0.5)
