"""How many tokens of prompts make a step worth its while, as measured on this model and this machine.

A step takes some time whatever is in it (weights are read, kernels launched), and some more for every token. Once its
tokens take several times as long as the rest, further prompts in the same step save next to nothing, and only keep the
first ones waiting: of eight equal prompts, one after another, the mean one has its first token after nine sixteenths of
the time that all of them take together. A long prompt is cut for the same reason: those that decode wait for every
piece. Where steps are bound by what they cost anyway, as on a GPU, nothing changes.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import median

_SHORT_TOKENS, _LONG_TOKENS = 16, 128
"""Steps of at most, and of at least so many tokens say what a step costs, and what a token does."""
_ENOUGH, _MOST = 4, 16
"""Times its fixed cost that a step's tokens should take before it is long enough, and with others waiting at most."""
_FEWEST_TOKENS = 16
"""For each of these times: what is so short that it is not worth telling apart."""
_REMEMBERED = 9
"""Steps of each kind. Medians: the first ones compile, allocate, or wait for others."""


class Pace:
    """Watches steps."""

    def __init__(self) -> None:
        self._short_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._long: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.enough_tokens = sys.maxsize
        """No further prompt belongs in a step with so many tokens of prompts; no limit until enough is known."""
        self.most_tokens = sys.maxsize
        """Of one prompt, while others decode."""

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
            tokens = max(_FEWEST_TOKENS, int(step_s / token_s)) if token_s > 0 else sys.maxsize
            self.enough_tokens, self.most_tokens = _ENOUGH * tokens, _MOST * tokens
