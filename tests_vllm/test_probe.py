"""Probes of vLLM's cache blocks on CPU, where its real kernels write, and writes that have no probed layout."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probed import DTYPES, NUM_BLOCKS, FlashInferSplit, by_token, check_kv, check_latent, new_cache, new_impl, new_layer
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MLAAttentionSpec

from hybridkv.integrations.vllm import probe
from hybridkv.integrations.vllm.probe import probe_kv, probe_latent
from hybridkv.stream.boxes import Axis
from hybridkv.stream.lattice import Lattice


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


def test_a_write_that_also_stores_an_element_in_a_spare_cell() -> None:
    def update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        by_token(key, value, *cache.transpose(1, 2).split([32, 16, 16], dim=-1)[:2], slots)
        if copies:
            cache[0, 0, 0, -1] = cache[1, 1, 31, 0]

    layer = new_layer(SimpleNamespace(do_kv_cache_update=update), 2, 32, 16)
    for copies in (False, True):
        assert (probe_kv(layer, torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16)) is None) == copies


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
