"""Families whose layers are all alike: full attention, or windows, in each of them.

Transformers' models of these types do not read `layer_types`. A list that says something else is refused.
"""

from __future__ import annotations

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, family, given_or
from hybridkv.models.feed_forward import dense, mixtral_experts, qwen_experts
from hybridkv.models.layers import FULL_OR_SLIDING, has_window


def _all(cfg: Config, layer_type: str) -> Layers:
    types = given_or(cfg, all_layers(cfg, layer_type))
    for layer, written in enumerate(types):
        if written in FULL_OR_SLIDING and written != layer_type:
            raise ConfigError(
                f"config of {cfg.name}: layer_types has {written!r} for layer {layer}, but every layer of a "
                f"{cfg.model_type} model with this sliding_window is {layer_type!r}; mend one of the two in config.json"
            )
    return Layers(types, {layer_type: FULL_OR_SLIDING[layer_type]})


@family(
    "llama",
    feed_forward=dense,
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 32000, "intermediate_size": 11008},
)
@family(
    "granite",
    feed_forward=dense,
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 32000, "intermediate_size": 11008},
)
@family(
    "qwen3_vl_text",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    weight_defaults={"vocab_size": 151936, "intermediate_size": 22016},
)
@family(
    "qwen3_vl_moe_text",
    feed_forward=qwen_experts,
    defaults={"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16},
    weight_defaults={
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": True,
    },
)
@family(
    "qwen3_omni_moe_text",
    feed_forward=qwen_experts,
    defaults={"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    weight_defaults={
        "vocab_size": 3584,
        "intermediate_size": 18944,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
def full_everywhere(cfg: Config) -> Layers:
    return _all(cfg, "full_attention")


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
    with_layer_types="ministral",
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
    "ministral3",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
    },
    weight_defaults={"vocab_size": 131072, "intermediate_size": 14336},
)
@family(
    "phi3",
    feed_forward=dense,
    defaults={
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "sliding_window": None,
    },
    weight_defaults={"vocab_size": 32064, "intermediate_size": 8192},
)
def windows_or_full(cfg: Config) -> Layers:
    windows = cfg.optional_integer("sliding_window") is not None
    return _all(cfg, "sliding_attention" if windows else "full_attention")


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
)
def switched_windows(cfg: Config) -> Layers:
    return _all(cfg, "sliding_attention" if has_window(cfg) else "full_attention")
