"""Families with experts that have no window, or the same in most layers."""

from __future__ import annotations

from hybridkv.models.config import Config
from hybridkv.models.families.uniform import full_everywhere, windows_or_full
from hybridkv.models.families.windows import windows_above
from hybridkv.models.family import Layers, family
from hybridkv.models.feed_forward import deepseek_experts, ernie_experts, hunyuan_experts, mixtral_experts


@family(
    "glm4_moe",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "num_mtp_layers": 1,
    },
    weight_defaults={
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
)
@family(
    "minimax_m2",
    feed_forward=mixtral_experts,
    defaults={
        "hidden_size": 3072,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    weight_defaults={
        "vocab_size": 200064,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    since="5.18",  # before, published checkpoints were rotated in all of each head: their rotary_dim was not read
)
@family(
    "hy_v3",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    weight_defaults={
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
)
@family(
    "ernie4_5_moe",
    feed_forward=ernie_experts,
    defaults={"hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4},
    weight_defaults={
        "vocab_size": 103424,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    },
)
@family(
    "hunyuan_v1_moe",
    feed_forward=hunyuan_experts,
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 290943, "intermediate_size": 11008, "num_experts": 1, "moe_topk": 1},
)
@family(
    "olmoe",
    feed_forward=mixtral_experts,
    defaults={"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 50304, "intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8},
)
def full(cfg: Config) -> Layers:
    return full_everywhere(cfg)


@family(
    "phimoe",
    feed_forward=mixtral_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
    },
    weight_defaults={"vocab_size": 32064, "intermediate_size": 6400, "num_local_experts": 16, "num_experts_per_tok": 2},
)
def full_or_windows(cfg: Config) -> Layers:
    return windows_or_full(cfg)


@family(
    "dots1",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 4608,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    weight_defaults={
        "vocab_size": 152064,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
    },
)
def dots1(cfg: Config) -> Layers:
    return windows_above(cfg)
