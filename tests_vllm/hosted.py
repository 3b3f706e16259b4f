"""Small models of each family: their config, and the specs that vLLM's own functions make of it,
at any number of ranks.

`test_layers.py` compares the names with those of vLLM's models, which need their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from hybridkv.integrations.vllm.groups import KnownLayer, LayerKey, known_layers
from hybridkv.models.reader import read_config
from hybridkv.spec import DType, ModelSpec

NUM_BLOCKS = 5
BLOCK = 32
"""Tokens of a block of vLLM's. Blocks of states may have others."""
STATE_BLOCK = 96
PADDING = 64
"""Bytes after each state."""
BF16, F32 = torch.bfloat16, torch.float32
KINDS = MambaAttentionBackendEnum


class Family(NamedTuple):
    """A family of models, and the specs that vLLM has for its layers at a tensor-parallel size."""

    config: dict[str, Any]
    specs: Callable[[int], dict[str, KVCacheSpec]]

    def model(self, tp: int = 1, rank: int = 0) -> ModelSpec:
        states = {spec.dtypes[-1] for spec in self.specs(tp).values() if isinstance(spec, MambaSpec)}
        state = DType.parse(str(states.pop())) if states else None
        return read_config(
            self.config | {"dtype": "bfloat16"}, name="tiny", tp=tp, rank=rank, state_dtype=state, source="test"
        )

    def layers(self, tp: int = 1, rank: int = 0) -> dict[LayerKey, KnownLayer]:
        return known_layers(grouped(self.specs(tp)), self.model(tp, rank), 16)


def grouped(specs: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """Layers with equal specs are a group."""
    groups: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        groups.setdefault(spec, []).append(name)
    return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(names, spec) for spec, names in groups.items()])


def heads_of(heads: int, tp: int) -> int:
    """KV heads of a rank: with more ranks than heads, each has one."""
    return max(1, heads // tp)


def full(tp: int, heads: int = 2, dim: int = 16, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads_of(heads, tp), head_size=dim, dtype=BF16, **fields)


def window(tp: int, size: int, heads: int = 2, dim: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=heads_of(heads, tp), head_size=dim, dtype=BF16, sliding_window=size
    )


def state(kind: MambaAttentionBackendEnum, shapes: Any, dtypes: tuple[torch.dtype, ...]) -> MambaSpec:
    plain = MambaSpec(block_size=STATE_BLOCK, shapes=tuple(shapes), dtypes=dtypes, mamba_type=kind)
    return MambaSpec(
        block_size=STATE_BLOCK,
        shapes=tuple(shapes),
        dtypes=dtypes,
        mamba_type=kind,
        page_size_padded=plain.page_size_bytes + PADDING,
    )


def every(num_layers: int, interval: int, others: str, other: KVCacheSpec, last: str, one: KVCacheSpec) -> dict[str, KVCacheSpec]:  # fmt: skip  # noqa: E501
    """Each `interval`-th layer is `one`, the others are `other`."""
    return {
        f"model.layers.{i}.{others if (i + 1) % interval else last}": other if (i + 1) % interval else one
        for i in range(num_layers)
    }


_ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def _qwen(tp: int) -> dict[str, KVCacheSpec]:
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 2, 4, 16, 8, 4)
    gdn = state(KINDS.GDN_ATTN, shapes, MambaStateDtypeCalculator.gated_delta_net_state_dtype(BF16, "auto", "float32"))
    return every(4, 2, "linear_attn", gdn, "self_attn.attn", full(tp))


def _olmo(tp: int) -> dict[str, KVCacheSpec]:
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp, 4, 4, 6, 12, 4)
    gdn = state(KINDS.GDN_ATTN, shapes, MambaStateDtypeCalculator.gated_delta_net_state_dtype(BF16, "auto", "auto"))
    return every(4, 4, "linear_attn", gdn, "self_attn.attn", full(tp, heads=4))


def _kimi(tp: int) -> dict[str, KVCacheSpec]:
    shapes = MambaStateShapeCalculator.kda_state_shape(tp, 4, 8)
    kda = state(KINDS.GDN_ATTN, shapes, MambaStateDtypeCalculator.kda_state_dtype(BF16, "auto"))
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32 + 8, dtype=BF16)
    return every(4, 2, "self_attn", kda, "self_attn", latent)


def _mamba2(tp: int, heads: int, dim: int, groups: int, size: int) -> MambaSpec:
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp, heads * dim, groups, heads, dim, size, 4)
    return state(KINDS.MAMBA2, shapes, MambaStateDtypeCalculator.mamba2_state_dtype(BF16, "auto", "float32"))


def _nemotron(tp: int) -> dict[str, KVCacheSpec]:
    mixer = _mamba2(tp, 4, 8, 2, 16)
    layers = {0: ("mixer", mixer), 2: ("mixer.attn", full(tp)), 3: ("mixer", mixer)}
    return {f"model.layers.{i}.{name}": spec for i, (name, spec) in layers.items()}


def _bamba(tp: int) -> dict[str, KVCacheSpec]:
    return every(2, 2, "mixer", _mamba2(tp, 8, 16, 1, 12), "self_attn.attn", full(tp))


def _falcon(tp: int) -> dict[str, KVCacheSpec]:
    mixer = _mamba2(tp, 4, 8, 1, 16)
    return {f"model.layers.{i}.attn": full(tp) for i in range(2)} | {f"model.{2 + i}.mixer": mixer for i in range(2)}


def _zamba(tp: int) -> dict[str, KVCacheSpec]:
    mixer = _mamba2(tp, 8, 16, 2, 24)
    return {f"model.attn.{i}": full(tp, 4, 32) for i in range(2)} | {f"{2 + i}.mixer": mixer for i in range(4)}


def _jamba(tp: int) -> dict[str, KVCacheSpec]:
    shapes = MambaStateShapeCalculator.mamba1_state_shape(tp, 128, 6, 4)
    mamba = state(KINDS.MAMBA1, shapes, MambaStateDtypeCalculator.mamba1_state_dtype(BF16, "auto", "float32"))
    return every(4, 2, "mixer", mamba, "attn", full(tp))


def _lfm2(tp: int) -> dict[str, KVCacheSpec]:
    shapes = MambaStateShapeCalculator.short_conv_state_shape(tp, 64, 3)
    conv = state(KINDS.SHORT_CONV, shapes, MambaStateDtypeCalculator.short_conv_state_dtype(BF16, "auto"))
    return every(4, 2, "short_conv", conv, "self_attn.attn", full(tp))


def _minimax(tp: int) -> dict[str, KVCacheSpec]:
    shapes = MambaStateShapeCalculator.linear_attention_state_shape(4, tp, 16)
    dtypes = MambaStateDtypeCalculator.linear_attention_state_dtype(BF16, "float32")
    return every(4, 2, "self_attn", state(KINDS.LINEAR, shapes, dtypes), "self_attn.attn", full(tp))


def _llama4(tp: int) -> dict[str, KVCacheSpec]:
    heads = heads_of(2, tp)
    chunked = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=16, dtype=BF16, attention_chunk_size=128
    )
    return every(4, 2, "self_attn.attn", chunked, "self_attn.attn", full(tp))


_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 12, "mamba_d_conv": 4}

FAMILIES = {
    "qwen3_next": Family({**_ATTENTION, **_GDN, "num_hidden_layers": 4, "full_attention_interval": 2}, _qwen),
    "olmo_hybrid": Family(
        {
            **_ATTENTION,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 12,
        },
        _olmo,
    ),
    "gemma3_text": Family(
        {**_ATTENTION, "num_hidden_layers": 4, "sliding_window": 64, "sliding_window_pattern": 2},
        lambda tp: every(4, 2, "self_attn.attn", window(tp, 64), "self_attn.attn", full(tp)),
    ),
    "gpt_oss": Family(
        {**_ATTENTION, "num_key_value_heads": 1, "num_hidden_layers": 2, "sliding_window": 48},
        lambda tp: every(2, 2, "attn.attn", window(tp, 48, 1), "attn.attn", full(tp, 1)),
    ),
    "llama4_text": Family(
        {**_ATTENTION, "num_hidden_layers": 4, "attention_chunk_size": 128, "no_rope_layer_interval": 2}, _llama4
    ),
    "kimi_linear": Family(
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
            },
        },
        _kimi,
    ),
    "nemotron_h": Family(
        {
            **_ATTENTION,
            "hybrid_override_pattern": "M-*M",
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
        },
        _nemotron,
    ),
    "bamba": Family({**_ATTENTION, **_BAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1]}, _bamba),
    "falcon_h1": Family(
        {
            **_ATTENTION,
            **_BAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
        },
        _falcon,
    ),
    "zamba2": Family(
        {
            **_ATTENTION,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 24,
        },
        _zamba,
    ),
    "jamba": Family(
        {**_ATTENTION, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 6},
        _jamba,
    ),
    "lfm2": Family({**_ATTENTION, "num_hidden_layers": 4, "full_attn_idxs": [1, 3]}, _lfm2),
    "minimax": Family(
        {**_ATTENTION, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}, _minimax
    ),
}
for _name, _family in FAMILIES.items():
    _family.config["model_type"] = _name
