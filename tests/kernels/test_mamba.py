"""Mamba-2 and Mamba-1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hybridkv.kernels import chunks, resident
from hybridkv.kernels.mamba import mamba1, mamba2
from hybridkv.kernels.segments import SegmentTable
from tests.kernels.states import Advance, StateStep, check_step, state_steps, step_of

H, P, G, S = 4, 5, 2, 7
CHANNELS = 6


class Inputs(NamedTuple):
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


def make_inputs(num_tokens: int, decay: float = 1.0) -> Inputs:
    x, dt = torch.randn(num_tokens, H, P), torch.randn(num_tokens, H)
    b, c = torch.randn(2, num_tokens, G, S)
    return Inputs(x, dt, -torch.rand(H) * decay - 1e-4, b, c)


def make_inputs1(num_tokens: int, decay: float = 1.0) -> Inputs:
    x, dt = torch.randn(2, num_tokens, CHANNELS)
    b, c = torch.randn(2, num_tokens, S)
    return Inputs(x, dt, -torch.rand(CHANNELS, S) * decay - 1e-4, b, c)


def make_advance(inputs: Inputs, d: Tensor, dt_bias: Tensor, limit: tuple[float, float] = (0.0, math.inf)) -> Advance:
    x, dt, a, b, c = (t.double() for t in inputs)
    dt = functional.softplus(dt + dt_bias.double()).clamp(*limit)
    skip = x * (d.double() if d.dim() == 2 else d.double().unsqueeze(-1))
    b, c = (t.repeat_interleave(H // G, dim=1) for t in (b, c))

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        write = (dt[row].unsqueeze(-1) * x[row]).unsqueeze(-1) * b[row].unsqueeze(1)
        state = (dt[row] * a).exp()[:, None, None] * state + write
        return state, (state @ c[row].unsqueeze(-1)).squeeze(-1) + skip[row]

    return advance


def make_advance1(inputs: Inputs, d: Tensor, dt_bias: Tensor, z: Tensor | None) -> Advance:
    x, dt, a, b, c = (t.double() for t in inputs)
    dt = functional.softplus(dt + dt_bias.double())

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = (dt[row].unsqueeze(-1) * a).exp() * state + (dt[row] * x[row]).unsqueeze(-1) * b[row]
        y = state @ c[row] + d.double() * x[row]
        return state, y if z is None else y * functional.silu(z[row].double())

    return advance


@settings(max_examples=40)
@given(step=state_steps(), decay=st.sampled_from([1e-4, 1.0, 50.0]), d_width=st.sampled_from([1, P]))
def test_any_step_of_mamba2_equals_token_by_token(step: StateStep, decay: float, d_width: int) -> None:
    inputs = make_inputs(step.num_tokens, decay)
    d, dt_bias = torch.randn(H, d_width), torch.randn(H)
    if d_width == 1:
        d = d.squeeze(-1)
    check_step(
        step,
        step.arena(H, P, S),
        lambda states, table: mamba2(*inputs, states, table, d=d, dt_bias=dt_bias),
        make_advance(inputs, d, dt_bias),
        2e-5,
    )


@settings(max_examples=40)
@given(step=state_steps(), decay=st.sampled_from([1e-4, 1.0, 50.0]), has_z=st.booleans())
def test_any_step_of_mamba1_equals_token_by_token(step: StateStep, decay: float, has_z: bool) -> None:
    inputs = make_inputs1(step.num_tokens, decay)
    d, dt_bias = torch.randn(2, CHANNELS)
    z = torch.randn(step.num_tokens, CHANNELS) if has_z else None
    check_step(
        step,
        step.arena(CHANNELS, S),
        lambda states, table: mamba1(*inputs, states, table, d=d, dt_bias=dt_bias, z=z),
        make_advance1(inputs, d, dt_bias, z),
        2e-5,
    )


def run_plainly(inputs: Inputs) -> Callable[[Tensor, SegmentTable], Tensor]:
    zero = torch.zeros(inputs.dt.shape[1])
    kernel = mamba1 if inputs.x.dim() == 2 else mamba2
    return lambda states, table: kernel(*inputs, states, table, d=zero, dt_bias=zero)


@pytest.mark.parametrize("kernel", ["mamba1", "mamba2"])
@pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["one by one", "together"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_of_many_chunks(kernel: str, min_bytes: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_BLOCK_BYTES", 1 if min_bytes else 3000)
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", min_bytes)
    step = step_of([200, 1, 64, 130, 1], [[64, 100, 101], [], [], [128], []], ["null", "own", "own", "fresh", "shared"])
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    if kernel == "mamba1":
        inputs, arena = make_inputs1(step.num_tokens), step.arena(CHANNELS, S, dtype=dtype)
        zero = torch.zeros(CHANNELS)
        check_step(step, arena, run_plainly(inputs), make_advance1(inputs, zero, zero, None), tolerance)
    else:
        inputs, arena = make_inputs(step.num_tokens), step.arena(H, P, S, dtype=dtype)
        zero = torch.zeros(H)
        check_step(step, arena, run_plainly(inputs), make_advance(inputs, zero, zero), tolerance)


def test_the_step_size_is_limited() -> None:
    step = step_of([1, 30])
    inputs = make_inputs(31)
    d, dt_bias, limit = torch.zeros(H), torch.randn(H), (0.3, 0.9)
    check_step(
        step,
        step.arena(H, P, S),
        lambda states, table: mamba2(*inputs, states, table, dt_bias=dt_bias, dt_limit=limit),
        make_advance(inputs, d, dt_bias, limit),
        2e-5,
    )


@pytest.mark.parametrize("length", [1, 150])
def test_mamba2_equals_the_models_own_function(length: int) -> None:
    theirs = pytest.importorskip("transformers.models.bamba.modeling_bamba").mamba2_chunk_scan
    inputs, d, dt_bias = make_inputs(length), torch.randn(H), torch.randn(H)
    step = step_of([length])
    states = step.arena(H, P, S)[:, 1]
    page = step.segments[0][0].src[0]
    x, dt, a, b, c = inputs
    expected, state = theirs(
        *(x[None], dt[None], a, b[None], c[None]),
        chunk_size=32,
        D=d,
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=states[page : page + 1].clone(),
        return_final_states=True,
    )
    actual = mamba2(*inputs, states, step.table, d=d, dt_bias=dt_bias)
    torch.testing.assert_close(actual, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[page], state[0], rtol=1e-5, atol=1e-5)


def test_mamba2_returns_float32_like_the_models_own_function() -> None:
    inputs = Inputs(*(t.bfloat16() for t in make_inputs(20)))
    step = step_of([1, 19])
    assert run_plainly(inputs)(step.arena(H, P, S)[:, 1], step.table).dtype == torch.float32


def test_mamba1_equals_the_models_own_function_from_a_zero_state() -> None:
    theirs = pytest.importorskip("transformers.models.jamba.modeling_jamba").mamba_selective_scan
    inputs = make_inputs1(40)
    d, dt_bias = torch.randn(2, CHANNELS)
    z = torch.randn(40, CHANNELS)
    step = step_of([40], srcs=["null"])
    states = step.arena(CHANNELS, S)[:, 1]
    x, dt, a, b, c = inputs
    per_channel = (x.t()[None], dt.t()[None], a, b.t()[None], c.t()[None])
    expected, state = theirs(
        *per_channel, D=d, z=z.t()[None], delta_bias=dt_bias, delta_softplus=True, return_last_state=True
    )
    actual = mamba1(*inputs, states, step.table, d=d, z=z, dt_bias=dt_bias)
    torch.testing.assert_close(actual, expected[0].t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[step.segments[0][0].dst[0]], state[0], rtol=1e-5, atol=1e-5)
