"""Identity and name of a model.

The identity is a digest: equal for equal weights and configuration, wherever they were loaded from. It does not cover
the name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from xxhash import xxh3_128

from hybridkv.engine.loading.quantization import computing_dtype, quantization_of
from hybridkv.models.checkpoint_digest import NOT_THE_MODEL, adapter_digest, checkpoint_digest


def store_identity(model: PreTrainedModel, path: str | Path | None, adapter: Path | None = None) -> str:
    """The identity under which KV is stored: that of the directory's files, as in vLLM. A model in memory has its own.

    `path`: where the model was loaded from. `adapter`: what has been merged into its weights.
    """
    if path is None or not Path(path).is_dir():
        return model_identity(model)
    dtype = str(computing_dtype(model)).removeprefix("torch.")
    quantization = quantization_of(model)  # the config names it also where its weights have been expanded
    computed = [dtype, *([f"quantization {quantization}"] if quantization else [])]
    if adapter is not None:
        computed.append(f"adapter {adapter_digest(adapter)}")
    return checkpoint_digest(Path(path), *computed)


def model_identity(model: PreTrainedModel) -> str:
    """A digest of all weights and of the configuration. Reads every weight once."""
    digest = xxh3_128()
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_THE_MODEL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    if quantization := quantization_of(model):
        digest.update(f"quantization {quantization} {computing_dtype(model)}".encode())
    for name, value in model.state_dict().items():
        _add(digest, name, value)
    return digest.hexdigest()


def _add(digest: xxh3_128, name: str, value: Any) -> None:
    """Add a weight. Those of quantised models may be made of several tensors, and of numbers about them."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(digest, f"{name}.{key}", value[key])
    elif not isinstance(value, torch.Tensor):
        digest.update(f"{name} {value!r}".encode())
    elif hasattr(value, "__tensor_flatten__"):
        parts, about = value.__tensor_flatten__()
        digest.update(f"{name} {type(value).__name__} {about!r}".encode())
        for part in parts:
            _add(digest, f"{name}.{part}", getattr(value, part))
    else:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def model_name(model: PreTrainedModel, path: str | Path | None) -> str:
    """The name of the model's directory. For a model in memory: the name in its config, or else its class name."""
    where = str(path or model.config.name_or_path or "")
    return _directory_name(Path(os.path.abspath(where))) if where else type(model).__name__


def _directory_name(path: Path) -> str:
    """The directory's name, or OWNER/NAME for a hub cache path: models--OWNER--NAME/snapshots/DIGEST."""
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/")
    return path.name
