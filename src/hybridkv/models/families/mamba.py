"""Families with state-space layers: Mamba-2 and Mamba-1, beside attention, inside the same layer, or alone."""

from __future__ import annotations

from typing import Any

from hybridkv.errors import ConfigError
from hybridkv.models import mixer_weights
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, family, given_or, types_of_pattern, where
from hybridkv.models.feed_forward import dense, granite_experts, jamba_experts, nemotron_blocks, no_feed_forward
from hybridkv.models.layers import full_attention, keeps_nothing, key_value, mamba1, mamba2
from hybridkv.spec import FullAttention, LayerSpec

_BAMBA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

_MAMBA1: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 32, "state_size": 16, "conv_kernel": 4, "expand": 2}
_MAMBA1_WEIGHTS: dict[str, Any] = {"vocab_size": 50280, "tie_word_embeddings": True}


def _bamba_mixer(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """Mamba-2 under the field names that Bamba, Granite and Falcon-H1 share."""
    heads = cfg.integer("mamba_n_heads")
    inner = cfg.optional_integer("mamba_d_ssm") or cfg.integer("mamba_expand") * cfg.integer("hidden_size")
    head_dim = cfg.quotient(inner, "mamba_n_heads", "the inner size of Mamba")
    if cfg.get("mamba_d_head") not in ("auto", None):
        head_dim = cfg.integer("mamba_d_head")
    return mamba2(
        cfg,
        layer,
        heads=heads,
        head_dim=head_dim,
        groups=cfg.integer("mamba_n_groups"),
        state=cfg.integer("mamba_d_state"),
        kernel=cfg.integer("mamba_d_conv"),
    )


def _bamba_mixer_and_attention(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return (*full_attention(cfg, layer), *_bamba_mixer(cfg, layer))


@family(
    "falcon_h1",
    feed_forward=dense,
    defaults={**_BAMBA, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
    weight_defaults={"vocab_size": 128000, "intermediate_size": 14336},
)
def falcon_h1(cfg: Config) -> Layers:
    """Every layer runs attention and Mamba-2 side by side and keeps both."""
    return Layers(all_layers(cfg, "hybrid"), {"hybrid": _bamba_mixer_and_attention})


@family(
    "bamba",
    feed_forward=dense,
    defaults={**_BAMBA, "num_key_value_heads": 8, "attn_layer_indices": None},
    weight_defaults={"vocab_size": 128000, "intermediate_size": 14336},
)
def bamba(cfg: Config) -> Layers:
    types = where(cfg, cfg.integers("attn_layer_indices"), "full_attention", "linear_attention")
    return Layers(types, {"full_attention": full_attention, "linear_attention": _bamba_mixer})


@family(
    "granitemoehybrid",
    feed_forward=granite_experts,
    defaults={**_BAMBA, "num_key_value_heads": None},
    weight_defaults={
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
def granite_hybrid(cfg: Config) -> Layers:
    types = given_or(cfg, all_layers(cfg, "linear_attention"))
    return Layers(types, {"full_attention": full_attention, "linear_attention": _bamba_mixer})


@family(
    "nemotron_h",
    feed_forward=nemotron_blocks,
    defaults={
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
    },
    weight_defaults={
        "vocab_size": 131072,
        "intermediate_size": 21504,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_latent_size": None,
    },
)
def nemotron_h(cfg: Config) -> Layers:
    """MLP and MoE blocks are layers of their own and keep nothing."""
    makers = {
        "full_attention": full_attention,
        "linear_attention": _nemotron_mixer,
        "mlp": keeps_nothing,
        "moe": keeps_nothing,
    }
    return Layers(_nemotron_types(cfg), makers)


def _nemotron_types(cfg: Config) -> list[str]:
    """The list of blocks, or the pattern string of older checkpoints; num_hidden_layers has no say."""
    types = cfg.strings("layers_block_type", "layer_types")
    if types is not None:
        return types
    pattern = cfg.get("hybrid_override_pattern", default=None)
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"config of {cfg.name} (nemotron_h) has no layers_block_type: add it to config.json")
    return types_of_pattern(pattern)


def _nemotron_mixer(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return mamba2(
        cfg,
        layer,
        heads=cfg.integer("mamba_num_heads"),
        head_dim=cfg.integer("mamba_head_dim"),
        groups=cfg.integer("mamba_n_groups", "n_groups"),
        state=cfg.integer("ssm_state_size"),
        kernel=cfg.integer("mamba_d_conv", "conv_kernel"),
    )


@family(
    "zamba2",
    feed_forward=no_feed_forward,
    defaults={
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    weight_defaults={
        "vocab_size": 32000,
        "intermediate_size": None,
        "adapter_rank": 128,
        "num_mem_blocks": 1,
        "tie_word_embeddings": True,
    },
    attention_weights=mixer_weights.counted_apart,
    around=mixer_weights.zamba_shared_blocks,
)
def zamba2(cfg: Config) -> Layers:
    """Hybrid layers run a shared attention block, then Mamba-2; each of them keeps KV of its own."""
    letters = "m" + "mmmmmh" * 7 + "mmmmh" + "mmmh" + "mm"
    types = ["hybrid" if letter == "h" else "linear_attention" for letter in letters]
    return Layers(given_or(cfg, types), {"linear_attention": _zamba_mixer, "hybrid": _zamba_mixer_and_attention})


def _zamba_mixer(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    inner = cfg.integer("mamba_expand") * cfg.integer("hidden_size")
    return mamba2(
        cfg,
        layer,
        heads=cfg.integer("n_mamba_heads"),
        head_dim=cfg.quotient(inner, "n_mamba_heads", "the inner size of Mamba"),
        groups=cfg.integer("mamba_ngroups"),
        state=cfg.integer("mamba_d_state"),
        kernel=cfg.integer("mamba_d_conv"),
    )


def _zamba_mixer_and_attention(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """The shared block sees the layer's input beside the embeddings: twice the hidden size."""
    head_dim = cfg.quotient(2 * cfg.integer("hidden_size"), "num_attention_heads", "twice hidden_size")
    return (FullAttention(layer, key_value(cfg, head_dim)), *_zamba_mixer(cfg, layer))


@family(
    "jamba",
    feed_forward=jamba_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    weight_defaults={
        "vocab_size": 65536,
        "intermediate_size": 14336,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
)
def jamba(cfg: Config) -> Layers:
    period, offset = cfg.integer("attn_layer_period"), cfg.optional_count("attn_layer_offset")
    if offset >= period:
        raise ConfigError(f"config of {cfg.name}: attn_layer_offset {offset} is not below attn_layer_period {period}")
    types = ["full_attention" if i % period == offset else "linear_attention" for i in range(cfg.num_layers)]
    return Layers(types, {"full_attention": full_attention, "linear_attention": _jamba_mixer})


def _jamba_mixer(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    channels = cfg.integer("mamba_expand") * cfg.integer("hidden_size")
    return mamba1(cfg, layer, channels, cfg.integer("mamba_d_state"), cfg.integer("mamba_d_conv"))


@family(
    "mamba2",
    feed_forward=no_feed_forward,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "conv_kernel": 4,
    },
    weight_defaults={"vocab_size": 32768},
)
def mamba2_only(cfg: Config) -> Layers:
    """States alone: nothing grows with the sequence."""
    return Layers(all_layers(cfg, "linear_attention"), {"linear_attention": _mamba2_mixer})


def _mamba2_mixer(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return mamba2(
        cfg,
        layer,
        heads=cfg.integer("num_heads"),
        head_dim=cfg.integer("head_dim"),
        groups=cfg.integer("n_groups"),
        state=cfg.integer("state_size"),
        kernel=cfg.integer("conv_kernel"),
    )


@family("mamba", feed_forward=no_feed_forward, defaults=_MAMBA1, weight_defaults=_MAMBA1_WEIGHTS)
@family("falcon_mamba", feed_forward=no_feed_forward, defaults=_MAMBA1, weight_defaults=_MAMBA1_WEIGHTS)
def mamba1_only(cfg: Config) -> Layers:
    """States alone, as in Mamba-2."""
    return Layers(all_layers(cfg, "linear_attention"), {"linear_attention": _mamba1_mixer})


def _mamba1_mixer(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """Published configs may state an inner size that is no multiple of `hidden_size`: it goes before `expand`."""
    stated = cfg.optional_integer("intermediate_size")
    channels = stated or cfg.integer("expand") * cfg.integer("hidden_size")
    return mamba1(cfg, layer, channels, cfg.integer("state_size"), cfg.integer("conv_kernel"))
