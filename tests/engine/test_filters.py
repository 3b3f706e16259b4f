"""What is drawn, against plain Python: each filter alone, mixed, and rows with different ones side by side."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.engine.sampling.filters import keep_likely
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import Sampler
from hybridkv.engine.sampling.sampling_state import SamplingState
from tests.engine.sampling import VOCAB, make_logits, tokens_of


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def naive_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k, top-p, one after the other, each on a distribution made anew."""
    shares = softmax([logit / params.temperature for logit in logits])
    shares = [share if share >= params.min_p * max(shares) * (1 - 1e-6) else 0.0 for share in shares]
    if params.top_k > 0:
        kept = sorted(shares, reverse=True)[: params.top_k]
        shares = [share if share >= kept[-1] else 0.0 for share in shares]
    total = sum(shares)
    shares = [share / total for share in shares]
    if params.top_p < 1:
        before, floor = 0.0, 0.0
        for share in sorted(shares, reverse=True):
            if before >= params.top_p:
                break
            before, floor = before + share, share
        shares = [share if share >= floor else 0.0 for share in shares]
    total = sum(shares)
    return [share / total for share in shares]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    {"top_p": 0.8, "min_p": 0.2, "temperature": 0.7},
    {"top_k": 3, "min_p": 0.3},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    logits, draws, params = make_logits(1), 4000, SamplingParams(**values)
    expected = naive_distribution(logits[0].double().tolist(), params)
    counts = Counter(tokens_of(logits.expand(draws, -1), [SamplingState(params)] * draws))
    assert all(expected[token] > 0 for token in counts)
    big = [token for token in range(VOCAB) if draws * expected[token] >= 5]
    chi = sum((counts[token] - draws * expected[token]) ** 2 / (draws * expected[token]) for token in big)
    assert chi < len(big) + 4 * math.sqrt(2 * len(big))


def test_seeded_draws_follow_the_distribution_too() -> None:
    logits, params, draws = make_logits(1, vocab=6), SamplingParams(seed=3), 3000
    row, counts = SamplingState(params), Counter[int]()
    sampler = Sampler()
    for _ in range(draws):
        token = sampler.sample(logits, [row])[0].token
        counts[token] += 1
        row.append(token)
    for token, share in enumerate(naive_distribution(logits[0].tolist(), params)):
        assert abs(counts[token] - draws * share) < 4 * math.sqrt(draws * share) + 1


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.3, 1.0, 2.0]),
            top_k=st.sampled_from([0, -1, 1, 2, 7, 40, 5000]),
            top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
            min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([3, 50, 400]),
    spread=st.sampled_from([0.3, 2.0, 8.0]),
)
def test_mixed_filters_keep_what_each_alone_would(
    rows: list[SamplingParams], seed: int, vocab: int, spread: float
) -> None:
    scores = make_logits(len(rows), vocab, seed, spread) / torch.tensor([[p.temperature] for p in rows])
    kept = keep_likely(scores.clone(), rows).isfinite().tolist()
    for index, params in enumerate(rows):
        logits = (scores[index].double() * params.temperature).tolist()
        expected, shares = naive_distribution(logits, params), softmax(scores[index].tolist())
        differing = [shares[token] for token in range(vocab) if kept[index][token] != (expected[token] > 0)]
        # Rounding may move the edge of a nucleus by a token of almost no weight.
        assert sum(differing) < 1e-5
        assert len(differing) <= 1


def test_equals_at_the_edge_are_all_kept() -> None:
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]] * 2)
    kept = keep_likely(scores, [SamplingParams(top_k=2), SamplingParams(top_p=0.75)]).isfinite()
    assert kept.tolist() == [[True, True, True, True, False]] * 2


def test_rare_tokens_count_although_they_are_not_sorted() -> None:
    """Ten tokens of 8% and a tail of 20% that no partial sort sees: half of it all is seven tokens, not five."""
    shares = torch.tensor([0.08 - 1e-5 * index for index in range(10)] + [0.2 / 390] * 390)
    kept = keep_likely(shares.log()[None], [SamplingParams(top_p=0.5)]).isfinite()
    assert int(kept.sum()) == 7


def test_a_small_temperature_costs_no_precision() -> None:
    draws = 2000
    rows = [SamplingState(SamplingParams(temperature=1e-4))] * draws
    drawn = tokens_of(torch.tensor([[1000.0, 1000.0, -1000.0]]).expand(draws, -1), rows)
    assert abs(drawn.count(1) - draws / 2) < 4 * math.sqrt(draws / 4)
