"""Probes of the caches of GPU backends, in every layout that they support.

Their kernels cannot run here: a plain write by index stands in for the kernel, behind the backend's own code that
splits a cache into K and V.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from probed import DTYPES, NUM_BLOCKS, FlashInferSplit, by_token, check_kv, check_latent, new_cache, new_impl, new_layer
from vllm import _custom_ops
from vllm._aiter_ops import rocm_aiter_ops
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MLAAttentionSpec

from hybridkv.stream.boxes import Axis
from hybridkv.stream.lattice import Lattice

# What stands in for their kernels:


def side_by_side(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: object) -> None:
    """One cache `[blocks, tokens, heads, K + V]`."""
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat([key, value], -1)


def shuffled(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
             *_: object) -> None:  # fmt: skip
    """K `[blocks, heads, dim / x, tokens, x]` and V `[blocks, heads, tokens / x, dim, x]`, in place of other shapes."""
    blocks, tokens, heads, dim = keys.shape
    x = 16 // keys.itemsize
    by_head = dim * tokens
    keys = keys.as_strided((blocks, heads, dim // x, tokens, x), (keys.stride(0), by_head, tokens * x, x, 1))
    values = values.as_strided((blocks, heads, tokens // x, dim, x), (values.stride(0), by_head, dim * x, x, 1))
    block, token = slots // tokens, slots % tokens
    keys[block, :, :, token] = key.unflatten(-1, (-1, x))
    values[block, :, token // x, :, token % x] = value


def latent_rows(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **_: object
) -> None:
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat([latent, rope], -1)


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: import_module(f"vllm.v1.attention.backends.{name}") for name in (
        "flash_attn", "triton_attn", "rocm_attn", "rocm_segmented_attn", "rocm_aiter_fa", "flash_attn_diffkv",
        "triton_attn_diffkv")}  # fmt: skip
    monkeypatch.setattr(modules["flash_attn"], "reshape_and_cache_flash", by_token, raising=False)
    for name in ("triton_attn", "rocm_attn", "rocm_segmented_attn"):
        monkeypatch.setattr(modules[name], "triton_reshape_and_cache_flash", by_token)
    for name in ("flash_attn_diffkv", "triton_attn_diffkv"):
        monkeypatch.setattr(modules[name], "triton_reshape_and_cache_flash_diffkv", side_by_side)
    monkeypatch.setattr(modules["rocm_aiter_fa"], "reshape_and_cache_shuffle_triton", shuffled, raising=False)
    monkeypatch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", by_token, raising=False)
    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", by_token)
    monkeypatch.setattr(PagedAttention, "write_to_paged_cache", staticmethod(by_token))
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", latent_rows)


BACKENDS = {
    "flash_attn": "FlashAttention",
    "triton_attn": "TritonAttention",
    "flex_attention": "FlexAttention",
    "rocm_attn": "RocmAttention",
    "rocm_segmented_attn": "RocmSegmentedAttention",
    "rocm_aiter_unified_attn": "RocmAiterUnifiedAttention",
    "rocm_aiter_fa": "AiterFlashAttention",
    "b12x": "B12xPagedAttention",
    "flash_attn_diffkv": "FlashAttentionDiffKV",
    "triton_attn_diffkv": "TritonAttentionDiffKV",
}


def backend_and_impl(name: str) -> tuple[Any, type]:
    module = import_module(f"vllm.v1.attention.backends.{name}")
    return getattr(module, f"{BACKENDS[name]}Backend"), getattr(module, f"{BACKENDS[name]}Impl")


def layouts(backend: Any) -> tuple[KVCacheLayout, ...]:
    return backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)


CASES = [(name, layout) for name in BACKENDS for layout in layouts(backend_and_impl(name)[0])]


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block"), [(1, 128, 16), (2, 64, 64), (8, 32, 48)])
@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda one: getattr(one, "name", one))
def test_gpu_backends(name: str, layout: KVCacheLayout, heads: int, dim: int, block: int, dtype: torch.dtype) -> None:
    backend, kind = backend_and_impl(name)
    value_dim = dim // 2 if "diffkv" in name else dim
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=dim, head_size_v=value_dim, dtype=dtype)
    impl = new_impl(kind, num_kv_heads=heads, head_size=dim, kv_torch_dtype=dtype, _is_per_token_head_quant=False)
    check_kv(new_layer(impl, heads, dim, value_dim), new_cache(backend.customize_spec(spec), layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda one: one.name)
def test_every_layout(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    """FlashInfer's split, in blocks as they are and cut into smaller ones for kernels."""
    spec = FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=32, dtype=dtype)
    layer = new_layer(new_impl(FlashInferSplit, head_size=32), 4, 32)
    cache = new_cache(spec, layout)
    keys, values = check_kv(layer, cache)
    block, head, token, _ = (stride * dtype.itemsize for stride in cache.stride())
    axes = (Axis(NUM_BLOCKS, block),), (Axis(64, token),), (Axis(4, head),), (Axis(32, dtype.itemsize),)
    assert (keys, values) == (Lattice(0, axes), Lattice(32 * dtype.itemsize, axes))
    if layout in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC):
        keys, _ = check_kv(layer, new_cache(spec, layout, kernel_block_size=16))
        assert keys.shape == (4 * NUM_BLOCKS, 16, 4, 32)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.LBHNC], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shuffled_tiles(layout: KVCacheLayout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
    backend, kind = backend_and_impl("rocm_aiter_fa")
    spec = backend.customize_spec(FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=dtype))
    impl = new_impl(kind, num_kv_heads=2, head_size=64)
    keys, values = check_kv(new_layer(impl, 2, 64), new_cache(spec, layout))
    x = 16 // dtype.itemsize
    assert keys.axes[3] == (Axis(64 // x, 32 * 16), Axis(x, dtype.itemsize))
    assert values.axes[1] == (Axis(32 // x, 64 * 16), Axis(x, dtype.itemsize))


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda one: one.name)
def test_latents_on_gpus(layout: KVCacheLayout) -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    check_latent(new_impl(TritonMLAImpl), new_cache(spec, layout), 512, 64)
