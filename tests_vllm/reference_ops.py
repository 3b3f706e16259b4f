"""Operations of vLLM in torch and float32, on its own caches and states: see `stand_ins.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_DIGIT_BITS = 7
"""bfloat16 has all integers of so many bits."""

# --- linear attention -------------------------------------------------------------------------------------------------


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences lie end to end in `[1, tokens, heads, ..]`. States `[slots, heads, K, V]` change in place."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    assert output_final_state
    assert not head_first
    assert use_qk_l2norm_in_kernel
    query, key = (_normalised(part.float(), eps) for part in (query, key))
    query, key = (part.repeat_interleave(value.shape[2] // key.shape[2], dim=2) for part in (query, key))
    output, ends = torch.empty_like(value), cu_seqlens.tolist()
    for start, end, slot in zip(ends, ends[1:], initial_state_indices.tolist(), strict=False):
        parts = [part[:, start:end] for part in (query, key, value, g, beta)]
        state = initial_state[slot : slot + 1]
        output[:, start:end], last = torch_chunk_gated_delta_rule(*parts, initial_state=state, output_final_state=True)
        state.copy_(last)
    return output, initial_state


def _normalised(rows: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + eps)


def gated_delta_rule(
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> torch.Tensor:
    """The same with its gates, for sequences of one token."""
    import vllm._custom_ops as ops

    g, beta = ops.fused_gdn_gating_cpu(A_log=A_log, a=a, b=b, dt_bias=dt_bias)
    slots, normalise = initial_state_indices, use_qk_l2norm_in_kernel
    output, _ = delta_rule(q, k, v, g, beta, initial_state_source, True, cu_seqlens, False, normalise, slots)
    return output.transpose(0, 1)


def delta_rule_example(dtype: torch.dtype) -> dict[str, Any]:
    """Two sequences of 150 and 70 tokens, whose states are in slots 2 and 0."""
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, 220, *shape, generator=source)

    return {
        "query": normal(2, 128).to(dtype),
        "key": normal(2, 128).to(dtype),
        "value": normal(4, 128).to(dtype),
        "g": -normal(4).abs() / 50,
        "beta": normal(4).sigmoid().to(dtype),
        "initial_state": torch.randn(3, 4, 128, 128, generator=source) / 10,
        "output_final_state": True,
        "cu_seqlens": torch.tensor([0, 150, 220], dtype=torch.int32),
        "head_first": False,
        "use_qk_l2norm_in_kernel": True,
        "initial_state_indices": torch.tensor([2, 0], dtype=torch.int32),
    }


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    s_aux: torch.Tensor | None,
    **_: Any,
) -> None:
    """Causal attention to caches `[blocks, heads, tokens, dim]`, in which vLLM has reordered tokens and dims."""
    assert causal
    assert (alibi_slopes, s_aux, softcap) == (None, None, 0)
    assert sliding_window in (-1, (-1, -1)), sliding_window
    ends = query_start_loc.tolist()
    for start, end, length, blocks in zip(ends, ends[1:], seq_lens.tolist(), block_table, strict=False):
        keys, values = (
            _read(cache, which, blocks, length).float() for which, cache in enumerate((key_cache, value_cache))
        )
        visible = torch.arange(length) <= torch.arange(length - (end - start), length).unsqueeze(-1)
        queries = query[start:end].transpose(0, 1).float()
        found = scaled_dot_product_attention(queries, keys, values, visible, scale=scale, enable_gqa=True)
        output[start:end] = found.transpose(0, 1).reshape(output[start:end].shape)


def _read(cache: torch.Tensor, which: int, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """`[heads, tokens, dim]` of one sequence."""
    _, heads, block_tokens, dim = cache.shape
    used = cache[blocks[: -(-length // block_tokens)].long()].flatten(2)
    ordered = used[..., _places(block_tokens, dim, cache.dtype)[which]].view(-1, heads, block_tokens, dim)
    return ordered.transpose(0, 1).flatten(1, 2)[:, :length]


@functools.cache
def _places(block_tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """For K and for V: where each element of a block lies after vLLM's own write, one digit a write."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    count, isa = block_tokens * dim, _get_attn_isa(dtype, block_tokens, dim)
    numbers = torch.zeros(2, count, dtype=torch.int64)
    for shift in range(0, count.bit_length(), _DIGIT_BITS):
        digits = ((torch.arange(count) >> shift) % (1 << _DIGIT_BITS)).to(dtype).view(block_tokens, 1, dim)
        caches = torch.zeros(2, 1, 1, block_tokens, dim, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(digits, digits, *caches, torch.arange(block_tokens), isa)
        numbers += caches.view(2, count).to(torch.int64) << shift
    return numbers.argsort(dim=-1)
