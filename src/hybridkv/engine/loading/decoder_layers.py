"""Where a model has its decoder layers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError


def find_layers(model: PreTrainedModel) -> str:
    """The path of the list of decoder layers. Not every family has a standard place for it."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        is_list = name.endswith("layers") and isinstance(module, torch.nn.ModuleList)
        if is_list and len(module) == count and "vision" not in name and "audio" not in name:
            return str(name)
    raise ConfigError(f"{type(model).__name__} has no list of {count} decoder layers: it cannot be observed")
