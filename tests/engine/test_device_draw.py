"""Draws on the device: distributions, filters, seeds, bad rows. Without a GPU, Triton interprets the kernels."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridkv.engine.sampling import device_draw
from hybridkv.engine.sampling.device_draw import PlainParams, are_drawn, are_filtered, draw_plain, find_bounds, pack
from hybridkv.engine.sampling.filters import thresholds
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import Sampler
from hybridkv.engine.sampling.sampling_state import SamplingState
from tests.devices import DEVICE, ON_GPU, uses_device
from tests.engine.sampling import make_logits
from tests.engine.test_filters import naive_distribution

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
draw_kernels = pytest.importorskip("hybridkv.engine.sampling.draw_kernels")

pytestmark = uses_device
VOCABS = [33, 5000, 50_000, 262_144] if ON_GPU else [33, 5000]


def draw(logits: Tensor, params: list[SamplingParams], seeds: list[int] | None = None) -> list[int]:
    seeds = [index + 1 for index in range(len(params))] if seeds is None else seeds
    packed = PlainParams.over(torch.from_numpy(pack(params, seeds)).to(DEVICE))
    flags = {"filtered": are_filtered(params), "drawn": are_drawn(params)}
    tokens: list[int] = draw_plain(logits.to(DEVICE), packed, **flags).tolist()
    return tokens


def bounds(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """The largest gap that each row keeps."""
    packed = PlainParams.over(torch.from_numpy(pack(params, [0] * len(params))).to(DEVICE))
    logits = logits.to(DEVICE)
    found = find_bounds(logits, logits.amax(dim=-1).float(), packed)
    return found.view(torch.float32).cpu()


@pytest.fixture
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other random numbers, in parts that the interpreter draws from in less time."""
    monkeypatch.setattr(device_draw, "_LANES", 32)


# Distributions


@pytest.mark.usefixtures("few_lanes")
@pytest.mark.parametrize("values", [{}, {"temperature": 0.5}, {"top_k": 4, "top_p": 0.8}], ids=str)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    draws = 20_000 if ON_GPU else 4 if "top_k" in values else 60
    logits, params = make_logits(1, vocab=9), SamplingParams(**values)
    expected = naive_distribution(logits[0].double().tolist(), params)
    counts = Counter(draw(logits.expand(draws, -1), [params] * draws))
    assert all(expected[token] > 0 for token in counts)
    big = [token for token in range(9) if draws * expected[token] >= 5]
    chi = sum((counts[token] - draws * expected[token]) ** 2 / (draws * expected[token]) for token in big)
    assert chi <= len(big) + 4 * math.sqrt(2 * len(big))


@pytest.mark.usefixtures("few_lanes")
def test_every_token_can_win() -> None:
    vocab, draws = 3 * 4 * 32, 20_000 if ON_GPU else 25
    tokens = np.array(draw(torch.zeros(1, vocab).expand(draws, -1), [SamplingParams()] * draws))
    counts = np.bincount(tokens * 12 // vocab, minlength=12)  # a bin for each quarter of each part
    assert np.abs(counts - draws / 12).max() < 4 * math.sqrt(draws / 12) + 1


def log_noise(words: Tensor) -> Tensor:
    result = torch.empty(words.shape, device=DEVICE)
    log_noise_kernel[(1,)](words.to(DEVICE), result, SIZE=len(words))
    return result.cpu().double()


@triton.jit  # type: ignore[untyped-decorator]
def log_noise_kernel(words, result, SIZE: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]  # noqa: N803
    at = tl.arange(0, SIZE)
    tl.store(result + at, draw_kernels._log_noise(tl.load(words + at).to(tl.uint32, bitcast=True)))


def test_noise_is_exponential_down_to_the_least() -> None:
    """Of a vocabulary of 262,144 tokens the least number wins: it needs more than 24 bits."""
    words = 2 ** torch.arange(1, 32).double().repeat(2)
    words = torch.cat((words[:31], 2**32 - words[31:], 2 ** torch.tensor([10.5, 30.5]).double())).long()
    expected = -torch.log1p(-(words // 2).double() / 2**31)
    found = log_noise((words - 2**32 * (words >= 2**31)).int()).exp()
    # Near 1 a float32 has 24 bits.
    fine = words < 2**32 - 2**9
    assert torch.allclose(found[fine], expected[fine], rtol=2e-3)


def test_no_number_is_so_extreme_that_it_escapes_the_filters() -> None:
    assert log_noise(torch.tensor([0, 1, 2, -1], dtype=torch.int32)).isfinite().all()


# Filters


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("has_ties", [False, True])
def test_filters_keep_what_thresholds_keeps(vocab: int, has_ties: bool) -> None:
    params = [
        SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
        for top_k, top_p, temperature in [
            (1, 1, 1),
            (7, 1, 1),
            (0, 0.5, 0.7),
            (20, 0.9, 1.5),
            (3, 0.999, 1),
            (0, 1e-9, 2),
        ]
    ]
    logits = make_logits(len(params), vocab, seed=vocab)
    if has_ties:
        logits = (logits * 2).round() / 2
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / torch.tensor([[p.temperature] for p in params])
    expected = scores >= thresholds(scores, [p.top_k for p in params], [p.top_p for p in params])[:, None]
    kept = -scores <= bounds(logits, params)[:, None] * (1 + 1e-6)
    assert kept.sum(dim=-1).tolist() == expected.sum(dim=-1).tolist()


def test_top_p_does_not_count_what_top_k_drops_of_equals() -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0, -2.0, -2.0]])
    shares = logits[0, :3].softmax(dim=-1)
    for top_p, kept in ((float(shares[0] + shares[1]) - 1e-3, 2), (float(shares[0] + shares[1]) + 1e-3, 5)):
        gap = float(bounds(logits, [SamplingParams(top_k=3, top_p=top_p)]))
        assert int((-logits <= gap).sum()) == kept


def test_draws_stay_within_the_filters() -> None:
    logits, count = make_logits(1, vocab=5000, spread=0.1), 3000 if ON_GPU else 4
    best = set(logits[0].topk(3).indices.tolist())
    assert set(draw(logits.expand(count, -1), [SamplingParams(top_k=3)] * count)) <= best
    assert draw(logits, [SamplingParams(top_p=1e-6)]) == [int(logits.argmax())]


def test_flags_do_not_change_a_row() -> None:
    logits, params = make_logits(4, vocab=500), [SamplingParams()] * 3 + [SamplingParams(temperature=0)]
    packed = PlainParams.over(torch.from_numpy(pack(params, range(4))).to(DEVICE))
    plain, filtered = (
        draw_plain(logits.to(DEVICE), packed, filtered=flag, drawn=True).tolist() for flag in (False, True)
    )
    assert plain == filtered
    assert draw_plain(logits.to(DEVICE), packed, filtered=False, drawn=False).tolist() == logits.argmax(dim=-1).tolist()


# Rows


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0, top_k=3, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=5000, temperature=2),
]


@pytest.mark.parametrize(("vocab", "dtype"), list(zip(VOCABS, [torch.bfloat16, torch.float32] * 2, strict=False)))
def test_a_row_does_not_care_which_others_there_are(vocab: int, dtype: torch.dtype) -> None:
    logits, seeds = make_logits(len(MIXED), vocab).to(dtype), [5, 6, 2**64 - 7, 2**63, 9]
    together = draw(logits, MIXED, seeds)
    alone = [draw(logits[i : i + 1], [MIXED[i]], [seeds[i]])[0] for i in range(len(MIXED))]
    order = [3, 1, 4, 0, 2, 0] if ON_GPU else [2, 0]
    shuffled = draw(logits[order], [MIXED[i] for i in order], [seeds[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]
    assert together[1] == int(logits[1].argmax())


@pytest.mark.usefixtures("few_lanes")
def test_rows_may_lie_apart() -> None:
    logits, params = make_logits(8, vocab=150), [SamplingParams(temperature=0.7)] * 7 + [SamplingParams(top_k=5)]
    wide = torch.nn.functional.pad(logits, (0, 50), value=9.0)[:, :150].to(DEVICE)
    assert draw(wide, params) == draw(logits, params)
    assert draw(wide.t().contiguous().t(), params) == draw(logits, params)


def test_all_bits_of_a_seed_count() -> None:
    logits, seeds = torch.zeros(1, 5000), [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    assert len(set(draw(logits.expand(6, -1), [SamplingParams()] * 6, seeds))) == 6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("values", [{}, {"temperature": 0}, {"top_k": 9}], ids=str)
def test_a_bad_row_fails_alone(bad: float, values: dict[str, Any]) -> None:
    logits, params = make_logits(4), [SamplingParams(**values)] * 4
    good = draw(logits[[0, 3]], [params[0]] * 2, [1, 4])
    logits[1, 17] = bad
    logits[2] = -math.inf
    assert draw(logits, params) == [good[0], -1, -1, good[1]]


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.full((2, 6000), -math.inf)
    logits[:, 5001:5003] = 0
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.99)):
        assert set(draw(logits, [params] * 2)) <= {5001, 5002}


@pytest.mark.usefixtures("few_lanes")
def test_a_small_temperature_costs_no_precision() -> None:
    count = 2000 if ON_GPU else 16
    drawn = draw(torch.tensor([[1e4, 1e4, -1e4]]).expand(count, -1), [SamplingParams(temperature=1.1e-5)] * count)
    assert abs(drawn.count(1) - count / 2) < 4 * math.sqrt(count / 4)
    assert 2 not in drawn


# The sampler


def on_device(seed: int = 0) -> Sampler:
    return Sampler(DEVICE, seed, draws_on_device=True)


def test_the_sampler_draws_what_a_captured_step_would() -> None:
    logits = make_logits(3, vocab=5000).bfloat16()
    rows = [SamplingState(SamplingParams(seed=7, top_p=0.9, temperature=0.8), output=range(n)) for n in range(3)]
    seeds = [seed for seed in (row.draw_seed() for row in rows) if seed is not None]
    expected = draw(logits, [row.params for row in rows], seeds)
    assert [one.token for one in on_device().sample(logits.to(DEVICE), rows)] == expected


@pytest.mark.usefixtures("few_lanes")
@pytest.mark.parametrize(
    "more",
    [{"logprobs": 2}, {"min_tokens": 1}, {"logit_bias": {3: 1e-9}}, {"presence_penalty": 1e-9}, {"min_p": 1e-9}],
    ids=str,
)
def test_a_seeded_row_draws_the_same_where_it_is_not_plain(more: dict[str, Any]) -> None:
    logits = make_logits(4).to(DEVICE)
    cases: list[dict[str, Any]] = [{}, {"top_k": 20, "temperature": 1.3}]
    for values in cases if ON_GPU else cases[:1]:
        all_params = SamplingParams(**values), SamplingParams(**values, **more)
        plain, other = ([SamplingState(replace(p, seed=n), ends=[63]) for n in range(4)] for p in all_params)
        assert all(row.is_plain for row in plain)
        assert not any(row.is_plain for row in other)
        tokens = [one.token for one in on_device().sample(logits, plain)]
        mixed = [other[n] if n % 2 else plain[n] for n in range(4)]
        kept = [n for n in range(4) if tokens[n] != 63]
        results = on_device().sample(logits, mixed)
        assert [results[n].token for n in kept] == [tokens[n] for n in kept]


@pytest.mark.usefixtures("few_lanes")
def test_min_p_is_kept_on_the_device() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).to(DEVICE)
    rows = [SamplingState(SamplingParams(min_p=0.3, temperature=2.0)) for _ in range(30)]
    drawn = {one.token for one in on_device().sample(logits.expand(30, -1), rows)}
    assert drawn == {0, 1, 2}  # exp(-2 / 2) is more than 0.3, exp(-3 / 2) and exp(-2) are less
