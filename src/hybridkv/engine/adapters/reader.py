"""Reads a LoRA adapter from the folder that peft writes: adapter_config.json and adapter_model.safetensors.

It does not need peft, and knows no model: `fitting` compares an adapter with one. The names of the tensors say which
modules are adapted, and their sizes say with which rank. A variant of LoRA that computes anything else is refused here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridkv.errors import ConfigError
from hybridkv.files import FileError, check_folder, read_json
from hybridkv.texts import shown

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"})
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that change nothing for an adapter that is trained: the tensors say what they have led to."""
_REFUSED = {
    "use_dora": "DoRA scales the weights of the base model",
    "modules_to_save": "it replaces whole modules of the base model",
    "target_parameters": "it adapts parameters of fused experts",
    "trainable_token_indices": "it replaces rows of the embedding",
    "lora_bias": "its LoRA layers have biases",
    "layer_replication": "it repeats layers of the base model",
    "alora_invocation_tokens": "it takes effect only after some tokens (aLoRA)",
    "use_qalora": "QALoRA pools what the adapter reads",
}
"""Fields of variants, and what such an adapter does that is not computed here."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it was."""
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAVE_AGAIN = "save it with peft's save_pretrained"


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Changes one linear layer W of the base model to W x + scale * up (down x)."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank]"""
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's tensors, on the host."""

    directory: Path
    base: str
    """Name or directory of the model that it was trained on; empty if its config does not say."""
    pairs: Mapping[str, LoraPair]
    """By the path of the module in the model that it was trained on."""


def is_adapter(directory: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return os.path.lexists(directory / CONFIG_NAME) and not os.path.lexists(directory / "config.json")


def read_adapter(directory: Path) -> Adapter:
    """Read and check an adapter. Raises ConfigError for a folder that is none, and for what is not plain LoRA."""
    _check_place(directory)
    config = _read_config(directory / CONFIG_NAME)
    tensors = _read_tensors(directory / WEIGHTS_NAME)
    pairs = {}
    for module in sorted({module for module, _ in tensors}):
        _check_targeted(directory, module, config["target_modules"])
        lacking = [side for side in "AB" if (module, side) not in tensors]
        if lacking:
            raise ConfigError(f"adapter {directory} has no lora_{lacking[0]} of {module}; {_SAVE_AGAIN} again")
        pairs[module] = _pair(directory, module, tensors[module, "A"], tensors[module, "B"], config)
    return Adapter(directory, str(config.get("base_model_name_or_path") or ""), pairs)


def _check_place(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"no directory {str(directory)!r}: name one that a LoRA adapter was saved to")
    if not os.path.lexists(directory / CONFIG_NAME):
        raise ConfigError(f"{str(directory)!r} has no {CONFIG_NAME}: name a directory that a LoRA adapter was saved to")
    try:
        check_folder(directory)
    except FileError as error:
        raise ConfigError(f"cannot load adapter {directory}: {error}; remove it, or name another directory") from None
    if not os.path.lexists(directory / WEIGHTS_NAME):
        raise ConfigError(f"{str(directory)!r} has no {WEIGHTS_NAME}: {_SAVE_AGAIN}, which writes safetensors")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileError as error:
        raise ConfigError(f"cannot read {path}: {error}; get it again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object: get it again")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{path} is of peft_type {shown(kind)}: only LORA is served; merge it into its model")
    _check_variant(path, config)
    for name in ("r", "lora_alpha"):
        if not _is_positive(config.get(name)):
            raise ConfigError(f"{path} has {name} {shown(config.get(name))}: a number above 0 is needed; get it again")
    for name in ("rank_pattern", "alpha_pattern"):
        if not _is_pattern(config.get(name) or {}):
            raise ConfigError(f"{path} has {name} {shown(config[name])}: module names with numbers are needed")
    target = config.setdefault("target_modules", None)
    if not isinstance(target, str) and not (_is_list(target) and target):
        raise ConfigError(f"{path} has target_modules {shown(target)}: names of modules are needed; get it again")
    return config


def _check_variant(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse whatever would be computed otherwise than W x + scale * up (down x)."""
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise ConfigError(f"{path} has {name}: {reason}, which is not served; merge it into its model")
    if config.get("bias", "none") != "none":
        raise ConfigError(
            f"{path} has bias {shown(config['bias'])}: it replaces biases of the base model, which is not served; "
            "merge it into its model"
        )
    start = config.get("init_lora_weights", True)
    if not any(start is known or (isinstance(start, str) and start == known) for known in _PLAIN_STARTS):
        raise ConfigError(
            f"{path} has init_lora_weights {shown(start)}, which changes the weights of the base model; convert it "
            "with path_initial_model_for_weight_conversion of save_pretrained"
        )
    known = {"bias", "init_lora_weights", *_READ, *_WITHOUT_EFFECT, *_REFUSED}
    for name in sorted(config.keys() - known):
        if config[name]:
            raise ConfigError(
                f"{path} has {shown(name)} {shown(config[name])}, a variant of LoRA that is not known here; merge it "
                "into its model"
            )


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_pattern(value: object) -> bool:
    return isinstance(value, dict) and all(_is_positive(one) for one in value.values())


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _read_tensors(path: Path) -> dict[tuple[str, str], Tensor]:
    """The tensors by module and side, A or B."""
    found: dict[tuple[str, str], Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                named = _TENSOR.fullmatch(name)
                if named is None:
                    raise ConfigError(
                        f"{path} holds {shown(name)}, which is no LoRA weight of a linear layer: it is not served; "
                        "merge the adapter into its model"
                    )
                tensor: Tensor = file.get_tensor(name)
                if tensor.dtype not in _DTYPES or tensor.dim() != 2 or not tensor.numel():
                    about = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                    raise ConfigError(f"{path} holds {shown(name)} as {about}: a matrix of floats is needed")
                found[named["module"], named["side"]] = tensor
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is cut off or damaged ({error}); get it again") from None
    if not found:
        raise ConfigError(f"{path} holds no tensors: {_SAVE_AGAIN} again")
    return found


def _check_targeted(directory: Path, module: str, target: str | Sequence[str]) -> None:
    """Refuse tensors of modules that the config does not name: peft would ignore them."""
    if isinstance(target, str):
        try:
            is_named = target == "all-linear" or re.fullmatch(target, module) is not None
        except re.error as error:
            raise ConfigError(f"{directory / CONFIG_NAME} has target_modules {shown(target)}: {error}") from None
    else:
        is_named = any(module == one or module.endswith(f".{one}") for one in target)
    if not is_named:
        raise ConfigError(
            f"adapter {directory} has weights of {module}, which target_modules {shown(target)} does not name; "
            f"{_SAVE_AGAIN} again"
        )


def _pair(directory: Path, module: str, down: Tensor, up: Tensor, config: Mapping[str, Any]) -> LoraPair:
    rank = _by_pattern(directory, "rank_pattern", module, config, config["r"])
    if not down.shape[0] == up.shape[1] == rank:
        raise ConfigError(
            f"adapter {directory} has matrices of {list(down.shape)} and {list(up.shape)} for {module}, and its config "
            f"a rank of {rank}; get both from one place"
        )
    alpha = _by_pattern(directory, "alpha_pattern", module, config, config["lora_alpha"])
    return LoraPair(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(directory: Path, field: str, module: str, config: Mapping[str, Any], default: float) -> float:
    """The first entry whose pattern fits the end of the module's path."""
    for pattern, value in (config.get(field) or {}).items():
        try:
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
                return float(value)
        except re.error as error:
            raise ConfigError(f"{directory / CONFIG_NAME} has {field} {shown(pattern)}: {error}") from None
    return default
