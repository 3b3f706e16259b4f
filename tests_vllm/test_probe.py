"""Probes of vLLM's cache blocks: every element that a backend writes is read back where the lattice says.

Caches are made by vLLM's own `create_kv_cache_views`, for every layout that a backend supports. On CPU the real kernels
write. Kernels of GPU backends cannot run here: a plain write by index stands in for the kernel, behind the backend's
own code that splits a cache into K and V.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops
from vllm._aiter_ops import rocm_aiter_ops
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)

from hybridkv.integrations.vllm import probe
from hybridkv.integrations.vllm.lattice import Axis, Lattice
from hybridkv.integrations.vllm.probe import probe_kv, probe_latent

NUM_BLOCKS = 5
NUM_LAYERS = 3
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def new_cache(spec: AttentionSpec, layout: KVCacheLayout, kernel_block_size: int | None = None) -> torch.Tensor:
    """The middle layer of three, with random bytes."""
    strides = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    size = NUM_LAYERS * NUM_BLOCKS * spec.page_size_bytes
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    placed = KVCacheTensor(size, [f"layer{number}" for number in range(NUM_LAYERS)], strides[0], strides[1])
    return create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel_block_size)[1]


def new_impl(kind: type, **fields: Any) -> Any:
    """An implementation without its constructor, which needs a whole engine."""
    impl: Any = object.__new__(kind)
    impl.attn_type, impl.kv_cache_dtype = AttentionType.DECODER, "auto"
    for name, value in fields.items():
        setattr(impl, name, value)
    return impl


def new_layer(impl: Any, heads: int, dim: int, value_dim: int | None = None, **fields: Any) -> Any:
    scale = torch.tensor(1.0)
    return SimpleNamespace(
        impl=impl,
        num_kv_heads=heads,
        head_size=dim,
        head_size_v=value_dim or dim,
        _k_scale=scale,
        _v_scale=scale,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
        **fields,
    )


def cells(cache: torch.Tensor) -> np.ndarray:
    """All bits of the storage that has this cache, from its first element on."""
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    kind = np.uint16 if cache.itemsize == 2 else np.uint32
    return raw.numpy().view(kind)[cache.storage_offset() :]


def assert_reads_back(found: tuple[Lattice, Lattice] | None, cache: torch.Tensor, shapes: list[tuple[int, ...]],
                      write: Callable[[list[torch.Tensor], torch.Tensor], None]) -> None:  # fmt: skip
    """Tokens are written in random order to all blocks, then read where the lattices say."""
    assert found is not None
    blocks, tokens = cache.shape[0], cache.shape[-2]
    slots = torch.randperm(blocks * tokens)
    parts = [torch.randn(blocks * tokens, *shape).to(cache.dtype) for shape in shapes]
    write(parts, slots)
    bits = cells(cache)
    for part, one in zip(parts, found, strict=True):
        assert one.shape == (blocks, tokens, *part.shape[1:])
        at_slot = torch.empty_like(part)
        at_slot[slots] = part
        assert np.array_equal(
            bits[one.places() // cache.itemsize].reshape(part.shape), cells(at_slot).reshape(part.shape)
        )


def check_kv(layer: Any, cache: torch.Tensor) -> tuple[Lattice, Lattice]:
    before = cells(cache).copy()
    found = probe_kv(layer, cache)
    assert np.array_equal(cells(cache), before), "a probe wrote to the live cache"
    shapes = [(layer.num_kv_heads, layer.head_size), (layer.num_kv_heads, layer.head_size_v)]
    update = layer.impl.do_kv_cache_update
    assert_reads_back(found, cache, shapes, lambda parts, slots: update(layer, *parts, cache, slots))
    assert found is not None
    return found


def check_latent(impl: Any, cache: torch.Tensor, rank: int, rope: int) -> tuple[Lattice, Lattice]:
    scale = torch.tensor(1.0)
    layer: Any = SimpleNamespace(
        impl=impl, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_cache_dtype="auto", _k_scale=scale
    )
    found = probe_latent(layer, cache)
    assert probe_latent(layer, cache.squeeze(1)) == found

    def write(parts: list[torch.Tensor], slots: torch.Tensor) -> None:
        impl.do_kv_cache_update(parts[0], parts[1].unsqueeze(1), cache.squeeze(1), slots, "auto", scale)

    assert_reads_back(found, cache.squeeze(1), [(rank,), (rope,)], write)
    assert found is not None
    return found


def check_cpu(
    isa: str, block: int, heads: int, dim: int, dtype: torch.dtype, padding: int = 0
) -> tuple[Lattice, Lattice]:
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=dim, dtype=dtype)
    if padding:
        spec = replace(spec, page_size_padded=spec.page_size_bytes + padding)
    return check_kv(
        new_layer(new_impl(CPUAttentionBackendImpl), heads, dim, isa=isa), new_cache(spec, KVCacheLayout.LBHNC)
    )


# The real write on CPU.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [32, 128, 384, 640])
@pytest.mark.parametrize(("isa", "heads", "dim"), [
    ("vec", 1, 32), ("vec", 1, 256), ("vec", 2, 64), ("vec", 3, 96), ("vec", 4, 128), ("vec", 8, 64), ("vec", 5, 192),
    ("vec16", 1, 80), ("vec16", 2, 112), ("vec16", 8, 32), ("vec16", 4, 128),
])  # fmt: skip
def test_cpu(isa: str, block: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """K lies transposed inside a (block, head), V as the model has it."""
    keys, values = check_cpu(isa, block, heads, dim, dtype)
    nbytes = dtype.itemsize
    block_bytes = heads * block * 2 * dim * nbytes
    blocks, by_head = (Axis(NUM_BLOCKS, block_bytes),), (Axis(heads, block_bytes // heads),) if heads > 1 else ()
    assert keys == Lattice(0, (blocks, (Axis(block, nbytes),), by_head, (Axis(dim, block * nbytes),)))
    half = block * dim * nbytes
    assert values == Lattice(half, (blocks, (Axis(block, dim * nbytes),), by_head, (Axis(dim, nbytes),)))


def test_cpu_with_the_largest_blocks() -> None:
    check_cpu("vec", 640, 8, 256, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_with_padded_pages(dtype: torch.dtype) -> None:
    check_cpu("vec", 128, 2, 64, dtype, padding=4096 + 64)


AMX = """
import sys, torch
torch.cpu._is_avx512_bf16_supported = lambda: True  # vLLM then loads its library for AMX.
sys.path.insert(0, sys.argv[1])
import test_probe
test_probe.check_amx()
"""


def check_amx() -> None:
    """Keys: tokens in groups of 16, pairs of dims side by side. Values: dims in groups of 16, pairs of tokens."""
    for block in (32, 128, 640):
        for heads, dim in ((1, 64), (2, 256), (3, 96)):
            keys, values = check_cpu("amx", block, heads, dim, torch.bfloat16)
            assert keys.axes[1] == (Axis(block // 16, 32 * dim), Axis(16, 4))
            assert keys.axes[3] == (Axis(dim // 2, 64), Axis(2, 2))
            assert values.axes[1] == (Axis(block // 2, 64), Axis(2, 2))
            assert values.axes[3] == (Axis(dim // 16, 32 * block), Axis(16, 4))
    check_amx_latents()


def check_amx_latents() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    check_latent(new_impl(AMXMLAImpl), new_cache(spec, KVCacheLayout.LBHNC), 512, 64)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the library for AMX needs AVX-512")
def test_amx() -> None:
    """The write for AMX only moves elements: it also runs on machines without AMX, in a process of its own."""
    command = [sys.executable, "-c", AMX, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == -signal.SIGILL:
        pytest.skip("this processor cannot run the library for AMX")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "rank", "rope"), [(16, 512, 64), (64, 32, 8)])
def test_latents_on_cpu(block: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=rank + rope, dtype=dtype)
    latents, ropes = check_latent(new_impl(CPUMLAImpl), new_cache(spec, KVCacheLayout.LBHNC), rank, rope)
    row = (rank + rope) * dtype.itemsize
    axes = ((Axis(NUM_BLOCKS, block * row),), (Axis(block, row),))
    assert latents == Lattice(0, (*axes, (Axis(rank, dtype.itemsize),)))
    assert ropes == Lattice(rank * dtype.itemsize, (*axes, (Axis(rope, dtype.itemsize),)))


# Backends of GPUs. What stands in for their kernels:


def by_token(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
             *_: object) -> None:  # fmt: skip
    """Caches `[blocks, tokens, heads, dim]`; or head by head, `[blocks, heads, dim / x, tokens, x]` for K."""
    if keys.dim() == 4:
        block, token = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, token], values[block, token] = key, value
    else:
        block, token = slots // keys.shape[3], slots % keys.shape[3]
        keys[block, :, :, token] = key.unflatten(-1, (-1, keys.shape[-1]))
        values[block, :, :, token] = value


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


class FlashInferSplit:
    """The split of FlashInfer's backend, whose module needs a package that is not here."""

    head_size: int

    def do_kv_cache_update(self, layer: object, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:  # fmt: skip
        by_token(key, value, *kv_cache.transpose(1, 2).split(self.head_size, dim=-1), slot_mapping)


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


# What has no probed layout.


def no_layout(update: Callable[..., None], dtype: torch.dtype = torch.bfloat16) -> bool:
    layer = new_layer(SimpleNamespace(do_kv_cache_update=update), 2, 32)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=dtype)
    return probe_kv(layer, new_cache(spec, KVCacheLayout.LBNHC)) is None


def plain(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    by_token(key, value, *cache.transpose(1, 2).split(32, dim=-1), slots)


def test_a_write_that_leaves_an_element_out() -> None:
    assert not no_layout(plain)
    assert no_layout(lambda layer, key, value, cache, slots: plain(layer, key[:-1], value[:-1], cache, slots[:-1]))
    assert no_layout(lambda *_: None)


def test_a_write_that_stores_an_element_twice() -> None:
    def update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        plain(layer, key, value, cache, slots)
        cache[0, 0, 0, 0] = cache[0, 0, 0, 1]

    assert no_layout(update)


def test_a_write_that_swaps_two_elements() -> None:
    def update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        plain(layer, key, value, cache, slots)
        cache[1, 1, 7, :2] = cache[1, 1, 7, :2].flip(0)

    assert no_layout(update)


def test_a_write_whose_blocks_differ() -> None:
    def update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        plain(layer, key, value, cache, slots)
        cache[1] = cache[1].roll(1, -1)

    assert no_layout(update)


def test_blocks_in_another_order_than_the_caches() -> None:
    assert no_layout(lambda layer, key, value, cache, slots: plain(layer, key, value, cache, slots.roll(32)))


@pytest.mark.parametrize(("through", "dtype"), [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float16),
    (torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float16),
])  # fmt: skip
def test_a_write_that_rounds(through: torch.dtype, dtype: torch.dtype) -> None:
    def update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        plain(layer, key.to(through).to(dtype), value.to(through).to(dtype), cache, slots)

    assert no_layout(update, dtype)


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 1.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_write_that_scales(factor: float, dtype: torch.dtype) -> None:
    assert no_layout(lambda layer, key, value, cache, slots: plain(layer, key * factor, value, cache, slots), dtype)


def test_quantised_caches() -> None:
    layer = new_layer(new_impl(CPUAttentionBackendImpl, kv_cache_dtype="fp8"), 2, 64, isa="vec")
    assert probe_kv(layer, torch.zeros(4, 2, 64, 128, dtype=torch.uint8)) is None
    assert probe_kv(layer, torch.zeros(4, 2, 64, 128, dtype=torch.float8_e4m3fn)) is None


def test_a_backend_that_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """Without the instruction set that vLLM's metadata builder sets, with an unknown one, without a write."""
    cache = torch.zeros(4, 2, 64, 128, dtype=torch.bfloat16)
    impl = new_impl(CPUAttentionBackendImpl)
    assert probe_kv(new_layer(impl, 2, 64), cache) is None
    assert "isa" in caplog.text
    assert probe_kv(new_layer(impl, 2, 64, isa="abacus"), cache) is None
    assert probe_kv(new_layer(object(), 2, 64), cache) is None
    assert probe_latent(SimpleNamespace(impl=object(), kv_lora_rank=96, qk_rope_head_dim=32), cache) is None


def test_a_cache_with_one_block() -> None:
    cache = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    keys, _ = check_kv(new_layer(new_impl(FlashInferSplit, head_size=32), 2, 32), cache)
    assert keys.axes[0] == ()


def test_the_size_of_the_scratch_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that lie outside blocks do not make it as large as the cache."""
    spec = FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    layer = new_layer(new_impl(FlashInferSplit, head_size=32), 4, 32)
    monkeypatch.setattr(probe, "MOST_SCRATCH_BYTES", probe.NUM_BLOCKS * spec.page_size_bytes)
    assert probe_kv(layer, new_cache(spec, KVCacheLayout.LHBNC)) is not None
    monkeypatch.setattr(probe, "MOST_SCRATCH_BYTES", probe.NUM_BLOCKS * spec.page_size_bytes - 1)
    assert probe_kv(layer, new_cache(spec, KVCacheLayout.LHBNC)) is None
