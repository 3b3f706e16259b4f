"""Sampling parameters: what is refused, and how it is said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.errors import HybridKVError, RequestError

REFUSED: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": True},
    {"max_tokens": 1.5},
    {"max_tokens": "9"},
    {"max_tokens": 10**5000},
    {"min_tokens": -1},
    {"min_tokens": 200},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": 10**400},
    {"temperature": True},
    {"temperature": "hot"},
    {"temperature": None},
    {"top_k": -2},
    {"top_k": 1.0},
    {"top_k": False},
    {"top_p": 0},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"min_p": -0.01},
    {"min_p": 1.5},
    {"presence_penalty": 2.5},
    {"presence_penalty": math.nan},
    {"frequency_penalty": -2.5},
    {"frequency_penalty": math.inf},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": math.inf},
    {"seed": 1.0},
    {"seed": 2**64},
    {"seed": True},
    {"n": 0},
    {"n": 129},
    {"n": True},
    {"stop": ""},
    {"stop": ["ok", ""]},
    {"stop": [1]},
    {"stop": ["half a surrogate pair \ud800"]},
    {"stop": ["x"] * 17},
    {"stop": ["x" * 257]},
    {"stop": 5},
    {"stop": b"x"},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [2**31]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": [1] * 129},
    {"stop_token_ids": "12"},
    {"stop_token_ids": 12},
    {"ignore_eos": 1},
    {"include_stop_str_in_output": "no"},
    {"logprobs": -1},
    {"logprobs": 65},
    {"logprobs": True},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": {1: -101}},
    {"logit_bias": {"1": 5}},
    {"logit_bias": {-1: 5}},
    {"logit_bias": {True: 5}},
    {"logit_bias": [1]},
    {"logit_bias": dict.fromkeys(range(1025), 1.0)},
]


@pytest.mark.parametrize("values", REFUSED, ids=lambda values: next(iter(values)))
def test_nonsense_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(values))}.*: (pass|this)") as caught:
        SamplingParams(**values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_the_message_names_the_value_and_the_way_out() -> None:
    with pytest.raises(HybridKVError) as caught:
        SamplingParams(top_p=1.5)
    assert str(caught.value) == "top_p is 1.5: pass a number from 0 to 1, 1 for all tokens"


def test_the_edges_are_accepted() -> None:
    SamplingParams(max_tokens=None, min_tokens=10**6, temperature=0, top_k=-1, top_p=1, min_p=1, n=128, logprobs=64)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, seed=2**64 - 1, stop=["x" * 256] * 16, logprobs=0)
    SamplingParams(min_tokens=128, seed=-(2**63), logit_bias={0: -100, 2**31 - 1: 100}, stop_token_ids=[0, 2**31 - 1])


def test_lists_become_tuples_and_a_text_is_one_stop() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert params.stop == ("end",) == params.stops
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")


def test_none_is_none() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert params == SamplingParams()


def test_numbers_may_be_numpys() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), stop_token_ids=np.array([3]))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, top_k=5, stop_token_ids=[3])
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=np.int64(-2))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=np.float32("nan"))  # type: ignore[arg-type]


def test_equal_parameters_are_equal_and_keys() -> None:
    ours, theirs = {5: 1.0}, {5: 1}
    params = SamplingParams(stop=["a"], logit_bias=ours)
    assert params == SamplingParams(stop=("a",), logit_bias=theirs)
    assert len({params, SamplingParams(stop="a", logit_bias=theirs)}) == 1
    ours[6] = 2.0
    assert params.logit_bias == {5: 1.0}


def test_greedy_is_no_temperature() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_each_penalty_alone_needs_penalties() -> None:
    assert not SamplingParams(logit_bias={1: 1}, seed=1).needs_penalties
    assert SamplingParams(presence_penalty=1.5).needs_penalties
    assert SamplingParams(frequency_penalty=-1.5).needs_penalties
    assert SamplingParams(repetition_penalty=0.5).needs_penalties


def test_what_ends_a_reply() -> None:
    assert SamplingParams(stop_token_ids=[3]).ends([1, 2]) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).ends([1, 2]) == {3}


def test_tokens_the_model_does_not_have_are_refused() -> None:
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).check_vocab(10)
    with pytest.raises(RequestError, match="logit_bias is 10: this model's tokens are 0 to 9"):
        SamplingParams(logit_bias={10: 1}).check_vocab(10)
    with pytest.raises(RequestError, match="stop_token_ids is 10"):
        SamplingParams(stop_token_ids=[10]).check_vocab(10)
