"""Layers of transformers' models that use the keys and values of earlier layers."""

from __future__ import annotations

from torch import nn


def kv_source(module: nn.Module) -> int | None:
    """The layer whose keys and values a layer uses: the last one of its type that computes any. None: its own.

    Worked out from the config, because attributes that say it come and go with releases of transformers.
    """
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    config, types = module.config, module.config.layer_types
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return max(layer for layer in range(own) if types[layer] == types[module.layer_idx])
