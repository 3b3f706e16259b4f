"""The gated delta rule, GDN and KDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridkv.kernels import chunks, resident
from hybridkv.kernels.delta import gated_delta, kimi_delta
from hybridkv.kernels.segments import SegmentTable
from tests.kernels.states import Advance, StateStep, check_step, state_steps, step_of

H, DK, DV = 2, 8, 6


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def make_inputs(num_tokens: int, channels: bool, log_decay: float = 1.0, heads: int = H) -> Inputs:
    q, k = torch.randn(2, num_tokens, heads, DK)
    v = torch.randn(num_tokens, heads, DV)
    g = -torch.rand((num_tokens, heads, DK) if channels else (num_tokens, heads)) * log_decay
    return Inputs(q, k, v, g, torch.rand(num_tokens, heads))


def make_advance(inputs: Inputs, l2norm: bool = True) -> Advance:
    q, k, v, g, beta = (x.double() for x in inputs)
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = g.exp() if g.dim() == 3 else g.exp().unsqueeze(-1)

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * decay[row].unsqueeze(-1)
        change = beta[row][:, None, None] * (v[row].unsqueeze(1) - k[row].unsqueeze(1) @ state)
        state = state + k[row].unsqueeze(2) * change
        return state, (q[row].unsqueeze(1) @ state).squeeze(1) * DK**-0.5

    return advance


def run(inputs: Inputs, l2norm: bool = True) -> Callable[[Tensor, SegmentTable], Tensor]:
    kernel = kimi_delta if inputs.g.dim() == 3 else gated_delta
    return lambda states, table: kernel(*inputs, states, table, l2norm=l2norm)


def check(step: StateStep, inputs: Inputs, l2norm: bool = True, tolerance: float = 2e-5) -> None:
    arena = step.arena(H, DK, DV)
    check_step(step, arena, run(inputs, l2norm), make_advance(inputs, l2norm), tolerance)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@settings(max_examples=40)
@given(step=state_steps(), log_decay=st.sampled_from([1e-4, 1.0, 50.0]), l2norm=st.booleans())
def test_any_step_equals_token_by_token(channels: bool, step: StateStep, log_decay: float, l2norm: bool) -> None:
    inputs = make_inputs(step.num_tokens, channels, log_decay)
    if not l2norm:
        inputs = inputs._replace(k=inputs.k / DK**0.5)
    check(step, inputs, l2norm)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("block_bytes", [1, 3000, 1 << 30])
def test_spans_of_many_chunks(channels: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CPU_BLOCK_BYTES", block_bytes)
    step = step_of(
        [200, 1, 64, 130, 3], [[64, 100, 101], [], [], [128], [1, 2]], ["null", "own", "own", "fresh", "null"]
    )
    check(step, make_inputs(step.num_tokens, channels, 0.1))


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_forgetting_everything_again_and_again_stays_exact(channels: bool) -> None:
    """Long sums of decays must not blur the small ones between their ends."""
    step = step_of([128])
    inputs = make_inputs(128, channels, 0.01)
    inputs.g[::2] = -50.0
    inputs.g[40:60] = -50.0
    check(step, inputs, tolerance=2e-6)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_any_split_into_steps_gives_the_same(channels: bool) -> None:
    inputs = make_inputs(150, channels, 0.1)
    step = step_of([150])
    whole = step.arena(H, DK, DV)[:, 1]
    split = whole.clone()
    expected = run(inputs)(whole, step.table)
    row, parts = 0, []
    for length in (1, 70, 1, 1, 77):
        piece = Inputs(*(x[row : row + length] for x in inputs))
        parts.append(run(piece)(split, step_of([length]).table))
        row += length
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("length", [1, 150])
def test_equals_the_models_own_function(channels: bool, length: int) -> None:
    if channels:
        theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear").chunk_kimi_delta_attention
    else:
        theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule
    inputs = make_inputs(length, channels, 0.5)
    step = step_of([length])
    states = step.arena(H, DK, DV)[:, 1]
    page = step.segments[0][0].src[0]
    batched = (x.unsqueeze(0) for x in inputs)
    expected, state = theirs(
        *batched, initial_state=states[page : page + 1].clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    actual = run(inputs)(states, step.table)
    torch.testing.assert_close(actual, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[page], state[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["one by one", "together"])
def test_states_may_be_half_as_wide(channels: bool, min_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", min_bytes)
    step = step_of([1, 20, 1, 1], srcs=["own", "own", "fresh", "null"])
    inputs = Inputs(*(x.bfloat16() for x in make_inputs(step.num_tokens, channels)))
    arena = step.arena(H, DK, DV, dtype=torch.bfloat16)
    assert run(inputs)(arena[:, 1].clone(), step.table).dtype == torch.bfloat16
    check_step(step, arena, run(inputs), make_advance(inputs), 2e-2)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_large_states_are_updated_one_by_one_with_the_same_result(
    channels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "MIN_BYTES_ONE_BY_ONE", 0)
    step = step_of([1, 1, 3, 1, 1], srcs=["own", "shared", "fresh", "shared", "null"], state_pages=2, page=1)
    check(step, make_inputs(step.num_tokens, channels))
