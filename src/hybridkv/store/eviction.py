"""What goes first when a store is full.

An object is worth keeping for what it saves per byte and the chance that it is asked for again, which falls about as
its age grows. So objects are filed by age over value, in powers of two: the value of their group, for within a group
depth decides. A chain's later objects are useless without the earlier ones, so the deepest go first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.store.names import ObjectName

_YOUNGEST_S = 1.0
"""Below this all are equally young."""

_LARGEST_VALUE = 1e300
"""Headers may say anything; sums of larger ones overflow."""

_MOST_TOLD_BYTES = 64 << 20


class Evictable(NamedTuple):
    name: ObjectName
    nbytes: int
    used_at: float
    value: float
    position: int


def ranked(candidates: Sequence[Evictable], now: float) -> list[Evictable]:
    """Those to evict first come first."""
    means = _mean_values(candidates)

    def key(one: Evictable) -> tuple[int, int, float, float]:
        worth = max(means[one.name.namespace, one.name.group], 1e-300)
        age = max(now - one.used_at, _YOUNGEST_S)
        return -math.floor(math.log2(age) - math.log2(worth)), -one.position, one.value, one.used_at

    return sorted(candidates, key=key)


def _mean_values(candidates: Sequence[Evictable]) -> dict[tuple[str, str], float]:
    values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in candidates:
        values[one.name.namespace, one.name.group].append(min(one.value, _LARGEST_VALUE))
    return {group: math.fsum(found) / len(found) for group, found in values.items()}


def chosen(order: Sequence[Evictable], nbytes: int) -> list[Evictable]:
    """The first of them that free `nbytes` together; all, if they do not."""
    going, freed = [], 0
    for one in order:
        if freed >= nbytes:
            break
        going.append(one)
        freed += one.nbytes
    return going


def with_slack(excess: int, size: int, *, is_told: bool) -> int:
    """How much to free when `excess` bytes are too many: somewhat more, so that not every object has to make room.

    `is_told`: someone takes what goes elsewhere, and can only take so much at once.
    """
    slack = min(size // 64, _MOST_TOLD_BYTES) if is_told else size // 64
    return excess + slack if excess > 0 else 0
