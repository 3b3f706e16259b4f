"""Sampling: greedy rows, seeds, penalties, logprobs, errors. Distributions are in test_filters.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridkv.engine.sampling import sampler as sampler_module
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import Sampler
from hybridkv.engine.sampling.sampling_state import SamplingState
from tests.devices import needs_gpu
from tests.engine.sampling import VOCAB, make_logits, tokens_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_argmax(dtype: torch.dtype) -> None:
    logits = make_logits(20).to(dtype)
    plain = [SamplingState(SamplingParams(temperature=0)) for _ in range(20)]
    assert tokens_of(logits, plain) == logits.argmax(dim=-1).tolist()
    mixed = [*plain[:19], SamplingState(SamplingParams())]
    assert tokens_of(logits, mixed)[:19] == logits.argmax(dim=-1).tolist()[:19]


def test_a_small_temperature_is_almost_greedy_and_no_overflow() -> None:
    logits = make_logits(8) * 1e4
    rows = [SamplingState(SamplingParams(temperature=1.1e-5)) for _ in range(8)]
    assert tokens_of(logits, rows) == logits.argmax(dim=-1).tolist()


def test_plain_greedy_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_adjusted", "_logprobs"):
        monkeypatch.setattr(sampler_module, name, lambda *_: pytest.fail("not needed"))
    done = SamplingState(SamplingParams(temperature=0, min_tokens=1), ends=[2], output=[1])
    assert tokens_of(make_logits(2), [SamplingState(SamplingParams(temperature=0)), done])


def test_logits_and_rows_stay_as_they_were() -> None:
    logits = make_logits(2)
    before = logits.clone()
    rows = [
        SamplingState(SamplingParams(repetition_penalty=1.5, logit_bias={3: 5}), [1, 2]),
        SamplingState(SamplingParams()),
    ]
    tokens_of(logits, rows)
    assert torch.equal(logits, before)
    assert rows[0].output == []


# Seeds


COMPANY = [
    SamplingState(SamplingParams(top_p=0.8), output=[1, 2]),
    SamplingState(SamplingParams(temperature=0)),
    SamplingState(SamplingParams(seed=99, top_k=3)),
    SamplingState(SamplingParams(min_p=0.1, repetition_penalty=2.0), [5, 6]),
]


@pytest.mark.parametrize("values", [{}, {"top_p": 0.9}, {"top_k": 10}, {"top_p": 0.7, "min_p": 0.05}], ids=str)
def test_a_seeded_row_does_not_care_who_else_is_there(values: dict[str, Any]) -> None:
    params = SamplingParams(seed=7, **values)
    for position in range(30):
        row = SamplingState(params, output=range(position))
        own, others = make_logits(1, seed=position), make_logits(len(COMPANY), seed=1000 + position)
        [alone] = tokens_of(own, [row], seed=1)
        last = tokens_of(torch.cat((others, own)), [*COMPANY, row], seed=2)[-1]
        middle = tokens_of(torch.cat((others[:2], own, others[2:])), [*COMPANY[:2], row, *COMPANY[2:]], seed=3)[2]
        assert alone == last == middle


def test_a_resumed_row_goes_on_as_if_nothing_had_happened() -> None:
    def run(row: SamplingState, steps: range) -> list[int]:
        for step in steps:
            row.append(Sampler().sample(make_logits(1, seed=step), [row])[0].token)
        return row.output

    params = SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.5)
    whole = run(SamplingState(params, [1, 2, 3]), range(20))
    half = run(SamplingState(params, [1, 2, 3]), range(9))
    assert run(SamplingState(params, [1, 2, 3], output=half), range(9, 20)) == whole


def test_seeds_siblings_and_positions_are_streams_of_their_own() -> None:
    rows = [
        SamplingState(SamplingParams(seed=seed), sibling=sibling, output=[0] * position)
        for seed in (-1, 0, 1, 11)
        for sibling in (0, 1, 11)
        for position in (0, 1, 11)
    ]
    seeds = {row.draw_seed() for row in rows}
    assert len(seeds) == len(rows)
    assert None not in seeds
    draws = tokens_of(torch.zeros(len(rows), 10_000), rows)
    assert len(set(draws)) == len(draws)


def test_the_numbers_of_a_seed_stay_the_same_over_versions() -> None:
    assert SamplingState(SamplingParams(seed=42), sibling=1, output=[7]).draw_seed() == 11064863732070391611


def test_the_samplers_own_seed_decides_for_the_rest() -> None:
    logits, rows = make_logits(50, spread=0.1), [SamplingState(SamplingParams()) for _ in range(50)]
    assert tokens_of(logits, rows, seed=1) == tokens_of(logits, rows, seed=1) != tokens_of(logits, rows, seed=2)
    assert len(set(tokens_of(logits[:1].expand(50, -1), rows, seed=1))) > 10
    sampler = Sampler(seed=1)
    assert sampler.sample(logits, rows) != sampler.sample(logits, rows)


@pytest.mark.parametrize("extreme", [0.0, 1.0])
def test_no_draw_escapes_the_filters(extreme: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(1)
    monkeypatch.setattr(Tensor, "uniform_", lambda self, generator: self.fill_(extreme))
    assert tokens_of(logits, [SamplingState(SamplingParams(top_k=1))]) == logits.argmax(dim=-1).tolist()


# Penalties, biases, ends


def naive_penalties(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        result.append(logit + params.logit_bias.get(token, 0.0))
    return result


penalties = st.sampled_from([0.0, 0.0, 0.7, -1.1, 2.0])
tokens = st.lists(st.integers(0, 9), max_size=40)


@settings(max_examples=150)
@given(
    rows=st.lists(
        st.tuples(
            tokens,
            tokens,
            st.builds(
                SamplingParams,
                presence_penalty=penalties,
                frequency_penalty=penalties,
                repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
                logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100, -2.5, 3.0]), max_size=3),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_penalties_are_those_of_the_naive_way(rows: list[tuple[list[int], list[int], SamplingParams]]) -> None:
    logits = make_logits(len(rows), vocab=10)
    states = [SamplingState(params, prompt, output=output) for prompt, output, params in rows]
    scores = sampler_module._adjusted(logits, states)
    for index, (prompt, output, params) in enumerate(rows):
        expected = naive_penalties(logits[index].tolist(), prompt, output, params)
        torch.testing.assert_close(scores[index], torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_penalties_decide_for_greedy_rows_as_well() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    row = SamplingState(SamplingParams(temperature=0, presence_penalty=0.5))
    said = []
    for _ in range(3):
        said += tokens_of(logits, [row])
        row.append(said[-1])
    assert said == [0, 1, 0]


def test_ids_without_a_logit_are_ignored() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.5, logit_bias={99: 1}, min_tokens=1)
    row = SamplingState(params, [1, 98, 97], ends=[99])
    assert tokens_of(make_logits(1), [row]) == tokens_of(make_logits(1), [SamplingState(params, [1])])


def test_prompts_may_be_arrays() -> None:
    params = SamplingParams(repetition_penalty=1.5)
    assert SamplingState(params, torch.tensor([5, 3, 5]).int().numpy()).seen.tolist() == [3, 5]
    assert SamplingState(SamplingParams(presence_penalty=1), [3, 5]).seen.tolist() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_before_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[0.0, 50.0, 100.0, -5.0]])
    row = SamplingState(SamplingParams(temperature=temperature, min_tokens=2, logit_bias={2: 10}), ends=[1, 2])
    for expected in ({0, 3}, {0, 3}, {2}, {2}):
        [token] = tokens_of(logits, [row])
        assert token in expected
        row.append(token)


# Logprobs and errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_models_own(dtype: torch.dtype) -> None:
    logits = make_logits(4).to(dtype)
    shaped: dict[str, Any] = {"temperature": 0.3, "top_k": 4, "presence_penalty": 2, "logit_bias": {1: 9}}
    rows = [SamplingState(SamplingParams(logprobs=k, **shaped), output=[3]) for k in (0, 3, 64)]
    results = Sampler(seed=0).sample(logits, [*rows, SamplingState(SamplingParams())])
    assert results[3].logprobs is None
    for index, (result, k) in enumerate(zip(results[:3], (0, 3, 64), strict=True)):
        expected = logits[index].float().log_softmax(dim=-1)
        assert result.logprobs is not None
        assert result.logprobs.chosen == pytest.approx(float(expected[result.token]))
        assert list(result.logprobs.top.values()) == pytest.approx(expected.sort(descending=True).values[:k].tolist())
        assert all(value == pytest.approx(float(expected[token])) for token, value in result.logprobs.top.items())


def test_more_logprobs_than_tokens_are_all_there_are() -> None:
    [result] = Sampler().sample(make_logits(1, vocab=5), [SamplingState(SamplingParams(temperature=0, logprobs=64))])
    assert result.logprobs is not None
    assert len(result.logprobs.top) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_row_fails_alone(bad: float, temperature: float, dtype: torch.dtype) -> None:
    logits = make_logits(3).to(dtype)
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=5 * int(temperature), min_p=0.01, seed=1)
    good = tokens_of(logits, [SamplingState(params)] * 3)
    logits[1, 17] = bad
    results = Sampler().sample(logits, [SamplingState(params)] * 3)
    assert [results[0].token, results[2].token] == [good[0], good[2]]
    assert results[0].error is results[2].error is None
    assert results[1].token == -1
    assert "1 of 64 logits are NaN or infinite" in str(results[1].error)


def test_a_bad_logit_does_not_hide_behind_a_ban() -> None:
    logits = make_logits(1)
    logits[0, 2] = math.nan
    [result] = Sampler().sample(logits, [SamplingState(SamplingParams(min_tokens=1, logprobs=1), ends=[2])])
    assert result.error is not None
    assert result.logprobs is None


def test_a_row_where_all_is_banned_fails() -> None:
    row = SamplingState(SamplingParams(min_tokens=1), ends=range(VOCAB))
    [result] = Sampler().sample(make_logits(1), [row])
    assert "every token is banned" in str(result.error)


def test_shapes_must_agree() -> None:
    assert Sampler().sample(make_logits(0), []) == []
    with pytest.raises(ValueError, match=r"\(2, 64\) for 1 rows"):
        Sampler().sample(make_logits(2), COMPANY[:1])


@needs_gpu
def test_cuda_rows_do_not_care_who_else_is_there() -> None:
    row, own, others = (
        SamplingState(SamplingParams(seed=7, top_p=0.9)),
        make_logits(1).cuda(),
        make_logits(4, seed=1).cuda(),
    )
    [alone] = Sampler("cuda").sample(own, [row])
    assert Sampler("cuda").sample(torch.cat((others, own)), [*COMPANY, row])[-1] == alone
