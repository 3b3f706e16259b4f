"""The registry of model families, and what they share.

A family is one record: a function from a `Config` to its layer types and a maker for each type, what config.json may
leave out, and how many weights its layers have. A type without a maker is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridkv.errors import ConfigError
from hybridkv.models import mixer_weights
from hybridkv.models.config import Config
from hybridkv.models.feed_forward import FeedForward, Weights
from hybridkv.models.layers import Maker, keeps_nothing
from hybridkv.spec import LayerSpec, LinearState


class Layers(NamedTuple):
    """What a family says of a config: the type of each decoder layer, and how each type is made."""

    types: Sequence[str]
    makers: Mapping[str, Maker]
    sizes: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    """By layer: fields of the config that have other values there, such as the number of KV heads."""

    def config_of(self, cfg: Config, layer: int) -> Config:
        """The config as `layer` reads it."""
        return cfg.of_layer(layer, self.sizes.get(layer, {}))


Describe = Callable[[Config], Layers]


OLDEST_TRANSFORMERS = "5.17"
"""First release of transformers that the engine runs with."""


@dataclass(frozen=True, slots=True)
class Family:
    """All that is known of one model type."""

    describe: Describe
    feed_forward: FeedForward
    defaults: Mapping[str, Any]
    """Values of the transformers config class where config.json is silent, of fields that say what is kept."""
    weight_defaults: Mapping[str, Any]
    """The same of fields that say how many weights there are. Apart, because a catalogue entry that leaves one of these
    out is incomplete, and must not be completed with the size of some other member of its family."""
    attention_weights: Callable[[Config, LayerSpec], int] = mixer_weights.attention
    state_weights: Callable[[Config, LinearState], int] = mixer_weights.by_kept_parts
    around: Callable[[Config, Sequence[str], Sequence[LayerSpec]], Weights] = mixer_weights.nothing_around
    """Weights beside those of the layers: from the config, the types of the layers and their specs."""
    tables: Callable[[Config, int], int] = mixer_weights.no_tables
    """Parameters of embeddings beside the usual ones: from the config and the number of layers."""
    plan_only: str = ""
    """Why the engine does not run transformers' model; empty if it does."""
    with_layer_types: str = ""
    """The type that transformers makes of a config.json with `layer_types`, if it is another one."""
    compiles: bool = True
    """True if torch can compile the decoder layers of transformers' model."""
    since: str = OLDEST_TRANSFORMERS
    """First release of transformers whose model the engine can run."""

    def is_in(self, transformers: str) -> bool:
        """Whether this release of transformers, such as "5.17.0", has the model."""
        return _release(transformers) >= _release(self.since)


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: patches of a release add no models."""
    return tuple(int(number) for number in version.split(".")[:2])


FAMILIES: dict[str, Family] = {}

SHARED = "shared_"
"""Prefix of the type of layers that compute no keys and values: they read those of an earlier layer of the type that
follows it."""

# Names in older checkpoints -> the names transformers uses now.
_LEGACY_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def type_name(written: str) -> str:
    """Return the layer type that older checkpoints call `written`."""
    return _LEGACY_TYPES.get(written, written)


def types_of_pattern(pattern: str) -> list[str]:
    """Return the layer types of a pattern in which each letter is a block. Unknown letters stay as they are."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [names.get(letter, letter) for letter in pattern]


def family(
    model_type: str,
    *,
    feed_forward: FeedForward,
    defaults: Mapping[str, Any],
    weight_defaults: Mapping[str, Any],
    **more: Any,
) -> Callable[[Describe], Describe]:
    """Register a function as the family `model_type`; it may be registered for several, each with its own record.

    `more`: fields of `Family` that differ from their defaults.
    """

    def register(describe: Describe) -> Describe:
        FAMILIES[model_type] = Family(describe, feed_forward, defaults, weight_defaults, **more)
        return describe

    return register


def make_layers(cfg: Config, layers: Layers) -> tuple[LayerSpec, ...]:
    """The layer specs of a config."""
    specs: list[LayerSpec] = []
    for layer, written in enumerate(layers.types):
        maker = layers.makers.get(type_name(written))
        if maker is None:
            raise ConfigError(
                f"layer {layer} of {cfg.name} has unknown layer type {written!r}: "
                f"{cfg.model_type} models may have {', '.join(sorted(layers.makers))}"
            )
        specs += maker(layers.config_of(cfg, layer), layer)
    return tuple(specs)


def readers_of_shared_kv(cfg: Config, layers: Layers) -> tuple[LayerSpec, ...]:
    """Return the specs that layers without KV of their own read: of the same sizes and sight, by their own numbers."""
    specs: list[LayerSpec] = []
    for layer, kind in enumerate(layers.types):
        if kind.startswith(SHARED):
            specs += layers.makers[kind.removeprefix(SHARED)](layers.config_of(cfg, layer), layer)
    return tuple(specs)


def check_causal(cfg: Config) -> None:
    """Refuse a model whose tokens see those after them."""
    if cfg.get("use_bidirectional_attention", default=False):
        raise ConfigError(f"{cfg.name} attends in both directions and keeps no cache: choose a causal model")


def given_or(cfg: Config, default: Sequence[str]) -> Sequence[str]:
    """The config's own list of layer types, or `default`: in both cases one for each layer."""
    given = cfg.strings("layer_types", "layers_block_type")
    types = default if given is None else given
    if len(types) != cfg.num_layers:
        raise ConfigError(
            f"config of {cfg.name} has {len(types)} layer types for num_hidden_layers {cfg.num_layers}: make them agree"
        )
    return types


def all_layers(cfg: Config, layer_type: str) -> list[str]:
    return [layer_type] * cfg.num_layers


def every(cfg: Config, interval: int, last: str, others: str) -> list[str]:
    """`last` at every `interval`-th layer, `others` between."""
    return [last if (i + 1) % interval == 0 else others for i in range(cfg.num_layers)]


def with_shared_kv(cfg: Config, types: Sequence[str], makers: Mapping[str, Maker]) -> Layers:
    """Layers of which the last `num_kv_shared_layers` read the keys and values of an earlier layer of their type."""
    shared = cfg.optional_count("num_kv_shared_layers")
    if shared >= cfg.num_layers:
        raise ConfigError(f"config of {cfg.name}: num_kv_shared_layers {shared} leaves none of {cfg.num_layers} layers")
    own = cfg.num_layers - shared
    for layer, kind in enumerate(types[own:], own):
        if kind not in types[:own]:
            raise ConfigError(
                f"config of {cfg.name}: layer {layer} is to read the KV of another {kind!r} layer, but no layer before "
                f"layer {own} is of that type; mend layer_types or num_kv_shared_layers"
            )
    readers = [SHARED + kind for kind in types[own:]]
    return Layers([*types[:own], *readers], {**makers, **dict.fromkeys(readers, keeps_nothing)})


def where(cfg: Config, chosen: Sequence[int], there: str, elsewhere: str) -> list[str]:
    """`there` at the chosen layers (counted from 0), `elsewhere` at the others."""
    outside = [layer for layer in chosen if layer >= cfg.num_layers]
    if outside:
        raise ConfigError(f"config of {cfg.name}: layer {outside[0]} is named, but it has {cfg.num_layers} layers")
    return [there if i in chosen else elsewhere for i in range(cfg.num_layers)]
