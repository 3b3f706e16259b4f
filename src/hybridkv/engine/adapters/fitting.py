"""Finds the linear layers of a loaded model that an adapter was trained for. Whatever does not fit is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from hybridkv.engine.adapters.reader import Adapter, LoraPair
from hybridkv.engine.loading.packing import READ_ELSEWHERE, PackedLinear
from hybridkv.errors import ConfigError

Linear = nn.Linear | PackedLinear

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+\..+)")
_OTHER_TOWERS = ("vision", "visual", "audio")


def fit(model: PreTrainedModel, layers_path: str, adapter: Adapter) -> Mapping[str, LoraPair]:
    """The adapter's pairs by the path of the module in this model.

    `layers_path`: where the model has its decoder layers. One language model has several names for them: alone, and
    as a part of a model that also sees.
    """
    modules = dict(model.named_modules())
    fitted: dict[str, LoraPair] = {}
    for stated, pair in adapter.pairs.items():
        path = _find(modules, layers_path, stated)
        if path.rpartition(".")[2] in READ_ELSEWHERE and not pair.up.any():
            continue  # it had no effect in training either
        module = modules.get(path)
        reason = "it has no such module" if module is None else _obstacle(model, path, module)
        if reason is not None:
            raise ConfigError(f"adapter {adapter.directory} adapts {stated} of the model: {reason}")
        assert module is not None
        sizes, expected = (pair.down.shape[1], pair.up.shape[0]), (module.in_features, module.out_features)
        if sizes != expected:
            raise ConfigError(
                f"adapter {adapter.directory} does not fit the model: {stated} has {expected[0]} inputs and "
                f"{expected[1]} outputs, and the adapter's matrices are for {sizes[0]} and {sizes[1]}"
                + (f"; it was trained on {adapter.base!r}" if adapter.base else "")
            )
        fitted[path] = pair
    return fitted


def _find(modules: Mapping[str, nn.Module], layers_path: str, stated: str) -> str:
    if stated in modules or any(tower in stated for tower in _OTHER_TOWERS):
        return stated
    in_layer = _LAYER.fullmatch(stated)
    return stated if in_layer is None else f"{layers_path}.{in_layer[1]}"


def _obstacle(model: PreTrainedModel, path: str, module: nn.Module) -> str | None:
    """Why an adapter of this module is not served; None if it is."""
    name, parents = path.rpartition(".")[2], path.split(".")[:-1]
    if module is model.get_output_embeddings():
        return "adapters of the output layer are not served"
    if any(tower in path for tower in _OTHER_TOWERS):
        return "only the language model is served"
    if type(module) not in (nn.Linear, PackedLinear):
        return f"it is a {type(module).__name__}, and only linear layers are adapted"
    if "experts" in parents:
        return "adapters of single experts are not served"
    if name in READ_ELSEWHERE:
        return "its weights are read without running it, so an adapter would have no effect"
    return None
