"""Limits the prefill tokens of a step, from step times measured on this model and device.

A step has a fixed cost (reading weights, launching kernels) and a cost for each token. Once the tokens cost several
times the fixed cost, further prompts in the same step save next to nothing and delay the first ones: if eight equal
prompts run one after another, the mean time to first token is 9/16 of the time that all take together. Long prompts are
split for the same reason: decoding requests wait for every chunk. Where the fixed cost dominates, as on a GPU, the
limits have no effect. Steps that run as CUDA graphs are not measured: their cost says nothing of steps with prompts.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import median

_SHORT_TOKENS, _LONG_TOKENS = 16, 128
"""Steps of at most `_SHORT_TOKENS` measure the fixed cost; steps of at least `_LONG_TOKENS` the cost of a token."""
_ENOUGH, _MOST = 4, 16
"""Limits of a step's token cost, as multiples of its fixed cost: to be long enough, and most while others decode."""
_FEWEST_TOKENS = 16
"""Lower bound of the number of tokens that cost as much as a step's fixed cost (clock noise)."""
_REMEMBERED = 9
"""Number of recent steps of each kind. Their median is used, since first steps compile, allocate, or wait."""


class Pace:
    """Measures steps and derives the token limits."""

    def __init__(self) -> None:
        self._short_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._long: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.enough_tokens = sys.maxsize
        """No prompt is added to a step with this many prefill tokens. Unlimited until both costs are measured."""
        self.most_tokens = sys.maxsize
        """Most prefill tokens of a step while other requests decode."""

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
