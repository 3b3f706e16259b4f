"""Which device a model computes on, and how it gets there."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hybridkv.engine.loading.model_files import first_line
from hybridkv.engine.loading.quantization import computing_dtype, is_quantized, quantization_of
from hybridkv.errors import ConfigError, InputError


def choose_device(device: str | torch.device) -> torch.device:
    """ "auto": a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"unknown device {str(device)!r}: write cpu, cuda, cuda:1 or auto") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(device)!r}: models run on cpu or cuda; write one of them, or auto")
    num_gpus = torch.cuda.device_count() if chosen.type == "cuda" else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= num_gpus:
        raise InputError(f"device {str(device)!r}: this machine has {num_gpus} usable GPUs; choose another, or cpu")
    return chosen


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in `dtype`. Raises InputError for a quantised model that computes in another one."""
    if is_quantized(model) and computing_dtype(model) != dtype:
        raise InputError(
            f"dtype {str(dtype).removeprefix('torch.')!r}: a model in memory that is quantised "
            f"({quantization_of(model)}) cannot be converted; leave out dtype, or pass the checkpoint's directory"
        )
    return model if is_quantized(model) else model.to(dtype)


def place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return the model on `device`."""
    if not is_quantized(model):
        return model.to(device)
    if model.device.type == device.type and device.index in (None, model.device.index):
        return model
    try:
        return model.to(device)
    except Exception as error:  # packages of quantisation raise errors of any type
        raise ConfigError(
            f"cannot move the quantised model ({quantization_of(model)}) to {device}: {first_line(error)}; load it "
            "there"
        ) from error
