"""How many weights a model has, and how many a token passes through: from its config, and from what its layers keep.

Matrices, convolutions and embeddings are counted; norms and biases are not, they are under a percent of any published
model. The specs must be those of the whole model: of one tensor-parallel rank of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybridkv.models.config import Config
from hybridkv.models.families.unknown import family_of
from hybridkv.models.family import Layers, readers_of_shared_kv
from hybridkv.models.feed_forward import NONE, Weights
from hybridkv.models.mixer_weights import query_and_output
from hybridkv.spec import LayerSpec, LinearState


def layer_weights(cfg: Config, layers: Layers, specs: Sequence[LayerSpec]) -> Weights:
    """All layers, and what stands around them but the embeddings and the LM head."""
    family = family_of(cfg.model_type)
    configs = [layers.config_of(cfg, layer) for layer in range(len(layers.types))]
    weights = sum((family.feed_forward(configs[i], i, kind) for i, kind in enumerate(layers.types)), NONE)
    weights = sum((Weights.dense(_mixer(configs[spec.layer], spec)) for spec in specs), weights)
    readers = readers_of_shared_kv(cfg, layers)
    weights = sum((Weights.dense(query_and_output(configs[spec.layer], spec)) for spec in readers), weights)
    return weights + family.around(cfg, layers.types, specs)


def head_parameters(cfg: Config) -> int:
    """Of the LM head; the embeddings have as many."""
    return cfg.integer("vocab_size") * cfg.integer("hidden_size")


def embedding_parameters(cfg: Config, num_layers: int) -> int:
    """Of tables a token looks itself up in; without the LM head's, if that is the same table."""
    tied = cfg.get("tie_word_embeddings", "tie_embedding", default=False)
    return (0 if tied else head_parameters(cfg)) + family_of(cfg.model_type).tables(cfg, num_layers)


def _mixer(cfg: Config, spec: LayerSpec) -> int:
    family = family_of(cfg.model_type)
    if isinstance(spec, LinearState):
        return family.state_weights(cfg, spec)
    return family.attention_weights(cfg, spec)


def state_elements(spec: LayerSpec) -> int:
    """Numbers in the recurrent state of a layer."""
    return sum(prod(part.shape) for part in spec.parts if part.name == "recurrent")
