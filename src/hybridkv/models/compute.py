"""How much computing the tokens of a model cost, from its config alone: what a cache hit saves.

    compute = compute_of("qwen3.5-397b-a17b")
    compute.flops(0, 8192)        # the forward pass of a prompt
    compute.flops(8000, 8192)     # of the same prompt with 8,000 tokens cached

A FLOP is one multiplication or one addition in a matrix product, a convolution or a state update; norms, activations
and softmax are not counted. All figures are of the whole model, whatever it is split over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridkv.errors import ConfigError, MissingFieldError
from hybridkv.models.config import Config
from hybridkv.models.families.unknown import family_of
from hybridkv.models.family import Layers, make_layers, readers_of_shared_kv
from hybridkv.models.mixer_weights import latent_head_dims
from hybridkv.models.reader import locate, open_config
from hybridkv.models.weights import embedding_parameters, head_parameters, layer_weights, state_elements
from hybridkv.sight import EVERYTHING, Sight
from hybridkv.spec import AttentionLayer, LatentAttention, LayerSpec, LinearState

# A state is decayed, written to (a product and a sum) and read from (a product and a sum), and the delta rule reads it
# once more before it writes. Kernels that work in chunks do more than this, but on matrix units.
_FLOPS_PER_STATE_ELEMENT = 6
# "397b-a17b": all and active, in billions. "e4b" of Gemma 3n counts what must be in memory.
_TOTAL = re.compile(r"(?:^|[-_ ])e?(\d+(?:\.\d+)?)b(?=$|[-_ ])", re.IGNORECASE)
_ACTIVE = re.compile(r"(?:^|[-_ ])a(\d+(?:\.\d+)?)b(?=$|[-_ ])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Attention:
    """The layers that look back in the same way."""

    pair_flops: int
    """Of all of them, for one token that looks at one token: score and value."""
    sight: Sight = EVERYTHING


@dataclass(frozen=True, slots=True)
class Compute:
    """What the tokens of one model cost."""

    name: str
    active_parameters: int
    """Parameters a token passes through: routed and shared experts, the LM head, no embeddings."""
    total_parameters: int
    head_parameters: int
    """Of the LM head alone; 0 where they are not known."""
    state_flops: int
    """Of one token, to update and read all recurrent states."""
    attention: tuple[Attention, ...]
    source: str
    """"config", or "name" where the sizes are missing and the parameters are those the model's name gives."""

    def flops(self, start: int, end: int) -> float:
        """Of the forward pass of tokens [start, end) of a sequence whose first `start` tokens are cached.

        The LM head runs once, for the last of them. Nothing for no tokens.
        """
        if not 0 <= start <= end:
            raise ConfigError(f"tokens from {start} to {end} of a sequence: expected 0 <= start <= end")
        if start == end:
            return 0.0
        per_token = 2 * (self.active_parameters - self.head_parameters) + self.state_flops
        seen = sum(
            kind.pair_flops * (kind.sight.num_pairs(end) - kind.sight.num_pairs(start)) for kind in self.attention
        )
        return float((end - start) * per_token + seen + 2 * self.head_parameters)


def compute_of(model: str | Path) -> Compute:
    """The computing of `model`: a directory with a config.json, such a file, or a name of the catalogue."""
    source = locate(model)
    # Our own records may leave sizes out; a config.json leaves out what equals the default of its class.
    return read_compute(source.config, name=source.name, use_defaults=source.verified)


def read_compute(config: Mapping[str, Any], *, name: str, use_defaults: bool = True) -> Compute:
    """The computing of a config that is already in memory.

    `use_defaults`: sizes it leaves out are those of its transformers config class.
    """
    cfg = open_config(config, name)
    if use_defaults:
        cfg = replace(cfg, defaults={**family_of(cfg.model_type).weight_defaults, **cfg.defaults})
    layers = family_of(cfg.model_type).describe(cfg)
    specs = make_layers(cfg, layers)
    try:
        return _from_config(cfg, layers, specs)
    except MissingFieldError as missing:
        return _from_name(cfg, layers, specs, missing)


def _from_config(cfg: Config, layers: Layers, specs: Sequence[LayerSpec]) -> Compute:
    weights, head = layer_weights(cfg, layers, specs), head_parameters(cfg)
    return Compute(
        name=cfg.name,
        active_parameters=weights.active + head,
        total_parameters=weights.total + head + embedding_parameters(cfg, len(layers.types)),
        head_parameters=head,
        state_flops=_state_flops(specs),
        attention=_attention(cfg, layers, specs),
        source="config",
    )


def _from_name(cfg: Config, layers: Layers, specs: Sequence[LayerSpec], missing: MissingFieldError) -> Compute:
    """An estimate: published names count the embeddings, too."""
    total, active = _TOTAL.search(cfg.name), _ACTIVE.search(cfg.name)
    given = active or total
    if given is None:
        raise ConfigError(
            f"cannot tell what a token of {cfg.name} costs to compute: {missing}, or pass --prefill-rate"
        ) from None
    parameters = int(float(given[1]) * 1e9)
    return Compute(
        name=cfg.name,
        active_parameters=parameters,
        total_parameters=int(float(total[1]) * 1e9) if total else parameters,
        head_parameters=0,
        state_flops=_state_flops(specs),
        attention=_attention(cfg, layers, specs),
        source="name",
    )


def _state_flops(specs: Sequence[LayerSpec]) -> int:
    return _FLOPS_PER_STATE_ELEMENT * sum(state_elements(spec) for spec in specs if isinstance(spec, LinearState))


def _attention(cfg: Config, layers: Layers, specs: Sequence[LayerSpec]) -> tuple[Attention, ...]:
    """The attention of all layers, by how far it looks back."""
    flops: Counter[Sight] = Counter()
    for spec in (*specs, *readers_of_shared_kv(cfg, layers)):
        if isinstance(spec, AttentionLayer):
            flops[spec.sight] += _pair_flops(layers.config_of(cfg, spec.layer), spec)
    return tuple(Attention(count, sight) for sight, count in flops.items())


def _pair_flops(cfg: Config, spec: LayerSpec) -> int:
    heads = cfg.integer("num_attention_heads")
    if isinstance(spec, LatentAttention):
        return 2 * heads * sum(latent_head_dims(cfg))
    return 2 * heads * sum(part.shape[1] for part in spec.parts)
