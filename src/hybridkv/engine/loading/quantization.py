"""Quantised checkpoints: which of them run here is decided before anything is loaded.

transformers loads and computes quantised weights, each method with packages of its own. A method that cannot run is
refused here, with the package or the device that it lacks: further on it would end in an error of that package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from hybridkv.errors import ConfigError
from hybridkv.texts import shown

LOG = logging.getLogger("hybridkv.engine")

_OTHER_CHECKPOINT = "name a checkpoint of the model with plain weights, or with another quantisation"
_COMPUTES_IN = (torch.float32, torch.bfloat16, torch.float16)
_NARROW_TYPES = ("F8_", "F4", "I8", "U8")
"""Types of safetensors that weights are quantised to."""


class Method(NamedTuple):
    """Requirements of a method of quantisation."""

    packages: tuple[str, ...] = ()
    """Distributions, by their names for pip."""
    needs_gpu: bool = False
    expands_on_cpu: bool = False
    """True if a CPU computes with plain weights, which transformers makes when it loads the quantised ones."""
    never: str = ""
    """Why transformers cannot load such a directory at all."""


METHODS: Mapping[str, Method] = {
    "aqlm": Method(("aqlm", "accelerate")),
    "auto-round": Method(("auto-round", "accelerate")),
    "awq": Method(("gptqmodel", "accelerate")),
    "bitnet": Method(("accelerate",)),
    "bitsandbytes_4bit": Method(("bitsandbytes", "accelerate")),
    "bitsandbytes_8bit": Method(("bitsandbytes", "accelerate")),
    "compressed-tensors": Method(("compressed-tensors",)),
    "eetq": Method(("kernels", "accelerate"), needs_gpu=True),
    "fbgemm_fp8": Method(("fbgemm-gpu", "accelerate"), needs_gpu=True),
    "fouroversix": Method(("fouroversix",), needs_gpu=True),
    "fp8": Method(("accelerate",), expands_on_cpu=True),
    "fp_quant": Method(("fp-quant",), needs_gpu=True),
    "gemma": Method(),
    "gguf": Method(never="transformers reads it from a .gguf file that must be named"),
    "gptq": Method(("optimum", "gptqmodel")),
    "higgs": Method(("flute-kernel", "fast-hadamard-transform", "accelerate"), needs_gpu=True),
    "hqq": Method(("hqq",)),
    "metal": Method(("accelerate",), expands_on_cpu=True),
    "mxfp4": Method(("accelerate",), expands_on_cpu=True),
    "mxfp8": Method(("accelerate",), expands_on_cpu=True),
    "nvfp4": Method(never="transformers quantises to it, but does not load checkpoints of it"),
    "quanto": Method(("optimum-quanto", "accelerate")),
    "quark": Method(("amd-quark",)),
    "sinq": Method(("sinq",)),
    "spqr": Method(("spqr-quant", "accelerate"), needs_gpu=True),
    "torchao": Method(("torchao",)),
    "vptq": Method(("vptq", "accelerate"), needs_gpu=True),
}


def check_stated(config: Mapping[str, Any], path: str) -> None:
    """Refuse a quantization_config that is no object: transformers fails on it while it reads the config."""
    for part in (config, config.get("text_config")):
        stated = part.get("quantization_config") if isinstance(part, Mapping) else None
        if stated is not None and not isinstance(stated, Mapping):
            raise ConfigError(
                f"cannot load {path!r}: its quantization_config is {shown(stated)}, not an object; get config.json "
                "again"
            )


def prepare_quantization(config: PretrainedConfig, path: str, device: torch.device) -> str | None:
    """Return the name of a checkpoint's quantisation, or None; refuse one that cannot run on this device.

    Where a CPU computes with plain weights, the config is told so: transformers would look for a GPU on its own, also
    if another device was chosen.
    """
    stated = _stated(config)
    if stated is None:
        _check_plain(Path(path))
        return None
    cannot = f"cannot load {path!r}"
    name = _name(stated)
    if name is None or name not in AUTO_QUANTIZER_MAPPING:
        raise ConfigError(
            f"{cannot}: its quant_method is {shown(name)}, and transformers {transformers.__version__} reads "
            f"{', '.join(sorted(AUTO_QUANTIZER_MAPPING))}; {_OTHER_CHECKPOINT}"
        )
    _check_method(name, cannot, device)
    _check_activations(stated, cannot)
    if METHODS[name].expands_on_cpu and device.type == "cpu":
        stated = {**stated, "dequantize": True}
        config.quantization_config = stated
        LOG.info("%s is quantised (%s): its weights are expanded, which takes more memory than its files", path, name)
    _check_environment(name, stated, cannot, device)
    return name


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether any weights are quantised. False for weights that were expanded when they were loaded."""
    return bool(getattr(model, "is_quantized", False)) or getattr(model, "hf_quantizer", None) is not None


def quantization_of(model: PreTrainedModel) -> str:
    """The name of a model's quantisation; empty for plain weights."""
    if not is_quantized(model):
        return ""
    stated = _stated(model.config)
    if stated is not None and not isinstance(stated, Mapping):
        stated = stated.to_dict()
    method = _name(stated or {}) or getattr(model, "quantization_method", None) or "unknown"
    return str(getattr(method, "value", method))


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of hidden states, and so of keys and values. Quantised weights have another."""
    if not is_quantized(model):
        return model.dtype
    embedded = getattr(model.get_input_embeddings(), "weight", None)
    for dtype in (getattr(embedded, "dtype", None), model.config.get_text_config(decoder=True).dtype):
        if dtype in _COMPUTES_IN:
            return dtype
    raise ConfigError(
        f"cannot tell in which dtype the quantised model {type(model).__name__} computes: its embedding has "
        f"{getattr(embedded, 'dtype', None)}; {_OTHER_CHECKPOINT}"
    )


def check_latents(model: PreTrainedModel, cannot: str) -> None:
    """Refuse latents that a GPU would expand with quantised weights: its kernels read them as plain ones."""
    if model.device.type == "cpu" or not is_quantized(model):
        return
    for name, module in model.named_modules():
        weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        if hasattr(module, "kv_b_proj") and getattr(weight, "dtype", None) != computing_dtype(model):
            raise ConfigError(
                f"{cannot}: {name}.kv_b_proj is quantised, and a GPU reads its weights as plain ones; run it with "
                f"device='cpu', or {_OTHER_CHECKPOINT}"
            )


def _stated(config: PretrainedConfig) -> Any:
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return found


def _name(stated: Mapping[str, Any]) -> str | None:
    """The method as transformers names it. bitsandbytes has one for each width."""
    for flag, width in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if stated.get(flag):
            return f"bitsandbytes_{width}"
    method = stated.get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def _check_method(name: str, cannot: str, device: torch.device) -> None:
    method = METHODS.get(name)
    if method is None:
        raise ConfigError(f"{cannot}: the engine does not know its quantisation {name!r}; {_OTHER_CHECKPOINT}")
    if method.never:
        raise ConfigError(f"{cannot}: its quantisation is {name!r}, and {method.never}; {_OTHER_CHECKPOINT}")
    if method.needs_gpu and device.type == "cpu":
        raise ConfigError(
            f"{cannot}: its quantisation {name!r} needs a GPU; choose device='cuda', or {_OTHER_CHECKPOINT}"
        )
    missing = [package for package in method.packages if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"{cannot}: its quantisation {name!r} needs {' and '.join(missing)}; pip install {' '.join(missing)}, or "
            f"{_OTHER_CHECKPOINT}"
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _check_activations(stated: Mapping[str, Any], cannot: str) -> None:
    """Refuse one scale for all activations of a step: a reply would depend on the requests beside it."""
    for group in _objects(stated.get("config_groups")):
        inputs = group.get("input_activations")
        if isinstance(inputs, Mapping) and inputs.get("dynamic") and inputs.get("strategy") in ("tensor", None):
            raise ConfigError(
                f"{cannot}: it quantises activations with one scale for all tokens of a step (dynamic, strategy "
                f"'tensor'), so that replies would depend on other requests; {_OTHER_CHECKPOINT}"
            )


def _objects(groups: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(groups, Mapping):
        yield from (group for group in groups.values() if isinstance(group, Mapping))


def _check_environment(name: str, stated: Mapping[str, Any], cannot: str, device: torch.device) -> None:
    """Let transformers check versions and devices itself. Packages raise errors of any type."""
    try:
        quantizer = AutoHfQuantizer.from_config(dict(stated), pre_quantized=True)
        quantizer.validate_environment(device_map=device_map(device), weights_only=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"{cannot}: its quantisation {name!r} does not run here: {reason}; {_OTHER_CHECKPOINT}"
        ) from error


def device_map(device: torch.device) -> dict[str, torch.device] | None:
    """Return the device of quantised weights, for transformers. None: the CPU of a machine without a GPU."""
    return {"": device} if device.type != "cpu" or torch.cuda.is_available() else None


def _check_plain(directory: Path) -> None:
    """Refuse quantised weights whose config does not say so: they would be read as plain ones, without their scales."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                    kind = str(opened.get_slice(name).get_dtype()) if name.endswith(".weight") else ""
                    if kind.startswith(_NARROW_TYPES):
                        raise ConfigError(
                            f"cannot load {str(directory)!r}: {name} has the type {kind}, and its config.json no "
                            f"quantization_config; get config.json again, or {_OTHER_CHECKPOINT}"
                        )
        except (SafetensorError, OSError):
            return  # loading names the file
