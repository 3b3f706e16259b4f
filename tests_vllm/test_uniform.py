"""Our model of one uniform page size against vLLM's own grouping of the same layers."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size, unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from hybridkv.models import catalogue, load_model
from hybridkv.plan import uniform_plan
from hybridkv.spec import ChunkedLocal, LatentAttention, LayerSpec, LinearState, SlidingWindow

MEMORY_BYTES = 80 * 2**30
HYBRIDS = [
    name
    for name in sorted(catalogue().keys() - {"mimo-v2-flash"})  # its layers of one kind differ in sizes
    if len({spec.group for spec in load_model(name).layers}) > 1
    and not any(isinstance(spec, ChunkedLocal) for spec in load_model(name).layers)
]


@pytest.mark.parametrize("name", HYBRIDS)
def test_pages_and_groups_agree_with_vllm(name: str) -> None:
    model = load_model(name)
    uniform = uniform_plan(model, MEMORY_BYTES)
    assert uniform.block_tokens is not None
    specs = {f"{spec.layer}.{spec.kind}": vllm_spec(spec, uniform.block_tokens) for spec in model.layers}

    groups = _get_kv_cache_groups_uniform_page_size(unify_kv_cache_spec_page_size(specs))

    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {uniform.page_bytes}
    assert max(len(group.layer_names) for group in groups) == uniform.group_units
    assert len(groups) == sum(-(-bucket.units // uniform.group_units) for bucket in uniform.buckets)


def vllm_spec(spec: LayerSpec, block_tokens: int) -> KVCacheSpec:
    if isinstance(spec, LinearState):
        return MambaSpec(
            block_size=block_tokens,
            shapes=tuple(part.shape for part in spec.parts),
            dtypes=tuple(getattr(torch, part.dtype) for part in spec.parts),
        )
    heads, dim = spec.parts[0].shape
    common = {"block_size": block_tokens, "num_kv_heads": heads, "dtype": torch.bfloat16}
    if isinstance(spec, LatentAttention):
        return MLAAttentionSpec(head_size=dim + spec.parts[1].shape[1], **common)
    if isinstance(spec, SlidingWindow):
        return SlidingWindowSpec(head_size=dim, sliding_window=spec.window, **common)
    return FullAttentionSpec(head_size=dim, **common)
