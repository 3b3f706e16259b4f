"""Eviction order of a full store.

An object's benefit is the compute it saves per byte times its probability of reuse, which is roughly inversely
proportional to its age. So objects are ranked by age divided by value, in buckets of powers of two; the largest is
evicted first. The value is the mean of the object's group. Within a bucket the deepest objects (largest `position`) are
evicted first: later objects of a prefix are useless without the earlier ones. Spare objects, which only fill idle room,
are evicted before all others.

The value of an object of an unknown format is unknown: only its age counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from hybridkv.store.names import ObjectName

_YOUNGEST_S = 1.0
"""Smaller ages are treated as equal."""

_LARGEST_VALUE = 1e300
"""Clamp on values, which come from untrusted headers: sums of larger ones would overflow."""

MOST_TOLD_BYTES = 64 << 20
"""Evicted bytes that an eviction hook takes at once."""


class Evictable(NamedTuple):
    name: ObjectName
    nbytes: int
    used_at: float
    value: float | None
    """None: not known. The object counts as a mean one of its group; if all of its group are unknown, of all groups."""
    position: int
    is_spare: bool = False


def ranked(candidates: Sequence[Evictable], now: float) -> list[Evictable]:
    """Sort candidates in eviction order, first to evict first."""
    means, overall = _mean_values(candidates)

    def key(one: Evictable) -> tuple[bool, int, int, float, float]:
        mean = means.get((one.name.namespace, one.name.group), overall)
        age = max(now - one.used_at, _YOUNGEST_S)
        bucket = math.floor(math.log2(age) - math.log2(max(mean, 1e-300)))
        return not one.is_spare, -bucket, -one.position, mean if one.value is None else one.value, one.used_at

    return sorted(candidates, key=key)


def _mean_values(candidates: Sequence[Evictable]) -> tuple[dict[tuple[str, str], float], float]:
    """Mean value by group, and of all candidates together."""
    values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in candidates:
        if one.value is not None:
            values[one.name.namespace, one.name.group].append(min(one.value, _LARGEST_VALUE))
    return {group: _mean(found) for group, found in values.items()}, _mean(list(chain(*values.values())))


def _mean(values: Sequence[float]) -> float:
    """1 without values: any number would do, since all candidates then count the same."""
    return math.fsum(values) / len(values) if values else 1.0


def chosen(order: Sequence[Evictable], nbytes: int) -> list[Evictable]:
    """The shortest prefix of `order` that frees `nbytes`; all of it if that is not enough."""
    going, freed = [], 0
    for one in order:
        if freed >= nbytes:
            break
        going.append(one)
        freed += one.nbytes
    return going


def spare_limit(size: int) -> int:
    """Spare objects are written up to this many bytes in use: what was freed as slack is not idle."""
    return size - size // 32


def with_slack(excess: int, size: int, *, is_told: bool, spare_bytes: int = 0) -> int:
    """Number of bytes to free when a store is `excess` bytes over its limit: more, so that not every write evicts.

    `is_told`: evicted objects go to an eviction hook, which takes a limited number of bytes at once. `spare_bytes`:
    bytes of spare objects. If they suffice, no other object goes for the slack.
    """
    if excess <= 0:
        return 0
    freed = excess + (min(size // 64, MOST_TOLD_BYTES) if is_told else size // 64)
    return min(freed, spare_bytes) if excess <= spare_bytes else freed
