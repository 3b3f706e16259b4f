"""Families that mix full attention with windows or chunks."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.errors import ConfigError
from hybridkv.models import mixer_weights
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, check_causal, every, family, given_or, with_shared_kv
from hybridkv.models.feed_forward import dense, gemma3n_feed_forward, llama4_experts, mixtral_experts, qwen_experts
from hybridkv.models.layers import FULL_OR_SLIDING, chunked_attention, full_attention, has_window


def _rope_but_every(cfg: Config) -> list[int]:
    """1 for layers with rotary positions, 0 for every `no_rope_layer_interval`-th."""
    interval = cfg.integer("no_rope_layer_interval")
    return [int((i + 1) % interval != 0) for i in range(cfg.num_layers)]


@family(
    "qwen2",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    weight_defaults={"vocab_size": 151936, "intermediate_size": 22016},
)
@family(
    "qwen3",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    weight_defaults={"vocab_size": 151936, "intermediate_size": 22016},
)
def windows_above(cfg: Config) -> Layers:
    """Full attention in the first `max_window_layers`, windows above them."""
    first = cfg.optional_count("max_window_layers") if has_window(cfg) else cfg.num_layers
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(cfg.num_layers)]
    return _switched(cfg, types)


@family(
    "qwen2_moe",
    feed_forward=qwen_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    weight_defaults={
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 5632,
    },
)
def windows_in_turn_below(cfg: Config) -> Layers:
    """Windows in every other layer, from the first on, of the first `max_window_layers`; full attention elsewhere."""
    end = cfg.optional_count("max_window_layers") if has_window(cfg) else 0
    types = ["sliding_attention" if i < end and i % 2 == 0 else "full_attention" for i in range(cfg.num_layers)]
    return _switched(cfg, types)


@family(
    "smollm3",
    feed_forward=dense,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    weight_defaults={"vocab_size": 128256, "intermediate_size": 11008, "tie_word_embeddings": True},
)
def windows_without_positions(cfg: Config) -> Layers:
    """Windows, where they are switched on, in the layers without rotary positions."""
    has_rope = cfg.integers("no_rope_layers") or _rope_but_every(cfg)
    if len(has_rope) < cfg.num_layers:
        raise ConfigError(
            f"config of {cfg.name}: no_rope_layers has {len(has_rope)} entries for {cfg.num_layers} layers"
        )
    types = [
        "full_attention" if rope or not has_window(cfg) else "sliding_attention" for rope in has_rope[: cfg.num_layers]
    ]
    return _switched(cfg, types)


def _switched(cfg: Config, default: Sequence[str]) -> Layers:
    """Windows only where `use_sliding_window` says so: without it, transformers has none to give to a layer."""
    types = given_or(cfg, default)
    if "sliding_attention" in types and not has_window(cfg):
        raise ConfigError(
            f"config of {cfg.name}: layer_types names windows, but use_sliding_window and sliding_window do not switch "
            "them on; mend config.json"
        )
    return Layers(types, FULL_OR_SLIDING)


@family(
    "ministral",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    weight_defaults={"vocab_size": 32000, "intermediate_size": 14336},
)
def windows_unless_given(cfg: Config) -> Layers:
    return _always_with_window(cfg, all_layers(cfg, "sliding_attention"))


@family(
    "granite_swa",
    feed_forward=dense,
    defaults={
        "hidden_size": 2560,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "sliding_window": 128,
    },
    weight_defaults={"vocab_size": 100352, "intermediate_size": 8192, "tie_word_embeddings": True},
)
def full_first_of_four(cfg: Config) -> Layers:
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(cfg.num_layers)]
    return _always_with_window(cfg, types)


def _always_with_window(cfg: Config, default: Sequence[str]) -> Layers:
    """Transformers' models of these types need a window even if no layer has one."""
    cfg.integer("sliding_window")
    return Layers(given_or(cfg, default), FULL_OR_SLIDING)


@family(
    "gemma2",
    feed_forward=dense,
    defaults={
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    weight_defaults={"vocab_size": 256000, "intermediate_size": 9216, "tie_word_embeddings": True},
)
@family(
    "gemma3_text",
    feed_forward=dense,
    defaults={
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    weight_defaults={"vocab_size": 262208, "intermediate_size": 9216, "tie_word_embeddings": True},
)
@family(
    "gpt_oss",
    feed_forward=mixtral_experts,
    defaults={
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    weight_defaults={
        "vocab_size": 201088,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
)
@family(
    "olmo3",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    weight_defaults={"vocab_size": 50304, "intermediate_size": 11008},
)
def full_among_windows(cfg: Config) -> Layers:
    check_causal(cfg)
    types = every(cfg, cfg.integer("sliding_window_pattern"), "full_attention", "sliding_attention")
    return _always_with_window(cfg, types)


@family(
    "gemma3n_text",
    feed_forward=gemma3n_feed_forward,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    weight_defaults={
        "vocab_size": 262400,
        "intermediate_size": 16384,
        "tie_word_embeddings": True,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    around=mixer_weights.gemma3n_streams,
    tables=mixer_weights.tables_by_layer,
    compiles=False,
)
def gemma3n(cfg: Config) -> Layers:
    """The last layers compute no K and V of their own: they read those of an earlier layer of their kind."""
    types = given_or(cfg, every(cfg, 5, "full_attention", "sliding_attention"))
    return with_shared_kv(cfg, types, FULL_OR_SLIDING)


@family(
    "llama4_text",
    feed_forward=llama4_experts,
    defaults={
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
    weight_defaults={
        "vocab_size": 202048,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
    compiles=False,
)
def llama4(cfg: Config) -> Layers:
    """Layers with rotary positions see their chunk only; those without see everything."""
    has_rope = cfg.integers("no_rope_layers") or _rope_but_every(cfg)
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    if len(types) != cfg.num_layers:
        raise ConfigError(f"config of {cfg.name}: no_rope_layers has {len(types)} entries for {cfg.num_layers} layers")
    makers = {"chunked_attention": chunked_attention, "full_attention": full_attention}
    return Layers(given_or(cfg, types), makers)
