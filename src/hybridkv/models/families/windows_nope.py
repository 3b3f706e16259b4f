"""Families that mix windows, whose layers have rotary positions, with full attention, whose layers have none (NoPE)."""

from __future__ import annotations

from hybridkv.models import mixer_weights
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, every, family, given_or
from hybridkv.models.feed_forward import deepseek_experts, dense, muse_experts, qwen_experts
from hybridkv.models.layers import FULL_OR_SLIDING, has_window


def _full_every(cfg: Config, interval: str) -> Layers:
    """Full attention at every n-th layer: n is the field `interval`, which is not read where the types are given."""
    if cfg.strings("layer_types") is not None:
        return Layers(given_or(cfg, []), FULL_OR_SLIDING)
    return Layers(every(cfg, cfg.integer(interval), "full_attention", "sliding_attention"), FULL_OR_SLIDING)


@family(
    "cohere2",
    feed_forward=dense,
    defaults={
        "hidden_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    weight_defaults={"vocab_size": 256000, "intermediate_size": 22528, "tie_word_embeddings": True},
)
def cohere2(cfg: Config) -> Layers:
    return _full_every(cfg, "sliding_window_pattern")


@family(
    "exaone4",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    weight_defaults={"vocab_size": 102400, "intermediate_size": 16384},
)
@family(
    "exaone_moe",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    weight_defaults={
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
)
def exaone(cfg: Config) -> Layers:
    """Small models have no windows. Published patterns may be strings such as "LLLG", beside a list of the types."""
    if has_window(cfg):
        return _full_every(cfg, "sliding_window_pattern")
    return Layers(given_or(cfg, all_layers(cfg, "full_attention")), FULL_OR_SLIDING)


@family(
    "afmoe",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": None,
        "head_dim": 128,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
    },
    weight_defaults={
        "vocab_size": 200192,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
    },
    attention_weights=mixer_weights.gated_attention,
)
def afmoe(cfg: Config) -> Layers:
    return _full_every(cfg, "global_attn_every_n_layers")


@family(
    "kolibri1",
    feed_forward=qwen_experts,
    defaults={
        "hidden_size": 2560,
        "num_hidden_layers": 50,
        "num_attention_heads": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 513,
    },
    weight_defaults={
        "vocab_size": 128000,
        "moe_intermediate_size": 512,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "shared_expert_intermediate_size": 512,
    },
    since="5.20",
)
def kolibri1(cfg: Config) -> Layers:
    return Layers(given_or(cfg, every(cfg, 5, "full_attention", "sliding_attention")), FULL_OR_SLIDING)


@family(
    "muse_glimmer_text",
    feed_forward=dense,
    defaults={
        "hidden_size": 6656,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "sliding_window": 2048,
    },
    weight_defaults={"vocab_size": 202048, "intermediate_size": 19968},
    attention_weights=mixer_weights.gated_attention,
)
@family(
    "muse_spark_text",
    feed_forward=muse_experts,
    defaults={
        "hidden_size": 8192,
        "num_hidden_layers": 62,
        "num_attention_heads": 128,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "sliding_window": 2048,
    },
    weight_defaults={
        "vocab_size": 202048,
        "intermediate_size": 16384,
        "moe_hidden_size": 4096,
        "moe_intermediate_size": 4096,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    attention_weights=mixer_weights.gated_attention,
    since="5.20",
)
def muse(cfg: Config) -> Layers:
    """Full attention at every fourth layer, counted from the last."""
    last = cfg.num_layers - 1
    types = ["sliding_attention" if (last - i) % 4 else "full_attention" for i in range(cfg.num_layers)]
    return Layers(given_or(cfg, types), FULL_OR_SLIDING)
