"""`--sweep`: every combination of the values given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hybridkv.errors import InputError
from hybridkv.renamed import new_flag
from hybridkv.replay import TierSpec
from hybridkv.units import parse_size

KEYS = ("memory", "policy", "tensor-parallel-size", "state-dtype", "block-size", "tier-size", "breakpoints")
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Combination:
    """What a sweep may change."""

    memory: str
    policy: str
    tensor_parallel_size: int
    state_dtype: str | None
    block_size: int
    breakpoints: bool = True
    tier_size: str | None = None
    """Size of the last tier. None: the size that `--tier` gives."""

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)

    def tiers(self, given: Sequence[TierSpec]) -> tuple[TierSpec, ...]:
        """The tiers as given, the last one with the size of the sweep."""
        if self.tier_size is None:
            return tuple(given)
        if not given:
            raise InputError("sweep over tier-size without a tier: add one, such as --tier 200GiB@2GB/s")
        return (*given[:-1], replace(given[-1], size_bytes=parse_size(self.tier_size)))


def combinations(base: Combination, sweeps: Sequence[str]) -> list[Combination]:
    """`base` with each combination of values; the first sweep changes slowest."""
    axes: dict[str, list[Any]] = {}
    for sweep in sweeps:
        key, _, text = sweep.partition("=")
        values = [value.strip() for value in text.split(",") if value.strip()]
        new = new_flag(key, KEYS)
        if new is not None:
            raise InputError(f"sweep {sweep!r}: {key} is now {new}")
        if key not in KEYS or not values:
            raise InputError(f"sweep {sweep!r}: write it as KEY=V1,V2 with a key of {', '.join(KEYS)}")
        if key in axes:
            raise InputError(f"sweep over {key!r} twice: give all its values at once, as {key}=V1,V2")
        axes[key] = [_value(key, value) for value in dict.fromkeys(values)]
    names = [key.replace("-", "_") for key in axes]
    return [replace(base, **dict(zip(names, values, strict=True))) for values in product(*axes.values())]


def _value(key: str, text: str) -> str | int | bool:
    if key == "breakpoints":
        if text not in _SWITCH:
            raise InputError(f"sweep over breakpoints: {text!r} is neither on nor off")
        return _SWITCH[text]
    if key not in ("tensor-parallel-size", "block-size"):
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"sweep over {key}: {text!r} is not a whole number") from None
