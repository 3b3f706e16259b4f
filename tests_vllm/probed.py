"""Caches as vLLM makes them, and the check that all elements written are read back where the lattices say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from hybridkv.integrations.vllm.probe import probe_kv, probe_latent
from hybridkv.stream.lattice import Lattice

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


class FlashInferSplit:
    """The split of FlashInfer's backend, whose module needs a package that is not here."""

    head_size: int

    def do_kv_cache_update(self, layer: object, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:  # fmt: skip
        by_token(key, value, *kv_cache.transpose(1, 2).split(self.head_size, dim=-1), slot_mapping)
