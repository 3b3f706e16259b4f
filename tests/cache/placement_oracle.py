"""Where M checkpoints of a prompt save the most, computed exactly: what a choice of places is compared with.

A request that parts from the prompt at `position` saves `p - start` tokens, where p is the deepest checkpoint with
`start < p <= position`, and nothing if there is none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Sample(NamedTuple):
    """A request that parts from the prompt."""

    start: int
    """Where it resumes without another checkpoint."""
    position: int
    """Where it parts."""


class Best(NamedTuple):
    """The best places, in order, and the tokens they save."""

    places: list[int]
    saved: int


def tokens_saved(places: Iterable[int], samples: Iterable[Sample]) -> int:
    """The definition, word by word."""
    places = list(places)
    return sum(max((p - s.start for p in places if s.start < p <= s.position), default=0) for s in samples)


def best_places(offsets: Iterable[int], samples: Sequence[Sample], budget: int) -> Best:
    """At most `budget` of these offsets that save the most tokens, by dynamic programming over sorted offsets.

    If b is the next chosen offset after a, all samples that part in [a, b) resume at a. Let `gain(a, b)` be what they
    save, and `most(m, b)` the most that m offsets before b save of the samples that part before b:

        most(m, b) = max over a < b of most(m - 1, a) + gain(a, b)

    Samples that part in [b, b') save no less with a larger a, so gain(a, b') - gain(a, b) grows with a. The matrix is
    therefore totally monotone, and SMAWK finds the maxima of all rows with O(N) entries: O(N M) transitions in all for
    N offsets. One gain takes O(1): from counts of samples if all have one start, after O(N + S log N) for S samples,
    else from a table of O(N^2) sums.
    """
    known = sorted(set(offsets))
    num = len(known)
    gain = _gains(known, samples)
    most, chosen = [0] * (num + 1), list[dict[int, int]]()
    for _ in range(budget):
        value = _transition(most, gain)
        before = _row_maxima(list(range(1, num + 1)), list(range(num)), value) if num else {}
        most = [0] + [value(b, before[b]) for b in range(1, num + 1)]
        chosen.append(before)
    places, at = list[int](), num
    for before in reversed(chosen):
        if at:
            at = before[at]
            places.append(known[at])
    return Best(places[::-1], most[num])


def _transition(most: Sequence[int], gain: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """The matrix of one round. Where a >= b, its entries are below all others and fall with a: it stays monotone."""
    return lambda b, a: most[a] + gain(a, b) if a < b else -1 - a


def _gains(offsets: Sequence[int], samples: Sequence[Sample]) -> Callable[[int, int], int]:
    """`gain(a, b)` of `best_places`, for indices of offsets; b = len(offsets) is behind all samples."""
    num, starts = len(offsets), {sample.start for sample in samples}
    if len(starts) <= 1:
        start = min(starts, default=0)
        positions = sorted(sample.position for sample in samples)
        num_before = [bisect_left(positions, offset) for offset in offsets] + [len(positions)]
        return lambda a, b: max(0, offsets[a] - start) * (num_before[b] - num_before[a])
    # By the last offset at or before the position, then by the first offset after the start: sums of samples.
    counts = [[0] * (num + 1) for _ in range(num)]
    sums = [[0] * (num + 1) for _ in range(num)]
    for sample in samples:
        last, first = bisect_right(offsets, sample.position) - 1, bisect_right(offsets, sample.start)
        if last >= 0:
            counts[last][first] += 1
            sums[last][first] += sample.start
    # table[b][a]: what all samples save at a whose last offset is before b. Entries with a >= b are never read.
    table = [[0] * num]
    for last in range(num):
        in_reach, starting = accumulate(counts[last]), accumulate(sums[last])
        rows = zip(table[-1], offsets, in_reach, starting, strict=False)
        table.append([before + offset * count - total for before, offset, count, total in rows])
    return lambda a, b: table[b][a] - table[a][a]


def _row_maxima(rows: Sequence[int], columns: Sequence[int], value: Callable[[int, int], int]) -> dict[int, int]:
    """The leftmost column of the maximum of each row of a totally monotone matrix: SMAWK (Aggarwal et al. 1987)."""
    if not rows:
        return {}
    left = list[int]()  # at most one column per row
    for column in columns:
        while left and value(rows[len(left) - 1], left[-1]) < value(rows[len(left) - 1], column):
            left.pop()
        if len(left) < len(rows):
            left.append(column)
    found = _row_maxima(rows[1::2], left, value)
    at = 0
    for i in range(0, len(rows), 2):
        last = found[rows[i + 1]] if i + 1 < len(rows) else left[-1]
        best = left[at]
        while left[at] != last:
            at += 1
            if value(rows[i], left[at]) > value(rows[i], best):
                best = left[at]
        found[rows[i]] = best
    return found
