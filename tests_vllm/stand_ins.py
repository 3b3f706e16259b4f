"""Stand-ins for operations of vLLM that need bfloat16 instructions, for ARM CPUs that have none.

vLLM's build for ARM compiles its operations on bfloat16 with these instructions, and has no other code for them: on
other CPUs a process that calls one ends with SIGILL. `install` lets a process of its own call such an operation. Only
if that ends so, the operations that the tests' models need are replaced by torch's, in float32. Caches and states keep
the layouts of vLLM, which still writes K and V itself, and float32 models run as before.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import platform
import resource
import signal
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

REASON = "vLLM's operation chunk_gated_delta_rule_cpu needs bfloat16 instructions, which this CPU lacks (SIGILL)"
_DIGIT_BITS = 7
"""bfloat16 has integers of so many bits."""


def install() -> bool:
    """Replace the operations if they cannot run here: then True. It forks: call it before any OpenMP."""
    if not is_needed():
        return False
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as moe
    import vllm.model_executor.layers.utils as layers

    own_attention, own_dispatch = ops.cpu_attention_with_kv_cache, layers.dispatch_cpu_unquantized_gemm
    own_experts, own_packing = moe.cpu_fused_moe, moe.cpu_prepack_moe_weight

    def attend(query: torch.Tensor, **options: Any) -> None:
        (attention if query.dtype == torch.bfloat16 else own_attention)(query=query, **options)

    def run_experts(out: torch.Tensor, *args: Any) -> None:
        (experts if out.dtype == torch.bfloat16 else own_experts)(out, *args)

    def pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
        packed: torch.Tensor = weight.clone() if weight.dtype == torch.bfloat16 else own_packing(weight, isa)
        return packed

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.dtype == torch.bfloat16 and layer.weight.ndim == 2:
            layer.cpu_linear = float32_linear(layer.weight)
        else:
            own_dispatch(layer, remove_weight)

    ops.chunk_gated_delta_rule_cpu = delta_rule
    ops.fused_sigmoid_gating_delta_rule_update_cpu = gated_delta_rule
    ops.cpu_attention_with_kv_cache = attend
    moe.cpu_fused_moe, moe.cpu_prepack_moe_weight = run_experts, pack
    layers.dispatch_cpu_unquantized_gemm = dispatch
    return True


def is_needed() -> bool:
    """Whether a process that calls an operation on bfloat16 ends with SIGILL. The same flags compile all of them."""
    if (
        platform.machine() != "aarch64"
    ):  # On x86, tiles raise SIGILL, too, as long as the process has not asked for them.
        return False
    import vllm._custom_ops as ops

    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            ops.chunk_gated_delta_rule_cpu(**delta_rule_example(torch.bfloat16))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL


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


# --- dense layers -----------------------------------------------------------------------------------------------------


def experts(
    out: torch.Tensor,
    rows: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    act: str,
    isa: str,
    skip_weighted: bool = False,
) -> None:
    """Weights are `[experts, out, in]`, as in the checkpoint."""
    assert (w13_bias, w2_bias, act, skip_weighted) == (None, None, "silu", False)
    rows, total = rows.float(), torch.zeros(out.shape)
    for expert in range(len(w13)):
        chosen, rank = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(rows[chosen], w13[expert].float()).chunk(2, dim=-1)
        total.index_add_(
            0, chosen, linear(silu(gate) * up, w2[expert].float()) * topk_weights[chosen, rank].unsqueeze(-1)
        )
    out.copy_(total)


def float32_linear(weight: torch.Tensor) -> Any:
    """torch runs a product of bfloat16 matrices on such a CPU, but takes a hundred times as long."""
    wide = weight.detach().float()

    def computed(rows: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(rows.float(), wide, None if bias is None else bias.float()).to(rows.dtype)

    return computed
