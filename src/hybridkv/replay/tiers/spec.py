"""A tier as users describe it: `200GiB@2GB/s`, or `200GiB@2GB/s,1ms` with a latency."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hybridkv.errors import InputError
from hybridkv.units import parse_size

HOW_TO_WRITE = "write it as SIZE@BANDWIDTH or SIZE@BANDWIDTH,LATENCY, such as 200GiB@2GB/s or 200GiB@2GB/s,1ms"
LOAD_RULES = ("all", "faster")
_LATENCY = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>us|ms|s)\s*", re.IGNORECASE)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One store below the memory, of all ranks together."""

    size_bytes: int
    bytes_per_s: float
    """Read bandwidth, shared by all loads from the tier."""
    latency_s: float = 0.0
    """Time of a load before its first byte."""

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise InputError(f"a tier of {self.size_bytes} bytes: give it a size of at least 0")
        if not 0 < self.bytes_per_s < math.inf:
            raise InputError(f"a tier with {self.bytes_per_s} bytes a second: give it more than 0")
        if not 0 <= self.latency_s < math.inf:
            raise InputError(f"a tier with a latency of {self.latency_s} s: give it at least 0")


def parse_tier(text: str) -> TierSpec:
    """The tier that `text` describes. Sizes are written as for `--memory`."""
    size, has_bandwidth, rest = text.partition("@")
    bandwidth, has_latency, latency = rest.partition(",")
    if not has_bandwidth or not bandwidth.strip():
        raise InputError(f"tier {text!r} has no bandwidth: {HOW_TO_WRITE}")
    amount, per, unit = bandwidth.partition("/")
    if not per or unit.strip().lower() != "s":
        raise InputError(f"tier {text!r}: {bandwidth!r} is not a bandwidth in bytes a second; {HOW_TO_WRITE}")
    try:
        size_bytes, bytes_per_s = parse_size(size), parse_size(amount)
    except InputError as error:
        raise InputError(f"tier {text!r}: {error}; {HOW_TO_WRITE}") from None
    if not bytes_per_s:
        raise InputError(f"tier {text!r} has a bandwidth of 0: nothing could be loaded from it; leave the tier out")
    return TierSpec(size_bytes, bytes_per_s, _parse_latency(text, latency) if has_latency else 0.0)


def _parse_latency(tier: str, text: str) -> float:
    match = _LATENCY.fullmatch(text)
    if match is None:
        raise InputError(f"tier {tier!r}: {text!r} is not a latency such as 1ms, 500us or 0.1s; {HOW_TO_WRITE}")
    return float(match["number"]) * _UNITS[match["unit"].lower()]


def check_rule(rule: str) -> None:
    """Raise unless `rule` says which loads are begun."""
    if rule not in LOAD_RULES:
        raise InputError(f"tier loads {rule!r}: choose one of {', '.join(LOAD_RULES)}")
