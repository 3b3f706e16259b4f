"""How long a deployment computes: the clock of a concurrent replay, and the FLOPs of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybridkv.errors import InputError


class ComputeModel(Protocol):
    def flops(self, start: int, end: int) -> float:
        """FLOPs of computing tokens [start, end) of a sequence, attention to all before them included."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """One queue of prefills at a fixed rate, and any number of requests that decode at a rate of their own."""

    decode_tokens_per_s: float
    """Of each request."""
    prefill_tokens_per_s: float | None = None
    """None: by FLOPs."""
    flops_per_s: float = 0.0
    compute: ComputeModel | None = None
    """None with a prefill rate: FLOPs are not reported."""

    def __post_init__(self) -> None:
        if not self.decode_tokens_per_s > 0:
            raise InputError(f"decode rate {self.decode_tokens_per_s}: give more than 0 tokens a second")
        if self.prefill_tokens_per_s is None:
            if self.compute is None or not self.flops_per_s > 0:
                raise InputError("no way to time a prefill: give a prefill rate, or the model's FLOPs and a device")
        elif not self.prefill_tokens_per_s > 0:
            raise InputError(f"prefill rate {self.prefill_tokens_per_s}: give more than 0 tokens a second")

    def prefill_seconds(self, start: int, end: int) -> float:
        if self.prefill_tokens_per_s is not None:
            return (end - start) / self.prefill_tokens_per_s
        assert self.compute is not None
        return self.compute.flops(start, end) / self.flops_per_s

    def decode_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.decode_tokens_per_s
