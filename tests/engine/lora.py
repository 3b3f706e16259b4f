"""Adapters as peft saves them, and the models that peft makes of them: the oracle of requests with an adapter."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engine.zoo import ALL, build

_MAMBAS = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types whose `out_proj` peft refuses to adapt."""
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that peft takes for the fused experts of a model and their router, where there are any."""
_HOME = tempfile.TemporaryDirectory(prefix="adapters-")
"""Adapters live as long as the process."""


def linear_layers(model: Any) -> list[str]:
    """The paths of all layers that an adapter may have."""
    refused = {"dt_proj"}
    if model.config.model_type in _MAMBAS:
        refused.add("out_proj")
    if any(path.endswith(".experts") for path, _ in model.named_modules()):
        refused |= _OF_EXPERTS
    head = model.get_output_embeddings()
    return [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and path.rpartition(".")[2] not in refused
        if not any(tower in path for tower in ("vision", "visual", "audio"))
    ]


def save_adapter(model: Any, directory: Path, seed: int = 0, *, scale: float = 1.0, **config: Any) -> Any:
    """Save a random adapter of a model, which stays as it is; returns peft's model with the adapter.

    `scale`: of what it adds, where branches are loud beside what they are added to: see `fill_weights`.
    `config`: fields of peft's LoraConfig.
    """
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "target_modules": linear_layers(model), **config}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**options)).eval()
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if ".lora_A." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=chance) / tensor.shape[-1] ** 0.5)
            elif ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=chance) * 0.1 * scale)
    adapted.save_pretrained(str(directory), save_embedding_layers=False)
    return adapted


@functools.cache
def _adapted(family: str, seed: int) -> tuple[Path, Any]:
    directory = Path(_HOME.name) / f"{family}-{seed}"
    return directory, save_adapter(build(family), directory, seed, scale=ALL[family].branch_scale)


def two_adapters(family: str) -> Mapping[str, tuple[Path, Any]]:
    """Two adapters of all layers of a family's tiny model, by name: their directories, and peft's models."""
    return {"sql": _adapted(family, 1), "chat": _adapted(family, 2)}


def directories(family: str) -> dict[str, Path]:
    """The directories of `two_adapters`."""
    return {name: directory for name, (directory, _) in two_adapters(family).items()}
