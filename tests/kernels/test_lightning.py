"""Lightning attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridkv.kernels import chunks, resident
from hybridkv.kernels.lightning import lightning
from tests.kernels.states import Advance, StateStep, check_step, state_steps, step_of

H, D = 3, 5


def make_advance(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Advance:
    q, k, v, slope = (x.double() for x in (q, k, v, slope))

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = (-slope).exp()[:, None, None] * state + k[row].unsqueeze(2) * v[row].unsqueeze(1)
        return state, (q[row].unsqueeze(1) @ state).squeeze(1)

    return advance


def check(step: StateStep, slope: Tensor, dtype: Any = torch.float32, tolerance: float = 2e-5) -> None:
    q, k, v = torch.randn(3, step.num_tokens, H, D)
    check_step(
        step,
        step.arena(H, D, D, dtype=dtype),
        lambda states, table: lightning(q, k, v, slope, states, table),
        make_advance(q, k, v, slope),
        tolerance,
    )


@settings(max_examples=40)
@given(step=state_steps(), steepest=st.sampled_from([1e-4, 0.5, 50.0]))
def test_any_step_equals_token_by_token(step: StateStep, steepest: float) -> None:
    check(step, torch.rand(H) * steepest)


@pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["one by one", "together"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_of_many_chunks(min_bytes: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_BLOCK_BYTES", 1 if min_bytes else 3000)
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", min_bytes)
    step = step_of([200, 1, 64, 130, 1], [[64, 100, 101], [], [], [128], []], ["null", "own", "own", "fresh", "shared"])
    check(step, torch.rand(H) + 0.1, dtype, 5e-5 if dtype == torch.float32 else 1e-1)
