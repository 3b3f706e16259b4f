"""The learning eviction policy: predicts reuse, and evicts the item that saves the least compute per byte and time.

The value of an item is *chance of reuse x tokens saved / (bytes x time until reuse)*. Tokens and bytes are known.
Chance and time are learned from observed reuse, including requests for items that were already evicted:

- The **chance** that the end of a request is continued depends on its turn. If conversations differ in their
  probability of another turn, those with more turns are more likely to go on. The prior is the rule of succession,
  (1 + turn) / (4 + turn). The chance also depends on the number of tokens added last: a large addition is rarely
  continued. A superseded checkpoint is needed only by requests that branch off there, so its chance depends on its
  kind and its hits.
- The **time** until reuse is learned as distributions over ages: one for ends, and three for superseded checkpoints:
  those that were used several times (such as the end of a prompt that all requests share), branches and likely places,
  and others.

Given both, the value of an item of a given age is the highest ratio of expected reuses to expected time kept, over all
times for which it may be kept (the Gittins index).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from math import log2

import numpy as np
import numpy.typing as npt

from hybridkv.cache.retention.policy import Candidate, Kind, Numbers, Rating

_NUM_AGES = 43  # two buckets per octave, up to four million requests: 0-1, 2, 3, 4-5, 6-7, 8-11, 12-15 ...
_AGE_ENDS = [2.0] + [(3 << octave) / 2 * scale for octave in range(1, 22) for scale in (1, 4 / 3)]
_AGE_WIDTHS = np.diff(np.array(_AGE_ENDS), prepend=0.0)
_CHANCES = [0.005, 0.01, 0.02, 0.04, 0.08, 0.14, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95]
_BETWEEN_CHANCES = [(a + b) / 2 for a, b in pairwise(_CHANCES)]
_ENDS, _OTHERS, _USED_OFTEN, _BRANCHES = range(4)
"""Distributions of ages."""
_OFTEN = 2
"""Number of hits of superseded checkpoints that are used often."""
_PRIOR_WEIGHT = 20.0
"""Weight of the prior, as a number of kept items of a cohort."""
_LEARN_EVERY = 256
"""The tables are recomputed after this many kept items."""
_FORGET_AFTER = 1 << 14
"""All counts are halved after this many kept items, because workloads change."""
_FIRST_CHANCE = {
    Kind.END: 0.05,
    Kind.BRANCH: 0.5,
    Kind.BREAKPOINT: 0.3,
    Kind.GRID: 0.1,
    Kind.PARTING: 0.2,
    Kind.FILL: 0.05,
}
"""Prior chance of reuse of superseded checkpoints."""


class PredictedReuse:
    """Evicts the item with the lowest predicted savings per byte and time."""

    def __init__(self) -> None:
        self._kept: defaultdict[Numbers, int] = defaultdict(int)
        self._reused: defaultdict[Numbers, int] = defaultdict(int)
        self._ages = [np.ones(_NUM_AGES) for _ in (_ENDS, _OTHERS, _USED_OFTEN, _BRANCHES)]
        """Number of reuses by age: see `_ages_of`."""
        self._worth: list[list[list[float]]] = [[] for _ in self._ages]
        self._changed = set(range(len(self._ages)))
        """Distributions whose `_worth` is not that of their `_ages`."""
        self._levels: dict[Numbers, int] = {}
        """The chance of reuse of each cohort, as an index of `_CHANCES`."""
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
        return Rating((_ages_of(cohort), level, round(2 * log2(tokens_per_byte))), cohort)

    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        ages, chance, density = lane
        return self._worth[ages][chance][_age_index(age)] * float(2.0 ** (density / 2))

    def learn_kept(self, cohort: Numbers, count: int) -> None:
        self._count(self._kept, cohort, count)
        self._num_kept += count
        if self._num_kept % _LEARN_EVERY == 0:
            self._learn()
        if self._num_kept >= _FORGET_AFTER:
            self._forget()

    def learn_reused(self, cohort: Numbers, age: int) -> None:
        self._count(self._reused, cohort, 1)
        ages = _ages_of(cohort)
        self._ages[ages][_age_index(age)] += 1
        self._changed.add(ages)

    def chance(self, cohort: Numbers) -> float:
        """Probability that an item of a cohort is reused."""
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
        self._changed.update(range(len(self._ages)))

    def _learn(self) -> None:
        for ages in self._changed:
            self._worth[ages] = worth_by_age(self._ages[ages]).tolist()
        self._changed.clear()
        self._levels.clear()


def worth_by_age(reuses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """By chance of reuse and age: the highest expected number of reuses per unit of time kept from then on.

    `reuses`: number of reuses at each age.
    """
    reused = np.array(_CHANCES)[:, None] * (reuses / reuses.sum())  # [chance, age]: probability of reuse at that age
    waiting = 1 - np.cumsum(reused, axis=1) + reused / 2  # fraction not reused yet, on average over that age
    reuses_between, time_between = _sums_between(reused), _sums_between(waiting * _AGE_WIDTHS)
    ratios = np.divide(reuses_between, time_between, out=np.zeros_like(time_between), where=_IS_LATER)
    worth: npt.NDArray[np.float64] = ratios.max(axis=2)  # keep until the later age with the best ratio
    return worth


_IS_LATER = np.triu(np.ones((_NUM_AGES, _NUM_AGES), dtype=np.bool_))


def _sums_between(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """By chance, first age and last age: the sum over these ages, both included."""
    until = np.cumsum(numbers, axis=1)
    return until[:, None, :] - (until - numbers)[:, :, None]


def _ages_of(cohort: Numbers) -> int:
    """The distribution of a cohort's ages. A prefix that every request shares must not speak for the others."""
    if not cohort[0]:
        return _ENDS
    if cohort[2] >= _OFTEN:
        return _USED_OFTEN
    return _BRANCHES if cohort[1] in (Kind.BRANCH, Kind.PARTING) else _OTHERS


def _age_index(age: int) -> int:
    if age < 2:
        return 0
    octave = age.bit_length() - 1
    return min(2 * octave - 1 + ((age >> (octave - 1)) & 1), _NUM_AGES - 1)
