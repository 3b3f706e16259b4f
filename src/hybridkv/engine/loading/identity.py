"""What a model is, in a few digits: equal for equal weights and configuration, wherever they were loaded from.

And what people call it, which no digest covers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel
from xxhash import xxh3_128

_NOT_THE_MODEL = ("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype")
"""Fields of a configuration that change nothing about what is computed. Weights have dtypes of their own."""


def model_identity(model: PreTrainedModel) -> str:
    """A digest of all weights and of the configuration. Reads every weight once."""
    digest = xxh3_128()
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def model_name(model: PreTrainedModel, path: str | Path | None) -> str:
    """Its directory's name; for a model that is in memory the one its config names, or else its class's."""
    where = str(path or model.config.name_or_path or "")
    return _directory_name(Path(os.path.abspath(where))) if where else type(model).__name__


def _directory_name(path: Path) -> str:
    """A hub's cache calls directories by digests: models--OWNER--NAME/snapshots/DIGEST."""
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/")
    return path.name
