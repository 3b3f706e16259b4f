"""What both engines must agree on to hand a request over, and the first tokens in the form in which they travel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

from hybridkv.cache.tokens import LookupKey
from hybridkv.engine.request import Request
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import Sampled, TokenLogprobs
from hybridkv.link.messages import FirstToken
from hybridkv.link.producer import Prompt


def prompt_of(request: Request) -> Prompt:
    key = request.key._replace(taps=request.tapped.groups)
    return Prompt(
        request.prompt_tokens, _digest_of(request.prompt.ids.packed, key), _first_token_digest(request.params)
    )


def _digest_of(tokens: bytes, key: LookupKey) -> str:
    return sha256(key.root + json.dumps(key.taps).encode() + tokens).hexdigest()


def _first_token_digest(params: SamplingParams) -> str:
    """Digest of all parameters that the first token and its logprobs depend on.

    A draw depends on the seed, the sample's index and the token's index alone, so no state of a generator travels.
    """
    named = {
        "n": params.n,
        "temperature": float(params.temperature),
        "top_k": params.top_k,
        "top_p": float(params.top_p),
        "min_p": float(params.min_p),
        "penalties": [
            float(params.presence_penalty),
            float(params.frequency_penalty),
            float(params.repetition_penalty),
        ],
        "seed": params.seed,
        "logprobs": params.logprobs,
        "logit_bias": sorted(params.logit_bias.items()),
        "banned_ends": [params.ignore_eos, *params.stop_token_ids] if params.min_tokens else None,
    }
    return sha256(json.dumps(named).encode()).hexdigest()


def first_tokens(request: Request) -> list[FirstToken]:
    """The first token of each sample."""
    return [
        FirstToken(sample.token_ids[0], *_flat(sample.logprobs[0] if sample.logprobs else None))
        for sample in sorted(request.samples, key=lambda one: one.index)
    ]


def _flat(logprobs: TokenLogprobs | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    return (None, ()) if logprobs is None else (logprobs.chosen, tuple(logprobs.top.items()))


def sampled_tokens(first: Sequence[FirstToken]) -> list[Sampled]:
    """First tokens that came from a producer, as if they were sampled here."""
    return [
        Sampled(one.token, None if one.logprob is None else TokenLogprobs(one.logprob, dict(one.top))) for one in first
    ]
