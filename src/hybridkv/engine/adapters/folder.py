"""A folder that holds an adapter and no model: the model is its base, with the adapter merged into the weights.

Requests cannot choose here: such a folder, named as the model, gives the adapted model, as with peft's
`merge_and_unload`. An adapter that requests choose by name is served beside its base instead (`adapters`).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hybridkv.engine.adapters.fitting import fit
from hybridkv.engine.adapters.reader import CONFIG_NAME, Adapter, read_adapter
from hybridkv.engine.loading.decoder_layers import find_layers
from hybridkv.engine.loading.quantization import is_quantized, quantization_of
from hybridkv.errors import ConfigError

_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def read_adapter_folder(model: str | Path) -> Adapter | None:
    """The adapter of a folder without weights of a model; None if there is no adapter. Refuses a folder with both.

    transformers adds the adapter of such a folder to the model if peft is installed, and else leaves it out, both
    without a word.
    """
    directory = Path(model)
    if not directory.is_dir() or not os.path.lexists(directory / CONFIG_NAME):
        return None
    if any(file for pattern in _WEIGHTS for file in directory.glob(pattern)):
        raise ConfigError(
            f"{str(model)!r} holds a model and an adapter ({CONFIG_NAME}), and does not say whether the adapter is to "
            "be used; move the adapter's files to a folder of their own and name that, or remove them"
        )
    return read_adapter(directory)


def find_base(adapter: Adapter) -> Path:
    """The directory of the model that an adapter was trained on: an absolute path, or one relative to the adapter."""
    where = f"adapter {str(adapter.directory)!r}"
    if not adapter.base:
        raise ConfigError(f"{where} does not name its base: set base_model_name_or_path in its {CONFIG_NAME}")
    base = adapter.directory / adapter.base  # an absolute path stays as it is
    if not base.is_dir():
        raise ConfigError(
            f"{where} has the base {adapter.base!r}, and there is no directory {str(base)!r}; get the base, and set "
            f"base_model_name_or_path in {CONFIG_NAME} to its directory"
        )
    if os.path.lexists(base / CONFIG_NAME):
        raise ConfigError(f"{where} has the base {adapter.base!r}, which is an adapter itself: merge that one first")
    return base


def merge(model: PreTrainedModel, adapter: Adapter) -> None:
    """Add an adapter to the weights of its base, in place."""
    cannot = f"cannot merge adapter {str(adapter.directory)!r} into its base {adapter.base!r}"
    if is_quantized(model):
        raise ConfigError(
            f"{cannot}: its weights are quantised ({quantization_of(model)}); name a base with plain weights"
        )
    fitted = fit(model, find_layers(model), adapter)
    users = Counter(id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear))
    with torch.no_grad():
        for path, pair in fitted.items():
            weight = model.get_submodule(path).weight
            if users[id(weight)] > 1:
                raise ConfigError(
                    f"{cannot}: {path} shares its weights with other layers; name the base as the model, and the "
                    "adapter as one of its adapters"
                )
            up, down = (one.to(weight.device, torch.float32) for one in (pair.up, pair.down))
            weight.copy_(weight.float() + pair.scale * up @ down)
