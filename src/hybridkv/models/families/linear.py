"""Families that mix attention with the delta rule, lightning attention or short convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.errors import ConfigError
from hybridkv.models import mixer_weights
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, every, family, given_or, where
from hybridkv.models.feed_forward import (
    deepseek_experts,
    dense,
    lfm2_experts,
    lfm2_feed_forward,
    mixtral_experts,
    qwen_experts,
)
from hybridkv.models.layers import (
    delta_rule,
    full_attention,
    gated_delta_net,
    latent_attention,
    lightning,
    short_conv,
    sliding_attention,
)
from hybridkv.spec import LayerSpec


@family(
    "qwen3_next",
    feed_forward=qwen_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_nextn_predict_layers": 1,
    },
    weight_defaults={
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    attention_weights=mixer_weights.gated_attention,
    state_weights=mixer_weights.delta_rule,
)
@family(
    "qwen3_5_text",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    weight_defaults={"vocab_size": 248320, "intermediate_size": 12288},
    attention_weights=mixer_weights.gated_attention,
    state_weights=mixer_weights.delta_rule,
)
@family(
    "qwen3_5_moe_text",
    feed_forward=qwen_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    weight_defaults={
        "vocab_size": 248320,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    attention_weights=mixer_weights.gated_attention,
    state_weights=mixer_weights.delta_rule,
)
def qwen_hybrid(cfg: Config) -> Layers:
    types = every(cfg, cfg.integer("full_attention_interval"), "full_attention", "linear_attention")
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "linear_attention": gated_delta_net})


@family(
    "olmo_hybrid",
    feed_forward=dense,
    defaults={
        "hidden_size": 3840,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "num_key_value_heads": None,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 4,
    },
    weight_defaults={"vocab_size": 100352, "intermediate_size": 11008},
    state_weights=mixer_weights.delta_rule,
)
def olmo_hybrid(cfg: Config) -> Layers:
    types = every(cfg, 4, "full_attention", "linear_attention")
    if "full_attention" not in types:
        types[-1] = "full_attention"
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "linear_attention": _olmo_delta_net})


def _olmo_delta_net(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    heads = cfg.integer("num_attention_heads")
    key_heads = cfg.optional_integer("linear_num_key_heads") or heads
    key_dim = cfg.optional_integer("linear_key_head_dim") or cfg.integer("hidden_size") * 3 // 4 // key_heads
    return delta_rule(
        cfg,
        layer,
        key_heads=key_heads,
        value_heads=cfg.optional_integer("linear_num_value_heads") or heads,
        key_dim=key_dim,
        value_dim=cfg.optional_integer("linear_value_head_dim") or 2 * key_dim,
        kernel=cfg.integer("linear_conv_kernel_dim"),
    )


@family(
    "kimi_linear",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    weight_defaults={
        "vocab_size": 163840,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    state_weights=mixer_weights.kimi_delta_rule,
)
def kimi_linear(cfg: Config) -> Layers:
    """Published checkpoints describe the linear layers in an object of their own, with layers counted from 1."""
    nested = cfg.get("linear_attn_config", default=None) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config of {cfg.name}: linear_attn_config is {nested!r}, expected an object")
    published = Config(f"{cfg.name}, linear_attn_config", cfg.model_type, nested)
    heads = published.optional_integer("num_heads") or cfg.integer("linear_num_heads")
    dim = published.optional_integer("head_dim") or cfg.integer("linear_head_dim")
    kernel = published.optional_integer("short_conv_kernel_size") or cfg.integer("linear_conv_kernel_dim")

    def kimi_delta(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
        return delta_rule(cfg, layer, heads, heads, dim, dim, kernel)

    types = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(cfg.num_layers)]
    if {"full_attn_layers", "kda_layers"} <= set(nested):
        full, linear = published.integers("full_attn_layers"), published.integers("kda_layers")
        if sorted(full + linear) != list(range(1, cfg.num_layers + 1)):
            raise ConfigError(
                f"config of {cfg.name}: full_attn_layers and kda_layers must name each layer from 1 to "
                f"{cfg.num_layers} once"
            )
        types = where(cfg, [layer - 1 for layer in full], "full_attention", "linear_attention")
    return Layers(given_or(cfg, types), {"full_attention": latent_attention, "linear_attention": kimi_delta})


@family(
    "bailing_hybrid",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "short_conv_kernel_size": 4,
        "layer_group_size": 6,
        "num_mtp_layers": 1,
    },
    weight_defaults={
        "vocab_size": 157184,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 2,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    attention_weights=mixer_weights.gated_heads,
    state_weights=mixer_weights.full_kimi_delta_rule,
    since="5.20",
)
def bailing_hybrid(cfg: Config) -> Layers:
    types = every(cfg, cfg.integer("layer_group_size"), "full_attention", "linear_attention")
    makers = {"full_attention": latent_attention, "linear_attention": _bailing_delta}
    return Layers(given_or(cfg, types), makers)


def _bailing_delta(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """transformers saves `head_dim` as the width of rotary keys, and that of states under a name of its own."""
    heads = cfg.optional_integer("linear_num_heads") or cfg.integer("num_attention_heads")
    dim = cfg.optional_integer("linear_head_dim") or cfg.integer("head_dim")
    kernel = cfg.optional_integer("linear_conv_kernel_dim") or cfg.integer("short_conv_kernel_size")
    return delta_rule(cfg, layer, heads, heads, dim, dim, kernel)


@family(
    "minimax",
    feed_forward=mixtral_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "sliding_window": None,
    },
    weight_defaults={"vocab_size": 32000, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
)
def minimax(cfg: Config) -> Layers:
    types = every(cfg, 2, "linear_attention", "full_attention")
    attention = full_attention if cfg.optional_integer("sliding_window") is None else sliding_attention
    return Layers(given_or(cfg, types), {"full_attention": attention, "linear_attention": lightning})


@family(
    "lfm2",
    feed_forward=lfm2_feed_forward,
    defaults={
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "full_attn_idxs": None,
    },
    weight_defaults={
        "vocab_size": 65536,
        "intermediate_size": 12288,
        "tie_word_embeddings": True,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
)
def lfm2(cfg: Config) -> Layers:
    attention = cfg.integers("full_attn_idxs") or list(range(cfg.num_layers))
    types = where(cfg, attention, "full_attention", "conv")
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "conv": short_conv})


@family(
    "lfm2_moe",
    feed_forward=lfm2_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
    },
    weight_defaults={
        "vocab_size": 65536,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        "tie_word_embeddings": True,
    },
)
def lfm2_moe(cfg: Config) -> Layers:
    types = cfg.strings("layer_types")
    if types is None:
        raise ConfigError(f"config of {cfg.name} (lfm2_moe) has no layer_types: add them to config.json")
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "conv": short_conv})


@family(
    "lfm3",
    feed_forward=dense,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
    },
    weight_defaults={"vocab_size": 128000, "intermediate_size": 7680, "tie_word_embeddings": True},
    attention_weights=mixer_weights.gated_heads,
    since="5.23",
)
def lfm3(cfg: Config) -> Layers:
    """Attention in every other layer, to everything and to a window in turn; the first layer is a convolution."""
    types = ["sliding_attention", "conv", "full_attention", "conv"] * (cfg.num_layers // 4 + 1)
    types = ["conv", *types[1 : cfg.num_layers]]
    makers = {"full_attention": full_attention, "sliding_attention": sliding_attention, "conv": short_conv}
    return Layers(given_or(cfg, types), makers)
