"""Reads the model of a checkpoint's directory, or refuses it: with one error, whatever transformers raises."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hybridkv.engine.loading.families import check_supported
from hybridkv.engine.loading.host import has_bfloat16
from hybridkv.engine.loading.quantization import check_stated, device_map, prepare_quantization
from hybridkv.errors import ConfigError, HybridKVError, InputError
from hybridkv.files import FileError, check_folder
from hybridkv.memory.memory import torch_dtype
from hybridkv.models.reader import open_config, read_config_file
from hybridkv.spec import DType

LOG = logging.getLogger("hybridkv.engine")

_COMPUTES_IN = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""owner/model"""


def check_path(model: str | Path) -> None:
    """Refuse a path that cannot be a model at once: transformers would query the hub for it repeatedly."""
    way_out = "name a directory that a transformers model was saved to"
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"a model of type {type(model).__name__}: {way_out}, or pass such a model")
    if not str(model) or not Path(model).is_dir():
        if isinstance(model, str) and HUB_NAME.fullmatch(model):
            return
        raise ConfigError(f"no directory {str(model)!r}: {way_out}")
    if not os.path.lexists(config := Path(model) / "config.json"):
        raise ConfigError(f"{str(model)!r} has no config.json: {way_out}")
    check_stated(read_config_file(config), str(model))
    check_model_folder(Path(model), "cannot load")


def check_model_folder(directory: Path, cannot: str) -> None:
    """Refuse a folder that holds what is no regular file. `cannot`: how the error begins."""
    try:
        check_folder(directory)
    except FileError as error:
        raise ConfigError(f"{cannot} {str(directory)!r}: {error}; remove it, or name another directory") from None


def weights_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype to compute in. Raises InputError for one that models cannot compute in."""
    names = ", ".join(one.value for one in _COMPUTES_IN)
    refusal = InputError(f"the engine cannot compute in {str(dtype)!r}: choose auto, {names}")
    try:
        parsed = DType.parse(str(dtype))
    except HybridKVError:
        raise refusal from None
    if parsed not in _COMPUTES_IN:
        raise refusal
    return torch_dtype(parsed)


def read_model(path: str, dtype: str | torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """Load the model of a checkpoint. Raises ConfigError for whatever is wrong with it."""
    wanted = "auto" if dtype == "auto" else weights_dtype(dtype)
    quantization: str | None = None
    try:
        check_config(PretrainedConfig.get_config_dict(path)[0], path)  # a class may be too new for this transformers
        config = _own_config(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code), path)
        check_config(config.to_dict(), path)
        config = getattr(config, "thinker_config", None) or config  # of Qwen3-Omni: the part that writes text
        quantization = prepare_quantization(config, path, device)
        if quantization and wanted == "auto" and _stated_dtype(config) is None:
            wanted = torch.bfloat16  # else transformers takes the type of some weight, such as float8
        if dtype == "auto" and _is_emulated(_stated_dtype(config) if wanted == "auto" else wanted, device):
            LOG.info("%s is loaded as float32: this CPU has no instructions for bfloat16", path)
            wanted = torch.float32
        model, report = _auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=wanted,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report lists them; they are refused below
            device_map=device_map(device) if quantization else None,
        )
    except HybridKVError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"cannot load {path!r}: {_damaged(path)}: {first_line(error)}; get it again") from error
    except Exception as error:
        if quantization:  # its packages raise errors of any type
            raise ConfigError(
                f"cannot load {path!r}: its quantisation {quantization!r} failed: {type(error).__name__}: "
                f"{first_line(error)}; name a checkpoint with plain weights"
            ) from error
        if not isinstance(error, (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError)):
            raise
        way_out = "name a directory a transformers model was saved to"
        raise ConfigError(f"cannot load {path!r}: {first_line(error)}; {way_out}") from error
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise ConfigError(
            f"cannot load {path!r}: {len(mismatched)} weights do not fit its config.json, such as {name} of "
            f"{list(found)} instead of {list(expected)}; get both from one place"
        )
    if missing:  # transformers would fill them with random numbers and continue
        raise ConfigError(f"cannot load {path!r}: it lacks {len(missing)} weights, such as {missing[0]}; get them all")
    return model


def _auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that makes the model: some are listed as multimodal models only."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _own_config(config: PretrainedConfig, path: str) -> PretrainedConfig:
    """The config as transformers' own class, where another package has registered a model under the same name.

    flash-linear-attention has a mamba2 of its own, and registers it as soon as it is imported.
    """
    name = CONFIG_MAPPING_NAMES.get(config.model_type)
    if name is None or _is_transformers(type(config)):
        return config
    return getattr(transformers, name).from_pretrained(path)


def _is_transformers(kind: type) -> bool:
    """Whether a class comes from transformers, or from a checkpoint's own code that transformers has loaded."""
    homes = ("transformers.models.", "transformers_modules.")
    return any(base.__module__.startswith(homes) for base in kind.__mro__)


def check_class(model: PreTrainedModel) -> None:
    """Refuse a model in memory whose class is not that of transformers."""
    kind = type(model)
    if not _is_transformers(kind):
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} is not transformers' own model of type {model.config.model_type!r}: "
            "pass the checkpoint's directory, or a model of transformers"
        )


def _is_emulated(wanted: torch.dtype | None, device: torch.device) -> bool:
    """Whether the weights are bfloat16 and the device computes bfloat16 in software, many times slower than float32."""
    return device.type == "cpu" and wanted == torch.bfloat16 and not has_bfloat16()


def _stated_dtype(config: PretrainedConfig) -> torch.dtype | None:
    return config.get_text_config(decoder=True).dtype or config.dtype


def _damaged(path: str) -> str:
    """Find the file that cannot be read: the error does not name it."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return f"{file.name} is cut off or damaged"
    return "a file of weights is cut off or damaged"


def check_config(config: dict[str, Any], name: str) -> None:
    """Refuse a model type that the engine does not run."""
    check_supported(open_config(plain(config), name).model_type, name)


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config with torch dtypes as strings."""
    return {
        key: plain(value) if isinstance(value, dict) else str(value) if isinstance(value, torch.dtype) else value
        for key, value in config.items()
    }


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
