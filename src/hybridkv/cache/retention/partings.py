"""Where prompts part from earlier ones, learned: how far from the start, or how far from the end of the earlier prompt.

A state exists only where one was kept. A prompt that leaves an earlier one in its middle needs one there, and such
places recur: a list of tools ends at the same position for all users, a template behind the conversation begins at the
same distance from the end. The places that would have saved the most tokens of the last partings are the likely ones of
the next prompt. They are learned for prompts with the same first block, and for all prompts together.

Memory is bounded: `_MOST_OPENINGS` first blocks, `_MOST_PARTINGS` partings of each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

_MOST_OPENINGS = 256
_MOST_PARTINGS = 32
_MOST_PLACES = 3
_FEW_PROMPTS = 16
"""If fewer prompts had the same first block, those of all prompts are used."""
_LEAST_CHANCE = 1 / 32
"""Places at which fewer prompts part are not likely."""
_LEARN_EVERY = 8
"""Number of partings after which likely places are computed again; the first ones count at once."""
_REVIEW_EVERY = 64
"""Number of prompts after which they are, too: habits end."""


class Parting(NamedTuple):
    """A prompt leaves an earlier one."""

    position: int
    start: int
    """Where the earlier prompt had left others, or its last breakpoint: a checkpoint in between would be new."""
    end: int
    """Length of the earlier prompt; 0 if it ended before, or if several prompts go on from `position`."""

    def after_breakpoints(self, breakpoints: Sequence[int], block_tokens: int) -> Parting | None:
        """The parting, with the caller's breakpoints taken into account: a checkpoint is kept at each of them anyway.

        Up to `position` both prompts have the same tokens, and so the same breakpoints. None if the prompt parts in the
        block after one of them: no place would save anything.
        """
        aligned = (point // block_tokens * block_tokens for point in breakpoints)
        start = max((point for point in aligned if point <= self.position), default=0)
        if start <= self.start:
            return self
        return self._replace(start=start) if start < self.position else None


class Place(NamedTuple):
    """A likely place."""

    offset: int
    """Tokens from the start of a prompt, or, if negative, from its end."""
    chance: float
    """Fraction of the prompts from which a later one parts there, or so little after it that it resumes there."""

    def position(self, prompt_tokens: int) -> int:
        return self.offset if self.offset > 0 else prompt_tokens + self.offset


class _Tally:
    """The last partings of prompts that begin alike."""

    __slots__ = ("_last", "_num_new", "num_prompts", "places")

    def __init__(self) -> None:
        self.num_prompts = 0
        self.places: list[Place] = []
        """The most valuable first."""
        self._last: deque[tuple[Parting, int]] = deque(maxlen=_MOST_PARTINGS)
        """With the value of `num_prompts`."""
        self._num_new = 0

    def begun(self) -> None:
        self.num_prompts += 1
        if self._last and self.num_prompts % _REVIEW_EVERY == 0:
            self._learn()

    def parted(self, parting: Parting) -> None:
        self._last.append((parting, self.num_prompts))
        self._num_new += 1
        if self._num_new % _LEARN_EVERY == 0 or len(self._last) < _LEARN_EVERY:
            self._learn()

    def _learn(self) -> None:
        """Choose places one after the other: each time the one that saves most besides those before."""
        partings = [parting for parting, _ in self._last]
        num_prompts = self.num_prompts - self._last[0][1] + 1
        least = max(2.0, _LEAST_CHANCE * num_prompts)
        offsets = {one.position for one in partings} | {one.position - one.end for one in partings if one.end}
        saved, self.places = [0] * len(partings), []
        while len(self.places) < _MOST_PLACES:
            best, most, chance = 0, 0, 0.0
            for offset in offsets:
                served = gain = 0
                for one, already in zip(partings, saved, strict=True):
                    more = _saved(one, offset) - already
                    if more > 0:
                        served += 1
                        gain += more
                if gain > most and served >= least:
                    best, most, chance = offset, gain, served / num_prompts
            if not best:
                return
            self.places.append(Place(best, chance))
            saved = [max(_saved(one, best), already) for one, already in zip(partings, saved, strict=True)]


def _saved(parting: Parting, offset: int) -> int:
    """Tokens that a checkpoint at `offset` of the earlier prompt would have saved."""
    if offset < 0:
        if not parting.end:
            return 0
        offset += parting.end
    return offset - parting.start if offset <= parting.position else 0


class Partings:
    """Partings of all prompts of one cache."""

    def __init__(self) -> None:
        self._all = _Tally()
        self._by_opening: OrderedDict[bytes, _Tally] = OrderedDict()

    def begun(self, opening: bytes) -> None:
        """Count a prompt. `opening`: its root key and its first block."""
        self._all.begun()
        tally = self._by_opening.get(opening)
        if tally is None:
            tally = self._by_opening[opening] = _Tally()
            if len(self._by_opening) > _MOST_OPENINGS:
                self._by_opening.popitem(last=False)
        else:
            self._by_opening.move_to_end(opening)
        tally.begun()

    def parted(self, opening: bytes, parting: Parting) -> None:
        """Learn that a prompt leaves an earlier one. Known places where several go on say nothing of other prompts."""
        if parting.end:
            self._all.parted(parting)
        self._by_opening[opening].parted(parting)

    def places(self, opening: bytes) -> list[Place]:
        """Places at which later prompts will probably part from a prompt, the most valuable first."""
        own = self.own_places(opening)
        return self._all.places if own is None else own

    def own_places(self, opening: bytes) -> list[Place] | None:
        """Places learned from prompts that begin alike, and from no others; None if these are too few."""
        tally = self._by_opening.get(opening)
        return None if tally is None or tally.num_prompts < _FEW_PROMPTS else tally.places
