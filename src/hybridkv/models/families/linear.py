"""Families that mix attention with the delta rule, lightning attention or short convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, every, family, given_or, where
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
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
@family(
    "qwen3_5_text",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
@family(
    "qwen3_5_moe_text",
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    full_attention_interval=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
def qwen_hybrid(cfg: Config) -> Layers:
    types = every(cfg, cfg.integer("full_attention_interval"), "full_attention", "linear_attention")
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "linear_attention": gated_delta_net})


@family(
    "olmo_hybrid",
    hidden_size=3840,
    num_hidden_layers=32,
    num_attention_heads=30,
    num_key_value_heads=None,
    linear_num_key_heads=None,
    linear_num_value_heads=None,
    linear_key_head_dim=None,
    linear_value_head_dim=None,
    linear_conv_kernel_dim=4,
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
    hidden_size=2304,
    num_hidden_layers=27,
    num_attention_heads=32,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    linear_num_heads=32,
    linear_head_dim=128,
    linear_conv_kernel_dim=4,
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
    "minimax",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=None,
    sliding_window=None,
)
def minimax(cfg: Config) -> Layers:
    types = every(cfg, 2, "linear_attention", "full_attention")
    attention = full_attention if cfg.optional_integer("sliding_window") is None else sliding_attention
    return Layers(given_or(cfg, types), {"full_attention": attention, "linear_attention": lightning})


@family(
    "lfm2",
    hidden_size=2560,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    conv_L_cache=3,
    full_attn_idxs=None,
)
def lfm2(cfg: Config) -> Layers:
    attention = cfg.integers("full_attn_idxs") or list(range(cfg.num_layers))
    types = where(cfg, attention, "full_attention", "conv")
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "conv": short_conv})


@family(
    "lfm2_moe", hidden_size=2048, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, conv_L_cache=3
)
def lfm2_moe(cfg: Config) -> Layers:
    types = cfg.strings("layer_types")
    if types is None:
        raise ConfigError(f"config of {cfg.name} (lfm2_moe) has no layer_types: add them to config.json")
    return Layers(given_or(cfg, types), {"full_attention": full_attention, "conv": short_conv})
