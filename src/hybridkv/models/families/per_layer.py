"""Families whose attention layers differ in sizes: in query heads, KV heads, or the sizes of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridkv.errors import ConfigError
from hybridkv.models import mixer_weights
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, check_causal, every, family, given_or, with_shared_kv
from hybridkv.models.feed_forward import experts_by_layer, gemma4_feed_forward, step_experts
from hybridkv.models.layers import FULL_OR_SLIDING, key_value
from hybridkv.spec import FullAttention, LayerSpec, SlidingWindow


def _in_layers_of(kind: str, types: list[str], sizes: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`sizes` for each layer of type `kind`."""
    return {layer: sizes for layer, written in enumerate(types) if written == kind}


# --- MiMo-V2-Flash ----------------------------------------------------------------------------------------------------


@family(
    "mimo_v2_flash",
    feed_forward=experts_by_layer,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
    },
    weight_defaults={
        "vocab_size": 152576,
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    since="5.23",
)
def mimo(cfg: Config) -> Layers:
    """Layers with windows have twice as many KV heads. Keys are larger than values in all layers."""
    full = {layer for layer in range(cfg.num_layers) if layer == 0 or (layer + 1) % 6 == 0}
    default = ["full_attention" if layer in full else "sliding_attention" for layer in range(cfg.num_layers)]
    types = list(given_or(cfg, default))
    twice = {"num_key_value_heads": 2 * cfg.integer("num_key_value_heads")}
    makers = {"full_attention": _mimo_full, "sliding_attention": _mimo_sliding}
    return Layers(types, makers, _in_layers_of("sliding_attention", types, twice))


def _mimo_full(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return (FullAttention(layer, key_value(cfg, value_dim=cfg.integer("v_head_dim"))),)


def _mimo_sliding(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """Published configs count the tokens before the current one, under another name."""
    before = cfg.optional_integer("sliding_window_size")
    window = cfg.integer("sliding_window") if before is None else before + 1
    return (SlidingWindow(layer, key_value(cfg, value_dim=cfg.integer("v_head_dim")), window),)


# --- Laguna -----------------------------------------------------------------------------------------------------------


@family(
    "laguna",
    feed_forward=experts_by_layer,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
    },
    weight_defaults={
        "vocab_size": 100352,
        "intermediate_size": 8192,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    since="5.23",
    attention_weights=mixer_weights.head_gated_attention,
)
def laguna(cfg: Config) -> Layers:
    """The number of query heads differs between layers. What is kept does not."""
    heads = cfg.integers("num_attention_heads_per_layer")
    if heads and len(heads) != cfg.num_layers:
        raise ConfigError(
            f"config of {cfg.name}: num_attention_heads_per_layer has {len(heads)} entries for {cfg.num_layers} layers"
        )
    sizes = {layer: {"num_attention_heads": number} for layer, number in enumerate(heads)}
    return Layers(given_or(cfg, all_layers(cfg, "full_attention")), FULL_OR_SLIDING, sizes)


# --- Step 3.5 and 3.7 -------------------------------------------------------------------------------------------------


@family(
    "step3p5",
    feed_forward=step_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    weight_defaults={
        "vocab_size": 128815,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
    },
    attention_weights=mixer_weights.head_gated_attention,
    compiles=False,  # its experts run in a loop over those that some token has chosen
)
def step(cfg: Config) -> Layers:
    """Layers with windows have more query heads. What is kept does not differ."""
    check_causal(cfg)
    types = given_or(_without_types_of_mtp(cfg), all_layers(cfg, "full_attention"))
    sizes = {"num_key_value_heads": cfg.integer("num_key_value_heads", "num_attention_groups")}
    in_windows = sizes if cfg.has_per_layer_config else {**sizes, "num_attention_heads": _step_sliding_heads(cfg)}
    by_layer = {layer: in_windows if kind == "sliding_attention" else sizes for layer, kind in enumerate(types)}
    return Layers(types, FULL_OR_SLIDING, by_layer)


def _without_types_of_mtp(cfg: Config) -> Config:
    """Published configs list the types of MTP layers after those of the decoder layers."""
    types = cfg.strings("layer_types") or []
    if len(types) != cfg.num_layers + cfg.optional_count("num_nextn_predict_layers"):
        return cfg
    return replace(cfg, values={**cfg.values, "layer_types": types[: cfg.num_layers]})


def _step_sliding_heads(cfg: Config) -> int:
    """Query heads of layers with windows. Published configs state them among other settings of such layers."""
    heads = cfg.optional_integer("num_sliding_attention_heads")
    other = cfg.get("attention_other_setting", default=None) or {}
    if not isinstance(other, Mapping):
        raise ConfigError(f"config of {cfg.name}: attention_other_setting is {other!r}, expected an object")
    return heads or replace(cfg, values={**cfg.values, **other}).integer("num_attention_heads")


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------

_GEMMA4: dict[str, Any] = {
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 0,
}


@family(
    "gemma4_text",
    feed_forward=gemma4_feed_forward,
    defaults={**_GEMMA4, "sliding_window": 512},
    weight_defaults={
        "vocab_size": 262144,
        "intermediate_size": 9216,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    since="5.23",
    attention_weights=mixer_weights.gemma4_attention,
    around=mixer_weights.gemma4_inputs,
    tables=mixer_weights.tables_by_layer,
    compiles=False,
)
@family(
    "gemma4_unified_text",
    feed_forward=gemma4_feed_forward,
    defaults={**_GEMMA4, "sliding_window": 1024},
    weight_defaults={"vocab_size": 262144, "intermediate_size": 9216, "tie_word_embeddings": True},
    since="5.23",
    attention_weights=mixer_weights.gemma4_attention,
    compiles=False,
)
def gemma4(cfg: Config) -> Layers:
    """Layers of full attention have larger heads, and perhaps fewer KV heads. The last layer is one of them."""
    if cfg.get("use_bidirectional_attention", default=None) == "all":
        raise ConfigError(f"{cfg.name} attends in both directions and keeps no cache: choose a causal model")
    types = list(given_or(cfg, every(cfg, 6, "full_attention", "sliding_attention")))
    types[-1] = "full_attention"
    sizes: dict[str, Any] = {}
    if not cfg.has_per_layer_config:
        sizes["head_dim"] = cfg.integer("global_head_dim")
        heads = cfg.optional_integer("num_global_key_value_heads")
        if heads is not None and cfg.get("attention_k_eq_v", default=False):
            sizes["num_key_value_heads"] = heads
    layers = with_shared_kv(cfg, types, FULL_OR_SLIDING)
    return layers._replace(sizes=_in_layers_of("full_attention", types, sizes))
