"""Makers of layer specs: one small function for each way a layer keeps a past.

A maker reads its sizes from the config under the names most families share; families with other names pass the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.spec import (
    ChunkedLocal,
    DType,
    FullAttention,
    HiddenTap,
    LatentAttention,
    LayerSpec,
    LinearState,
    ModelSpec,
    Part,
    SlidingWindow,
    Split,
)

Maker = Callable[[Config, int], tuple[LayerSpec, ...]]


def keeps_nothing(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """MLP and MoE blocks of models that count them as layers; layers that reuse another layer's KV."""
    return ()


# --- attention -------------------------------------------------------------------------------------------------------


def attention_head_dim(cfg: Config) -> int:
    given = cfg.optional_integer("head_dim")
    return given or cfg.quotient(cfg.integer("hidden_size"), "num_attention_heads", "hidden_size")


def key_value(cfg: Config, head_dim: int | None = None, value_dim: int | None = None) -> tuple[Part, Part]:
    """K and V of one token. Query heads are not kept, but must split too. `value_dim`: if values have another size."""
    heads = cfg.integer("num_attention_heads")
    cfg.even(heads, "attention heads")
    if cfg.optional_integer("num_key_value_heads"):
        cfg.quotient(heads, "num_key_value_heads", "num_attention_heads")
    kv_heads = cfg.replicated(cfg.optional_integer("num_key_value_heads") or heads, "KV heads")
    dim = head_dim or attention_head_dim(cfg)
    return (
        Part("k", (kv_heads,), (dim,), cfg.kv_cache_dtype),
        Part("v", (kv_heads,), (value_dim or dim,), cfg.kv_cache_dtype),
    )


def full_attention(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return (FullAttention(layer, key_value(cfg)),)


def sliding_attention(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return (SlidingWindow(layer, key_value(cfg), cfg.integer("sliding_window")),)


FULL_OR_SLIDING: Mapping[str, Maker] = {"full_attention": full_attention, "sliding_attention": sliding_attention}


def has_window(cfg: Config) -> bool:
    """Whether the config has a window, and does not switch it off."""
    switched_on = cfg.get("use_sliding_window", default=True)
    return bool(switched_on) and cfg.optional_integer("sliding_window") is not None


def chunked_attention(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return (ChunkedLocal(layer, key_value(cfg), cfg.integer("attention_chunk_size")),)


def latent_attention(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """MLA: query heads split over ranks, but every rank needs the whole latent."""
    cfg.even(cfg.integer("num_attention_heads"), "attention heads")
    one = (Split.whole(1),)
    latent = Part("latent", one, (cfg.integer("kv_lora_rank"),), cfg.kv_cache_dtype)
    rope = Part("rope", one, (cfg.integer("qk_rope_head_dim"),), cfg.kv_cache_dtype)
    return (LatentAttention(layer, (latent, rope)),)


def hidden_tap(layer: int, hidden_size: int, dtype: DType) -> HiddenTap:
    """Hidden states are whole on every rank."""
    return HiddenTap(layer, (Part("hidden", (Split.whole(1),), (hidden_size,), dtype),))


def with_all_taps(model: ModelSpec) -> ModelSpec:
    """The model with a tap for the input of each layer, for the output of the last, and for that after the norm."""
    taps = (hidden_tap(layer, model.hidden_size, model.dtype) for layer in range(model.num_layers + 2))
    return replace(model, layers=(*model.layers, *taps))


# --- states ----------------------------------------------------------------------------------------------------------
# A causal convolution of width w needs the last w - 1 inputs. Convolution inputs are activations and keep the model's
# dtype; recurrent states accumulate over the whole sequence and have a dtype of their own.


def conv_part(cfg: Config, runs: tuple[Split, ...], kernel: int) -> Part:
    if kernel < 2:
        raise ConfigError(f"config of {cfg.name}: a convolution over {kernel} token keeps nothing; expected 2 or more")
    return Part("conv", runs, (kernel - 1,), cfg.dtype)


def delta_rule(
    cfg: Config, layer: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> tuple[LayerSpec, ...]:
    """Convolved queries, keys and values; one key_dim x value_dim matrix a value head."""
    keys = cfg.even(key_heads, "linear key heads").of_units(key_dim)
    heads = cfg.even(value_heads, "linear value heads")
    values = heads.of_units(value_dim)
    recurrent = Part("recurrent", (heads,), (key_dim, value_dim), cfg.state_dtype)
    return (LinearState(layer, (conv_part(cfg, (keys, keys, values), kernel), recurrent)),)


def gated_delta_net(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    return delta_rule(
        cfg,
        layer,
        key_heads=cfg.integer("linear_num_key_heads"),
        value_heads=cfg.integer("linear_num_value_heads"),
        key_dim=cfg.integer("linear_key_head_dim"),
        value_dim=cfg.integer("linear_value_head_dim"),
        kernel=cfg.integer("linear_conv_kernel_dim"),
    )


def mamba2(
    cfg: Config, layer: int, heads: int, head_dim: int, groups: int, state: int, kernel: int
) -> tuple[LayerSpec, ...]:
    """Convolved inputs, B and C (shared by the heads of a group); one head_dim x state matrix a head."""
    if heads % groups:
        raise ConfigError(f"config of {cfg.name}: {heads} state-space heads cannot share {groups} groups evenly")
    split = cfg.even(heads, "state-space heads")
    inputs = split.of_units(head_dim)
    shared = cfg.replicated(groups, "state-space groups").of_units(state)
    recurrent = Part("recurrent", (split,), (head_dim, state), cfg.state_dtype)
    return (LinearState(layer, (conv_part(cfg, (inputs, shared, shared), kernel), recurrent)),)


def mamba1(cfg: Config, layer: int, channels: int, state: int, kernel: int) -> tuple[LayerSpec, ...]:
    """Convolved inputs; one state vector a channel."""
    inputs = cfg.even(channels, "state-space channels")
    recurrent = Part("recurrent", (inputs,), (state,), cfg.state_dtype)
    return (LinearState(layer, (conv_part(cfg, (inputs,), kernel), recurrent)),)


def lightning(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    """Lightning attention: one head_dim x head_dim matrix a head, no convolution."""
    heads = cfg.integer("num_attention_heads")
    dim = attention_head_dim(cfg)
    recurrent = Part("recurrent", (cfg.even(heads, "linear attention heads"),), (dim, dim), cfg.state_dtype)
    return (LinearState(layer, (recurrent,)),)


def short_conv(cfg: Config, layer: int) -> tuple[LayerSpec, ...]:
    channels = cfg.even(cfg.integer("hidden_size"), "convolution channels")
    return (LinearState(layer, (conv_part(cfg, (channels,), cfg.integer("conv_L_cache")),)),)
