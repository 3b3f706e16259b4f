"""The policy that learns who comes back: what is evicted is what saves the least compute for its bytes and its time.

The value of keeping something is *chance of reuse x tokens saved / (bytes x time until then)*. Tokens and bytes are
facts. Chance and time are learned as the cache runs, from what was reused and when, also after it was evicted:

- The **chance** that an end is continued depends on its turn. If each conversation has its own inclination to go on,
  those that went on before are more inclined: learning starts from the rule of succession, (1 + turn) / (4 + turn).
  What was added last matters too: a large addition is rarely continued. What a deeper checkpoint supersedes is needed
  only where others branch off: there the kind of checkpoint and its hits tell more.
- The **time** until reuse is learned as one distribution over ages for ends, and one for what is superseded.

Given both, the best one can do with something of a given age is to keep it for the time that has the highest ratio of
expected reuses to expected time kept (the Gittins index).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from math import log2

import numpy as np
import numpy.typing as npt

from hybridkv.cache.retention.policy import Candidate, Kind, Numbers, Rating

_NUM_AGES = 43  # two an octave, up to four million requests: 0-1, 2, 3, 4-5, 6-7, 8-11, 12-15 ...
_AGE_ENDS = [2.0] + [(3 << octave) / 2 * scale for octave in range(1, 22) for scale in (1, 4 / 3)]
_AGE_WIDTHS = np.diff(np.array(_AGE_ENDS), prepend=0.0)
_CHANCES = [0.005, 0.01, 0.02, 0.04, 0.08, 0.14, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95]
_BETWEEN_CHANCES = [(a + b) / 2 for a, b in pairwise(_CHANCES)]
_PRIOR_WEIGHT = 20.0
"""How many of a cohort must have been seen until they count as much as what was assumed before."""
_LEARN_EVERY = 256
"""Things kept until the tables are made anew."""
_FORGET_AFTER = 1 << 14
"""Things kept until all counts are halved: what people do changes."""
_FIRST_CHANCE = {Kind.END: 0.05, Kind.BRANCH: 0.5, Kind.BREAKPOINT: 0.3, Kind.GRID: 0.1}
"""Of what is superseded."""


class PredictedReuse:
    """Evicts what is least worth its bytes and time."""

    def __init__(self) -> None:
        self._kept: defaultdict[Numbers, int] = defaultdict(int)
        self._reused: defaultdict[Numbers, int] = defaultdict(int)
        self._ages = [np.ones(_NUM_AGES), np.ones(_NUM_AGES)]
        """Reuses by age, of ends and of what is superseded."""
        self._worth: list[list[list[float]]] = []
        self._levels: dict[Numbers, int] = {}
        """The chance of each cohort, as the number of a chance."""
        self._num_kept = 0
        self._learn()

    def rate(self, candidate: Candidate) -> Rating:
        if candidate.is_superseded:
            cohort: Numbers = (1, candidate.kind, min(candidate.num_hits, 3))
        else:
            turn = min(candidate.turn + candidate.num_hits, 5)
            cohort = (0, turn, min(max(candidate.new_tokens.bit_length(), 9), 15))
        level = self._levels.get(cohort)
        if level is None:
            level = self._levels[cohort] = bisect_left(_BETWEEN_CHANCES, self.chance(cohort))
        tokens_per_byte = max(1, candidate.end - candidate.start) / max(1, candidate.num_bytes)
        return Rating((cohort[0], level, round(2 * log2(tokens_per_byte))), cohort)

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        is_superseded, chance, density = lane
        return self._worth[is_superseded][chance][_age_index(age)] * float(2.0 ** (density / 2))

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        self._count(self._kept, cohort, count)
        self._num_kept += count
        if self._num_kept % _LEARN_EVERY == 0:
            self._learn()
        if self._num_kept >= _FORGET_AFTER:
            self._forget()

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        self._count(self._reused, cohort, 1)
        self._ages[cohort[0]][_age_index(age)] += 1

    def chance(self, cohort: Numbers) -> float:
        """That something of a cohort is reused at all."""
        is_superseded, sort, hits = cohort
        if is_superseded:
            first = _FIRST_CHANCE[Kind(sort)]
            return self._update(first if sort == Kind.END else (first + hits) / (1 + hits), cohort)
        return self._update(self._update((1 + sort) / (4 + sort), cohort[:2]), cohort)

    def _update(self, assumed: float, cohort: Numbers) -> float:
        return (self._reused[cohort] + _PRIOR_WEIGHT * assumed) / (max(0, self._kept[cohort]) + _PRIOR_WEIGHT)

    def _count(self, counts: defaultdict[Numbers, int], cohort: Numbers, count: int) -> None:
        counts[cohort] += count
        counts[cohort[:2]] += count

    def _forget(self) -> None:
        self._num_kept = 0
        for counts in (self._kept, self._reused):
            for cohort in counts:
                counts[cohort] //= 2
        for ages in self._ages:
            ages *= 0.5
            ages += 0.5

    def _learn(self) -> None:
        self._worth = [worth_by_age(ages).tolist() for ages in self._ages]
        self._levels.clear()


def worth_by_age(reuses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each chance of reuse and each age: the most reuses per unit of time kept that one can expect from now on.

    `reuses`: how often things were reused at each age.
    """
    reused = np.array(_CHANCES)[:, None] * (reuses / reuses.sum())  # [chance, age]: of one kept, how many then
    waiting = 1 - np.cumsum(reused, axis=1) + reused / 2  # how many are still there to wait, on average
    time_kept = waiting * _AGE_WIDTHS
    worth: npt.NDArray[np.float64] = np.zeros_like(reused)
    for age in range(_NUM_AGES):  # stop at the best of all later ages
        ratio = np.cumsum(reused[:, age:], axis=1) / np.cumsum(time_kept[:, age:], axis=1)
        ratio.max(axis=1, out=worth[:, age])
    return worth


def _age_index(age: int) -> int:
    if age < 2:
        return 0
    octave = age.bit_length() - 1
    return min(2 * octave - 1 + ((age >> (octave - 1)) & 1), _NUM_AGES - 1)
