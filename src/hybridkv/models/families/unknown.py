"""Model types without a record: planned from the types of their layers, if nothing in the config tells of more.

Such a plan is for capacity only, and says where it comes from. The engine runs no model without a record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from hybridkv.errors import ConfigError, MissingFieldError
from hybridkv.models.config import Config
from hybridkv.models.family import FAMILIES, Family, Layers, all_layers, given_or, make_layers
from hybridkv.models.feed_forward import Weights
from hybridkv.models.layers import (
    Maker,
    chunked_attention,
    full_attention,
    gated_delta_net,
    short_conv,
    sliding_attention,
)

_MAKERS: Mapping[str, Maker] = {
    "full_attention": full_attention,
    "sliding_attention": sliding_attention,
    "chunked_attention": chunked_attention,
    "linear_attention": gated_delta_net,
    "conv": short_conv,
}

# Fields that tell of a past which the layer types do not, by what they tell of.
_SIGNS: Mapping[str, re.Pattern[str]] = {
    "latents": re.compile(r"kv_lora_rank|qk_(\w+_)?head_dim|v_head_dim"),
    "index keys": re.compile(r"index_|indexer_|\w*_indexer_"),
    "compressed tokens": re.compile(r"\w*compress"),
    "sparse attention": re.compile(r"\w*sparse_attention|nsa_|\w*moba|\w*topk_block"),
    "states of an unknown kind": re.compile(r"\w*(mamba|ssm|state_size|d_state|time_step|rwkv|lru_)"),
    "convolutions of an unknown kind": re.compile(r"(?!conv_L_cache|linear_conv_kernel_dim|conv_bias)\w*conv|cca_"),
    "keys and values that layers share": re.compile(r"\w*(kv_shar|shared_kv|kv_source|share\w*_kv)|(use_)?cla(_|$)"),
    "sizes that differ between layers": re.compile(
        r"\w*per_layer|attention_other_setting|block_configs|swa_|global_head_dim|num_global_\w+|num_sliding_\w+"
    ),
    "sizes of another name": re.compile(r"kv_channels|attention_head_dim|attention_hidden_size|d_kv$|head_size$"),
    "keys that are values": re.compile(r"\w*_k_eq_v"),
    "windows of an unknown kind": re.compile(r"(?!sliding_window(_pattern)?$|use_sliding|max_window)\w*window"),
    "token ids that layers keep": re.compile(r"(?!\w*no_repeat)\w*ngram|ple_"),
    "layers that run several times": re.compile(r"\w*(_cycles|recurren|num_loops|ut_steps)"),
    "attention to another sequence": re.compile(r"\w*cross_attention|is_encoder_decoder"),
    "attention in both directions": re.compile(r"use_bidirectional_attention"),
}
# Fields that tell of layers of several kinds. They matter where the config does not list the types.
_SIGNS_OF_KINDS = re.compile(
    r"(?!\w*(moe|expert|rope|mlp))(sliding_window|attention_chunk_size|linear_\w+|conv_L_cache|full_att\w+|global_att\w+"
    r"|layer_group\w*|layers_block_type|block_types?|attn_types?\w*|attention_types?|\w+_(pattern|interval|period))$"
)


def _describe(cfg: Config) -> Layers:
    """The layers of a config that names their types, or that has the fields of plain attention alone."""
    for field, value in cfg.values.items():
        if value in (None, False, 0, "", [], {}):
            continue
        for past, pattern in _SIGNS.items():
            if pattern.match(field):
                _refuse(cfg, f"its config has {field!r}, a sign of {past}")
        if "layer_types" not in cfg.values and _SIGNS_OF_KINDS.match(field) and not _is_idle(cfg, field):
            _refuse(cfg, f"its config has {field!r}, but no layer_types: add the type of each layer to config.json")
    try:
        cfg.integer("num_key_value_heads")
        layers = Layers(given_or(cfg, all_layers(cfg, "full_attention")), _MAKERS)
        make_layers(replace(cfg, tp=1, rank=0), layers)
    except ConfigError as error:
        _refuse(cfg, str(error))
    return layers


def _is_idle(cfg: Config, field: str) -> bool:
    """Whether a window is stated, but switched off."""
    return field == "sliding_window" and cfg.get("use_sliding_window", default=True) is False


def _refuse(cfg: Config, reason: str) -> NoReturn:
    raise ConfigError(
        f"{cfg.name} is of the unknown model type {cfg.model_type!r}, and cannot be planned from its layer types: "
        f"{reason}; we read {', '.join(sorted(FAMILIES))}"
    )


def _unknown_weights(cfg: Config, layer: int, kind: str) -> Weights:
    raise MissingFieldError(f"the weights of the unknown model type {cfg.model_type!r} are not known")


_NO_DEFAULTS: Mapping[str, Any] = {}
UNKNOWN = Family(
    _describe,
    _unknown_weights,
    defaults=_NO_DEFAULTS,
    weight_defaults=_NO_DEFAULTS,
    plan_only="hybridkv has no record of it",
)
"""The record of every model type that has none of its own."""


def family_of(model_type: str) -> Family:
    """The record of a model type, or `UNKNOWN`."""
    return FAMILIES.get(model_type, UNKNOWN)
