"""Samples tokens from logits, for a batch of rows with parameters of their own. Knows no scheduler, text or pages.

    logits ─► penalties ─► bias, early ends banned ─► greedy: argmax
                                                  └─► temperature ─► min-p, top-k, top-p ─► draw
    logits ─► log_softmax ─► logprobs: of the model's distribution, before all of the above

A draw is an exponential race: every token gets an exponential random number, and the largest p / Exp(1) wins. Scores
are only compared and probabilities are never summed, so a row's draw does not depend on other rows. The generator of a
seeded row is seeded for every token (see `SamplingState.draw_seed`). The same seed gives the same numbers on the same
kind of device only. Rows without a seed share one generator. `device_draw` draws where decoding steps do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridkv.engine.sampling import device_draw
from hybridkv.engine.sampling.device_draw import GREEDY, Draw
from hybridkv.engine.sampling.filters import keep_likely, mask_below
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampling_state import SamplingState

FINEST = 2**-25
"""Half the step of uniform float32 numbers."""


_UNUSABLE = "logits are NaN or infinite: the model's output is unusable at this position"


class DrawnTokens(Protocol):
    def tolist(self) -> list[int]:
        """Wait for the tokens of a step. -1: its logits are unusable."""


class TokenLogprobs(NamedTuple):
    """Logprobs at one position, from the model's distribution before any adjustment."""

    chosen: float
    top: dict[int, float]
    """The requested number of likeliest tokens, best first."""


class Sampled(NamedTuple):
    """The result of one row."""

    token: int
    """-1 if there is an error."""
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why this row has no token. Other rows are not affected."""


class Sampler:
    """Samples on one device. Keeps no state of rows between calls."""

    def __init__(
        self, device: torch.device | str = "cpu", seed: int | None = None, *, draws_on_device: bool = False
    ) -> None:
        """`draws_on_device`: draw as decoding steps do that draw themselves, so that all draws of a seed agree."""
        self.device = torch.device(device)
        self._shared = torch.Generator(self.device)
        self._seeded = torch.Generator(self.device)
        self._seeds = np.random.default_rng(None if seed is None else seed % 2**64)
        self._draws_on_device = draws_on_device
        if seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(seed)

    def sample(self, logits: Tensor, rows: Sequence[SamplingState]) -> list[Sampled]:
        """One token for each row. Changes neither the logits nor the rows."""
        # logits: [R, V]
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows: pass one row of logits each")
        if not rows:
            return []
        if all(row.plain_greedy for row in rows):
            return _results(_best(logits), logits, {})
        if self._draws_on_device:
            tokens = self._draw_on_device(logits, rows)
            return _results(tokens, logits, _logprobs(logits, tokens, rows))
        scores = _adjusted(logits, rows)
        tokens = _best(scores)
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            picked = torch.tensor(drawn).to(logits.device)
            winners = self._draw(scores[picked], [rows[index] for index in drawn])
            tokens[picked] = torch.where(tokens[picked] < 0, -1, winners)
        return _results(tokens, logits, _logprobs(logits, tokens, rows))

    def draws(self, rows: Sequence[SamplingState]) -> list[Draw]:
        """How a decoding step draws each row's token."""
        if all(row.params.greedy for row in rows):
            return [GREEDY] * len(rows)
        return [
            GREEDY if p.greedy else Draw(p.temperature, max(p.top_k, 0), p.top_p, int(seed))
            for p, seed in zip([row.params for row in rows], self.draw_seeds(rows), strict=True)
        ]

    def collect(
        self, logits: Tensor, tokens: DrawnTokens, rows: Sequence[SamplingState], places: Sequence[int]
    ) -> list[Sampled]:
        """The results of a decoding step that drew `tokens` itself. It waits for the device. `places`: of the rows.

        Rows that are not plain are sampled now, from the logits. So are the others then, with the same result.
        """
        if all(row.is_plain for row in rows):
            drawn = tokens.tolist()
            return [Sampled(drawn[place], error=None if drawn[place] >= 0 else _UNUSABLE) for place in places]
        return self.sample(logits if len(places) == len(logits) else logits[places], rows)

    def draw_seeds(self, rows: Sequence[SamplingState], ahead: int = 0) -> npt.NDArray[np.uint64]:
        """The seeds of draws on the device: those of seeded rows, and random bits for the rest.

        `ahead`: of the draws after so many more tokens.
        """
        seeds = self._seeds.integers(0, 2**64, size=len(rows), dtype=np.uint64)
        for index, row in enumerate(rows):
            own = row.draw_seed(ahead)
            if own is not None:
                seeds[index] = own
        return seeds

    def _draw_on_device(self, logits: Tensor, rows: Sequence[SamplingState]) -> Tensor:
        # logits: [R, V] -> [R]
        params = [row.params for row in rows]
        if not all(row.is_plain for row in rows):
            logits = _keep_min_p(_adjusted(logits, rows), params)
        packed = torch.from_numpy(device_draw.pack(params, self.draw_seeds(rows))).to(logits.device)
        return device_draw.draw_plain(
            logits,
            device_draw.PlainParams.over(packed),
            filtered=device_draw.are_filtered(params),
            drawn=device_draw.are_drawn(params),
        )

    def _draw(self, scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
        # scores: [S, V] -> [S]
        params = [row.params for row in rows]
        temperature = torch.tensor([p.temperature for p in params], dtype=scores.dtype).to(scores.device)
        # Shift the maximum to 0, so that a small temperature costs no precision.
        scores -= scores.amax(dim=-1, keepdim=True)
        scores /= temperature[:, None]
        scores = keep_likely(scores, params)
        # argmax p / noise = argmax log p - log noise
        return scores.sub_(self._noise(scores, rows).log_()).argmax(dim=-1)

    def _noise(self, scores: Tensor, rows: Sequence[SamplingState]) -> Tensor:
        """Exponential random numbers, one for each token of each row.

        They are made from uniform numbers: on a CPU `exponential_` takes seven times as long. The result must be
        neither 0 nor infinite: such a token would win or lose against all others, even against filtered ones.
        """
        noise = torch.empty_like(scores)
        seeds = [row.draw_seed() for row in rows]
        if None in seeds:  # fill all rows at once; seeded rows are overwritten below
            noise.uniform_(generator=self._shared)
        for index, seed in enumerate(seeds):
            if seed is not None:
                noise[index].uniform_(generator=self._seeded.manual_seed(seed))
        return noise.clamp_min_(FINEST).log_().neg_().clamp_min_(FINEST)


def _best(scores: Tensor) -> Tensor:
    """The argmax of each row; -1 where the maximum is NaN or infinite."""
    # scores: [R, V] -> [R]
    values, tokens = scores.max(dim=-1)
    return tokens.masked_fill_(~values.isfinite(), -1)


def _keep_min_p(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply min-p to scores that are not divided by temperature yet, in place. Greedy rows stay as they are."""
    # scores: [R, V]
    if all(p.min_p == 0 for p in params):
        return scores
    floors = [math.log(p.min_p) * p.temperature if p.min_p and not p.greedy else -math.inf for p in params]
    return mask_below(scores, scores.amax(dim=-1) + torch.tensor(floors, dtype=scores.dtype).to(scores.device))


def _adjusted(logits: Tensor, rows: Sequence[SamplingState]) -> Tensor:
    """A float32 copy of the logits with penalties and biases applied. Other tokens are not touched."""
    # logits: [R, V] -> [R, V]
    scores = logits.to(torch.float32, copy=True)
    penalised = [index for index, row in enumerate(rows) if row.params.needs_penalties]
    if penalised:
        _penalise(scores, penalised, [rows[index] for index in penalised])
    edits = [(index, token, value) for index, row in enumerate(rows) for token, value in row.edits().items()]
    if edits:
        at, tokens, values = zip(*edits, strict=True)
        where, inside = _places(np.array(at), np.array(tokens), scores)
        scores[where] += torch.from_numpy(np.array(values, dtype=np.float32)[inside]).to(scores.device)
    return scores


def _penalise(scores: Tensor, at: Sequence[int], rows: Sequence[SamplingState]) -> None:
    lengths = [len(row.seen) for row in rows]
    where, inside = _places(np.repeat(at, lengths), np.concatenate([row.seen for row in rows]), scores)
    counts = np.concatenate([row.counts for row in rows])
    p = [row.params for row in rows]
    repetition = np.repeat(np.array([x.repetition_penalty for x in p], dtype=np.float32), lengths)
    # Presence and frequency penalties apply to the output: a token that is only in the prompt has a count of 0.
    presence = np.repeat([x.presence_penalty for x in p], lengths) * (counts > 0)
    frequency = np.repeat([x.frequency_penalty for x in p], lengths) * counts
    packed = np.stack((repetition, (presence + frequency).astype(np.float32)))[:, inside]
    factor, offset = torch.from_numpy(packed).to(scores.device)
    values = scores[where]
    scores[where] = torch.where(values > 0, values / factor, values * factor) - offset


def _places(rows: np.ndarray, tokens: np.ndarray, scores: Tensor) -> tuple[tuple[Tensor, Tensor], np.ndarray]:
    """An index of (row, token) pairs into scores, and a mask of valid pairs: prompts may have ids without a logit."""
    inside = tokens < scores.shape[1]
    packed = torch.from_numpy(np.stack((rows, tokens))[:, inside]).to(scores.device)
    return (packed[0], packed[1]), inside


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[SamplingState]) -> dict[int, TokenLogprobs]:
    wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    if not wanted:
        return {}
    at = torch.tensor(list(wanted)).to(logits.device)
    logprobs = logits[at].float().log_softmax(dim=-1)  # [L, V]
    chosen = logprobs.gather(1, tokens[at].clamp_min(0)[:, None])
    top = logprobs.topk(min(max(wanted.values()), logits.shape[1]), dim=-1)
    values = torch.cat((chosen, top.values), dim=1).tolist()
    ids = top.indices.tolist()
    return {
        index: TokenLogprobs(row_values[0], dict(zip(row_ids[:k], row_values[1 : k + 1], strict=True)))
        for (index, k), row_values, row_ids in zip(wanted.items(), values, ids, strict=True)
    }


def _results(tokens: Tensor, logits: Tensor, logprobs: dict[int, TokenLogprobs]) -> list[Sampled]:
    """Results on the host. For rows without logprobs this is the only transfer from the device."""
    return [
        Sampled(token, logprobs.get(index)) if token >= 0 else Sampled(-1, error=_reason(logits[index]))
        for index, token in enumerate(tokens.tolist())
    ]


def _reason(logits: Tensor) -> str:
    # logits: [V]
    bad = int((logits.isnan() | (logits == torch.inf)).sum())
    if bad:
        return f"{bad} of {len(logits)} {_UNUSABLE}"
    return "every token is banned: allow some by logit_bias, min_tokens or the ids that end the reply"
