"""Results and updates that callers get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridkv.engine.inspection.record import RequestRecord
from hybridkv.engine.sampling.sampler import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Metrics:
    """Times of a request, in seconds from its arrival."""

    queue_s: float
    """Until it was admitted."""
    ttft_s: float
    """Until the first token of its first sample."""
    total_s: float
    """Until the last token of its last sample."""
    per_token_s: float
    """Mean time between two tokens of a sample; 0 with fewer than two."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of a request."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    """"stop", "length", "abort", or "error"."""
    stop: int | str | None
    """The token or string that stopped it, if one did."""
    logprobs: list[TokenLogprobs] | None
    error: str | None = None
    hidden_states: Tensor | None = field(default=None, compare=False, repr=False)
    """`[tokens, layers, hidden]` of the layers that were asked for, on the host: of the prompt, or with
    `hidden_tokens="all"` of the prompt and the reply without its last token, which was never fed to the model."""


@dataclass(frozen=True, slots=True)
class Received:
    """What came from another engine for a request."""

    num_tokens: int
    num_bytes: int
    num_descriptors: int
    """Runs of bytes that were written."""
    full_attention_bytes: int
    """What it would have taken if every layer kept all tokens."""
    seconds: float
    """From the claim to the last byte."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request. With one sample, that sample's fields are also attributes of the result."""

    request_id: str
    prompt_token_ids: list[int]
    cached_tokens: int
    """Tokens of the prompt that the cache supplied."""
    completions: list[Completion]
    metrics: Metrics
    hidden_layers: tuple[int | str, ...] = ()
    """The layers of `hidden_states`, in that order: counted from 0, and "final"."""
    kv_transfer_params: dict[str, Any] | None = None
    """For a prompt that was computed for another engine: what that engine needs to fetch it."""
    received: Received | None = None
    """For a prompt that came from another engine."""
    record: RequestRecord | None = field(default=None, compare=False, repr=False)
    """Where its prompt came from, and why not more was cached."""

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def hidden_states(self) -> Tensor | None:
        return self.completions[0].hidden_states

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens and text of one sample since its previous update."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    finish_reason: str | None
    """None until the sample has ended."""
    result: Result | None
    """The whole result, in the last update of the last sample; else None."""
