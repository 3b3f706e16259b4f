"""Rows and logits for tests of sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.engine.sampling.sampler import Sampler
from hybridkv.engine.sampling.sampling_state import SamplingState

VOCAB = 64


def make_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens_of(logits: Tensor, rows: list[SamplingState], seed: int = 0) -> list[int]:
    return [sampled.token for sampled in Sampler(seed=seed).sample(logits, rows)]
