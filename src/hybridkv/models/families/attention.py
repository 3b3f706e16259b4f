"""Families whose layers all attend: to everything, a window, a chunk, or latents."""

from __future__ import annotations

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, every, family, given_or
from hybridkv.models.layers import chunked_attention, full_attention, keeps_nothing, latent_attention, sliding_attention

_FULL_OR_SLIDING = {"full_attention": full_attention, "sliding_attention": sliding_attention}


def _has_window(cfg: Config) -> bool:
    switched_on = cfg.get("use_sliding_window", default=True)
    return bool(switched_on) and cfg.optional_integer("sliding_window") is not None


@family("llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=None)
def llama(cfg: Config) -> Layers:
    return Layers(given_or(cfg, all_layers(cfg, "full_attention")), {"full_attention": full_attention})


@family(
    "mistral",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    sliding_window=4096,
)
@family(
    "mixtral",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    sliding_window=None,
)
@family(
    "qwen3_moe",
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    use_sliding_window=False,
    sliding_window=4096,
)
def all_alike(cfg: Config) -> Layers:
    kind = "sliding_attention" if _has_window(cfg) else "full_attention"
    return Layers(given_or(cfg, all_layers(cfg, kind)), _FULL_OR_SLIDING)


@family(
    "qwen2",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)
@family(
    "qwen3",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)
def windows_above(cfg: Config) -> Layers:
    """Full attention in the first `max_window_layers`, windows above them."""
    first = cfg.optional_count("max_window_layers") if _has_window(cfg) else cfg.num_layers
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(cfg.num_layers)]
    return Layers(given_or(cfg, types), _FULL_OR_SLIDING)


@family(
    "gemma2",
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=4096,
    sliding_window_pattern=2,
)
@family(
    "gemma3_text",
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=4096,
    sliding_window_pattern=6,
)
@family(
    "gpt_oss",
    hidden_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    sliding_window=128,
    sliding_window_pattern=2,
)
@family(
    "olmo3",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    sliding_window=4096,
    sliding_window_pattern=4,
)
def full_among_windows(cfg: Config) -> Layers:
    if cfg.get("use_bidirectional_attention", default=False):
        raise ConfigError(f"{cfg.name} attends in both directions and keeps no cache: choose a causal model")
    types = every(cfg, cfg.integer("sliding_window_pattern"), "full_attention", "sliding_attention")
    return Layers(given_or(cfg, types), _FULL_OR_SLIDING)


@family(
    "gemma3n_text",
    hidden_size=2048,
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    sliding_window=512,
    num_kv_shared_layers=15,
)
def gemma3n(cfg: Config) -> Layers:
    """The last layers compute no K and V of their own: they read those of an earlier layer of their kind."""
    types = list(given_or(cfg, every(cfg, 5, "full_attention", "sliding_attention")))
    shared = cfg.optional_count("num_kv_shared_layers")
    if shared >= cfg.num_layers:
        raise ConfigError(f"config of {cfg.name}: num_kv_shared_layers {shared} leaves none of {cfg.num_layers} layers")
    own = cfg.num_layers - shared
    return Layers(types[:own] + ["shared_kv"] * shared, {**_FULL_OR_SLIDING, "shared_kv": keeps_nothing})


@family(
    "llama4_text",
    hidden_size=5120,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    attention_chunk_size=8192,
    no_rope_layer_interval=4,
)
def llama4(cfg: Config) -> Layers:
    """Layers with rotary positions see their chunk only; those without see everything."""
    interval = cfg.integer("no_rope_layer_interval")
    has_rope = cfg.integers("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(cfg.num_layers)]
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    if len(types) != cfg.num_layers:
        raise ConfigError(f"config of {cfg.name}: no_rope_layers has {len(types)} entries for {cfg.num_layers} layers")
    makers = {"chunked_attention": chunked_attention, "full_attention": full_attention}
    return Layers(given_or(cfg, types), makers)


@family(
    "deepseek_v2", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, kv_lora_rank=512, qk_rope_head_dim=64
)
@family(
    "deepseek_v3",
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
)
def deepseek(cfg: Config) -> Layers:
    return Layers(given_or(cfg, all_layers(cfg, "full_attention")), {"full_attention": latent_attention})
