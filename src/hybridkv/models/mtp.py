"""Layers for multi-token prediction (MTP): how many a config names, and what each keeps.

A checkpoint may have such layers after its decoder layers, to draft tokens with. Each keeps a past of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.models.family import Layers, type_name, types_of_pattern
from hybridkv.spec import LayerSpec

_COUNT = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names of the number of MTP layers in configs."""


def num_mtp_layers(cfg: Config) -> int:
    """Return the number of MTP layers. Raises ConfigError if the config names none."""
    count = cfg.optional_count(*_COUNT)
    if not count:
        raise ConfigError(
            f"{cfg.name} has no MTP layers: its config sets none of {', '.join(_COUNT)}; plan without MTP"
        )
    return count


def mtp_specs(cfg: Config, layers: Layers, specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return what the MTP layers keep, numbered on from the last decoder layer.

    `specs` are those of the decoder layers: an MTP layer keeps what the last of them that has its type keeps.
    """
    last = {type_name(written): layer for layer, written in enumerate(layers.types)}
    made: list[LayerSpec] = []
    for number, written in enumerate(_types(cfg, layers), len(layers.types)):
        like = last.get(type_name(written))
        if like is None:
            raise ConfigError(f"{cfg.name} has MTP layers of type {written!r}, but no decoder layer of that type")
        made += [replace(spec, layer=number) for spec in specs if spec.layer == like]
    return tuple(made)


def _types(cfg: Config, layers: Layers) -> Sequence[str]:
    """The types of the MTP layers.

    Some configs list them, or the blocks that each consists of; some add them to the types of the decoder layers. In
    checkpoints whose configs do not, they attend to everything. A model without such layers repeats its last one.
    """
    count = num_mtp_layers(cfg)
    pattern = cfg.get("mtp_hybrid_override_pattern", default=None)
    blocks = types_of_pattern(pattern) if isinstance(pattern, str) else cfg.strings("mtp_layers_block_type")
    if blocks is not None:
        return blocks * count
    types = cfg.strings("mtp_layer_types") or (cfg.strings("layer_types") or [])[len(layers.types) :]
    if not types:
        full = any(type_name(written) == "full_attention" for written in layers.types)
        return ["full_attention" if full else layers.types[-1]] * count
    if len(types) != count:
        raise ConfigError(f"config of {cfg.name} has {len(types)} types of MTP layers for {count}: make them agree")
    return types
