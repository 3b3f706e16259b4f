"""What one running sequence needs between steps in order to be sampled. Host memory only: no torch.

Nothing here changes while a step runs: a step that fails, or a request that is preempted, leaves no trace. The engine
calls `append` when a token has become part of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hybridkv.engine.sampling.params import SamplingParams


class SamplingState:
    """One sequence: its parameters, its output, and the tokens that its penalties look at.

    ends: the tokens that end it, banned until `min_tokens` are there.
    sibling: which of the `n` replies to one prompt this is.
    output: what it has said already, if it was running before.
    """

    __slots__ = ("_at", "_counts", "_seen", "ends", "output", "params", "sibling")

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
        # Only the repetition penalty looks at the prompt.
        seen = np.asarray(prompt if params.repetition_penalty != 1 else (), dtype=np.int64)
        self._seen: npt.NDArray[np.int64] = np.unique(seen)
        self._counts: npt.NDArray[np.float32] = np.zeros(len(self._seen), dtype=np.float32)
        self._at = {token: index for index, token in enumerate(self._seen.tolist())}
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """A token became part of the output."""
        self.output.append(token)
        if not self.params.needs_penalties:
            return
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._seen):  # room for as many again: appending costs O(1) on average
            self._seen = np.concatenate((self._seen, np.zeros(at + 16, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(at + 16, dtype=np.float32)))
        self._seen[at] = token
        self._counts[at] += 1

    @property
    def num_output(self) -> int:
        return len(self.output)

    @property
    def plain_greedy(self) -> bool:
        """Its next token is the argmax of the logits as they are."""
        params = self.params
        return params.greedy and params.logprobs is None and not params.needs_penalties and not self.edits()

    @property
    def seen(self) -> npt.NDArray[np.int64]:
        """The tokens that penalties look at, each once."""
        return self._seen[: len(self._at)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `seen` is in the output: 0 for those that are in the prompt only."""
        return self._counts[: len(self._at)]

    def edits(self) -> Mapping[int, float]:
        """What is added to logits at this position: the bias, and minus infinity for an end that comes too early."""
        if len(self.output) >= self.params.min_tokens or not self.ends:
            return self.params.logit_bias
        return {**self.params.logit_bias, **dict.fromkeys(self.ends, -math.inf)}

    def draw_seed(self) -> int | None:
        """The seed of the draw at this position, 64 bits; None: not seeded.

        It depends on the request's seed, the sibling and the index of the token, on nothing else: whoever else is in
        the batch and however often the request was preempted, it draws the same numbers at the same place.
        """
        if self.params.seed is None:
            return None
        key = b"%d %d %d" % (self.params.seed, self.sibling, len(self.output))
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
