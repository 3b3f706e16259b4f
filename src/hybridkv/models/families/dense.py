"""Families without experts whose layers are all alike, beside those in `uniform`."""

from __future__ import annotations

from hybridkv.models.config import Config
from hybridkv.models.families.uniform import full_everywhere, windows_or_full
from hybridkv.models.family import Layers, check_causal, family
from hybridkv.models.feed_forward import dense, ungated


@family(
    "glm4",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    weight_defaults={"vocab_size": 151552, "intermediate_size": 13696},
)
@family(
    "olmo2",
    feed_forward=dense,
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 50304, "intermediate_size": 11008},
)
@family(
    "cohere",
    feed_forward=dense,
    defaults={"hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 256000, "intermediate_size": 22528, "tie_word_embeddings": True},
)
@family(
    "seed_oss",
    feed_forward=dense,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    weight_defaults={"vocab_size": 155136, "intermediate_size": 27648},
)
@family(
    "ernie4_5",
    feed_forward=dense,
    defaults={
        "hidden_size": 1024,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    weight_defaults={"vocab_size": 103424, "intermediate_size": 3072, "tie_word_embeddings": True},
)
@family(
    "hunyuan_v1_dense",
    feed_forward=dense,
    defaults={"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 290943, "intermediate_size": 11008},
)
@family(
    "stablelm",
    feed_forward=dense,
    defaults={"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    weight_defaults={"vocab_size": 50304, "intermediate_size": 6912},
)
@family(
    "arcee",
    feed_forward=ungated,
    defaults={"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 32000, "intermediate_size": 18432},
)
@family(
    "nemotron",
    feed_forward=ungated,
    defaults={"hidden_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 48, "num_key_value_heads": None},
    weight_defaults={"vocab_size": 256000, "intermediate_size": 24576},
)
def full(cfg: Config) -> Layers:
    return full_everywhere(cfg)


@family(
    "gemma",
    feed_forward=dense,
    defaults={
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    weight_defaults={"vocab_size": 256000, "intermediate_size": 24576, "tie_word_embeddings": True},
)
def gemma(cfg: Config) -> Layers:
    check_causal(cfg)
    return full_everywhere(cfg)


@family(
    "starcoder2",
    feed_forward=ungated,
    defaults={
        "hidden_size": 3072,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
    weight_defaults={"vocab_size": 49152, "intermediate_size": 12288, "tie_word_embeddings": True},
)
def full_or_windows(cfg: Config) -> Layers:
    return windows_or_full(cfg)
