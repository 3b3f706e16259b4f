"""Causal convolutions with their last inputs in pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hybridkv.kernels import conv as conv_module
from hybridkv.kernels.conv import conv
from tests.kernels.states import Advance, StateStep, check_step, state_steps, step_of

C = 6


def make_advance(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Advance:
    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, x[row].double().unsqueeze(-1)], dim=-1)
        y = (inputs * weight.double()).sum(-1)
        y = y if bias is None else y + bias.double()
        return inputs[:, 1:], y if activation is None else functional.silu(y)

    return advance


@settings(max_examples=40)
@given(
    step=state_steps(),
    width=st.integers(2, 4),
    has_bias=st.booleans(),
    activation=st.sampled_from([None, "silu", "swish"]),
    transposed=st.booleans(),
)
def test_any_step_equals_token_by_token(
    step: StateStep, width: int, has_bias: bool, activation: str | None, transposed: bool
) -> None:
    x = torch.randn(C, step.num_tokens).t() if transposed else torch.randn(step.num_tokens, C)
    weight, bias = torch.randn(C, width), torch.randn(C) if has_bias else None
    check_step(
        step,
        step.arena(C, width - 1),
        lambda states, table: conv(x, weight, bias, activation, states, table),
        make_advance(x, weight, bias, activation),
        1e-5,
    )


def test_long_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_module, "CPU_BLOCK_BYTES", 4 * C * 5)
    step = step_of([31, 1, 2, 40], cuts=[[7], [], [], []])
    x, weight = torch.randn(step.num_tokens, C), torch.randn(C, 4)
    check_step(
        step,
        step.arena(C, 3),
        lambda states, table: conv(x, weight, None, None, states, table),
        make_advance(x, weight, None, None),
        1e-5,
    )


def test_the_kept_inputs_are_exact() -> None:
    step = step_of([1, 2, 5, 1], cuts=[[], [1], [1, 2], []], srcs=["own", "fresh", "null", "shared"])
    x = torch.randn(step.num_tokens, C).bfloat16()
    weight = torch.randn(C, 4).bfloat16()
    arena = step.arena(C, 3, dtype=torch.bfloat16)
    check_step(
        step,
        arena,
        # The outputs are rounded, the states must not be.
        lambda states, table: conv(x, weight, None, None, states, table).double() * 0,
        lambda state, row: (make_advance(x, weight, None, None)(state, row)[0], torch.zeros(C, dtype=torch.float64)),
        0.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 40])
def test_equals_the_models_own_function(dtype: Any, length: int) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").causal_conv1d_fn
    step = step_of([length], srcs=["null"])
    x, weight, bias = torch.randn(length, C).to(dtype), torch.randn(C, 4).to(dtype), torch.randn(C).to(dtype)
    actual = conv(x, weight, bias, "silu", step.arena(C, 3, dtype=dtype)[:, 1], step.table)
    expected = theirs(x.t().unsqueeze(0), weight, bias, "silu")[0].t()
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_an_unknown_activation_is_refused() -> None:
    step = step_of([1])
    with pytest.raises(ValueError, match="gelu"):
        conv(torch.randn(1, C), torch.randn(C, 4), None, "gelu", step.arena(C, 3)[:, 1], step.table)
