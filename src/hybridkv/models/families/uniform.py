"""Families whose layers are all alike: full attention, or windows, in each of them."""

from __future__ import annotations

from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, family, given_or
from hybridkv.models.feed_forward import dense, mixtral_experts, qwen_experts
from hybridkv.models.layers import FULL_OR_SLIDING, full_attention, has_window


@family(
    "llama",
    feed_forward=dense,
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 32000, "intermediate_size": 11008},
)
def llama(cfg: Config) -> Layers:
    return Layers(given_or(cfg, all_layers(cfg, "full_attention")), {"full_attention": full_attention})


@family(
    "mistral",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    weight_defaults={"vocab_size": 32000, "intermediate_size": 14336},
    plan_only="not compared with the stock model yet",
)
@family(
    "mixtral",
    feed_forward=mixtral_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
    },
    weight_defaults={"vocab_size": 32000, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
)
@family(
    "qwen3_moe",
    feed_forward=qwen_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    weight_defaults={
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    plan_only="not compared with the stock model yet",
)
def all_alike(cfg: Config) -> Layers:
    kind = "sliding_attention" if has_window(cfg) else "full_attention"
    return Layers(given_or(cfg, all_layers(cfg, kind)), FULL_OR_SLIDING)
