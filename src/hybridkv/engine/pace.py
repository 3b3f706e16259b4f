"""How many tokens of prompts make a step worth its while, as measured on this model and this machine.

A step takes some time whatever is in it (weights are read, kernels launched), and some more for every token. Once its
tokens take several times as long as the rest, further prompts in the same step save next to nothing, and only keep the
first ones waiting: of eight equal prompts, one after another, the mean one has its first token after nine sixteenths of
the time that all of them take together. Where steps are bound by what they cost anyway, as on a GPU, nothing changes.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import median

_SHORT_TOKENS, _LONG_TOKENS = 16, 128
"""Steps of at most, and of at least so many tokens say what a step costs, and what a token does."""
_TIMES = 4
"""So many times its fixed cost is what a step's tokens should take."""
_FEWEST = 64
"""Prompts that are shorter than this together are never kept apart: too little is known of so short a time."""
_REMEMBERED = 9
"""Steps of each kind. Medians: the first ones compile, allocate, or wait for others."""


class Pace:
    """Watches steps."""

    def __init__(self) -> None:
        self._short_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._long: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.enough_tokens = sys.maxsize
        """No further prompt belongs in a step with so many tokens of prompts; no limit until enough is known."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= _SHORT_TOKENS:
            self._short_s.append(seconds)
        elif num_tokens >= _LONG_TOKENS:
            self._long.append((num_tokens, seconds))
        else:
            return
        if self._short_s and self._long:
            step_s = median(self._short_s)
            token_s = median((seconds - step_s) / num_tokens for num_tokens, seconds in self._long)
            self.enough_tokens = max(_FEWEST, int(_TIMES * step_s / token_s)) if token_s > 0 else sys.maxsize
