"""Sampling state of one sequence, kept between steps. Host memory only: no torch.

Nothing here changes while a step runs, so a failed step or a preemption needs no rollback. The engine calls `append`
when a token has become part of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hybridkv.engine.sampling.params import SamplingParams


class SamplingState:
    """Parameters and output of one sequence, and the tokens that its penalties apply to.

    ends: token ids that end the sequence; banned until it has `min_tokens`.
    sibling: index among the `n` replies to one prompt.
    output: tokens it has sampled already.
    """

    __slots__ = ("_at", "_counts", "_has_plain_params", "_seen", "ends", "output", "params", "sibling")

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | npt.NDArray[np.int32] = (),
        *,
        ends: Iterable[int] = (),
        sibling: int = 0,
        output: Iterable[int] = (),
    ) -> None:
        self.params = params
        self.ends = frozenset(ends)
        self.sibling = sibling
        self.output: list[int] = []
        changes_logits = params.needs_penalties or bool(params.logit_bias)
        uses_min_p = params.min_p > 0 and not params.greedy
        self._has_plain_params = not changes_logits and not uses_min_p and params.logprobs is None
        # Only the repetition penalty applies to the prompt.
        seen = np.asarray(prompt if params.repetition_penalty != 1 else (), dtype=np.int64)
        self._seen: npt.NDArray[np.int64] = np.unique(seen)
        self._counts: npt.NDArray[np.float32] = np.zeros(len(self._seen), dtype=np.float32)
        self._at = {token: index for index, token in enumerate(self._seen.tolist())}
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token to the output."""
        self.output.append(token)
        if not self.params.needs_penalties:
            return
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._seen):  # double the capacity: appending costs O(1) on average
            self._seen = np.concatenate((self._seen, np.zeros(at + 16, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(at + 16, dtype=np.float32)))
        self._seen[at] = token
        self._counts[at] += 1

    @property
    def num_output(self) -> int:
        return len(self.output)

    @property
    def is_plain(self) -> bool:
        """Whether temperature, top-k, top-p and seed alone decide its next token, without logprobs."""
        return self._has_plain_params and (len(self.output) >= self.params.min_tokens or not self.ends)

    @property
    def plain_greedy(self) -> bool:
        """Whether its next token is the argmax of the unchanged logits, without logprobs."""
        return self.params.greedy and self.is_plain

    @property
    def seen(self) -> npt.NDArray[np.int64]:
        """The distinct tokens that penalties apply to."""
        return self._seen[: len(self._at)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Count of each token of `seen` in the output; 0 if it is only in the prompt."""
        return self._counts[: len(self._at)]

    def edits(self) -> Mapping[int, float]:
        """Values added to logits at this position: `logit_bias`, and minus infinity for `ends` before `min_tokens`."""
        if len(self.output) >= self.params.min_tokens or not self.ends:
            return self.params.logit_bias
        return {**self.params.logit_bias, **dict.fromkeys(self.ends, -math.inf)}

    def draw_seed(self, ahead: int = 0) -> int | None:
        """The 64-bit seed of the draw `ahead` tokens after this position; None if the request has no seed.

        It depends only on the request's seed, the sibling and the index of the token. The other requests of the batch
        and preemptions do not change the draw.
        """
        if self.params.seed is None:
            return None
        key = b"%d %d %d" % (self.params.seed, self.sibling, len(self.output) + ahead)
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
