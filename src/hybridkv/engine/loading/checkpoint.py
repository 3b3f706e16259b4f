"""Loads a model, its tokenizer, and the facts that the cache needs about them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hybridkv.engine.adapters.folder import find_base, merge, read_adapter_folder
from hybridkv.engine.loading.families import check_supported
from hybridkv.engine.loading.host import has_bfloat16
from hybridkv.engine.loading.identity import model_identity, model_name, store_identity
from hybridkv.engine.loading.packing import can_pack, pack_weights
from hybridkv.engine.loading.quantization import (
    check_latents,
    check_stated,
    computing_dtype,
    device_map,
    is_quantized,
    prepare_quantization,
    quantization_of,
)
from hybridkv.engine.text import Tokenizer
from hybridkv.errors import ConfigError, HybridKVError, InputError
from hybridkv.files import FileError, check_folder
from hybridkv.memory.memory import torch_dtype
from hybridkv.models import Compute, read_compute
from hybridkv.models.reader import open_config, read_config, read_config_file
from hybridkv.spec import DType, ModelSpec

LOG = logging.getLogger("hybridkv.engine")

_NO_LIMIT = 1 << 20
"""Most tokens of a request on models without positions. The cache's memory is the real limit."""

_COMPUTES_IN = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""owner/model"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    spec: ModelSpec
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    identity: str
    """Digest of the weights and configuration; empty if it was not needed yet."""
    store_identity: str
    """The identity under which its KV is stored; empty if it was not requested."""

    def compute(self) -> Compute:
        """The cost of computing its tokens."""
        return read_compute(_as_loaded(self.model), name=self.spec.name)


def load(
    model: str | Path | PreTrainedModel,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kv_cache_dtype: str | torch.dtype | None = None,
    state_dtype: str | torch.dtype | None = None,
    tokenizer: str | Path | Any | None = None,
    trust_remote_code: bool = False,
    with_identity: bool = False,
    is_alone: bool = False,
) -> LoadedModel:
    """Load a checkpoint's directory, or take over a model in memory: only the engine can use its attention afterwards.

    A directory with an adapter and no model is loaded as its base with the adapter merged in.
    `is_alone`: the engine runs one sample at a time.
    """
    where = choose_device(device)
    kv_type, state_type = _cache_dtype("kv_cache_dtype", kv_cache_dtype), _cache_dtype("state_dtype", state_dtype)
    _check_tokenizer(tokenizer)
    named = path = None if isinstance(model, PreTrainedModel) else model
    adapter = None
    if isinstance(model, PreTrainedModel):
        loaded = model
        _check_config(model.config.to_dict(), type(model).__name__)
        _check_class(model)
        if dtype != "auto":
            loaded = _cast(loaded, _weights_dtype(dtype))
    else:
        adapter = read_adapter_folder(model) if isinstance(model, (str, Path)) else None
        path = model if adapter is None else find_base(adapter)
        _check_path(path)
        loaded = _from_checkpoint(str(path), dtype, where, trust_remote_code)
    loaded = _place(loaded, where).eval()
    if adapter is not None:
        merge(loaded, adapter)
    check_latents(loaded, f"cannot run {model_name(loaded, named)!r}")
    will_pack = path is not None and can_pack(loaded, is_alone=is_alone)
    # Packed weights have another form, and quantised ones may get another in the first step.
    identity = model_identity(loaded) if will_pack or is_quantized(loaded) else ""
    stored_as = store_identity(loaded, path, None if adapter is None else adapter.directory) if with_identity else ""
    if will_pack:
        pack_weights(loaded)
    spec = read_config(
        _as_loaded(loaded),
        name=model_name(loaded, named),
        kv_cache_dtype=kv_type,
        state_dtype=state_type,
        source="a model in memory" if named is None else str(named),
    )
    text = loaded.config.get_text_config(decoder=True)
    if spec.model_type != text.model_type:
        raise ConfigError(
            f"{spec.name} has layer_types, which transformers' {type(loaded).__name__} does not read: load it from a "
            f"directory, where it becomes a {spec.model_type!r}, or remove layer_types"
        )
    speaks = tokenizer or next((one for one in (named, path) if one and any(Path(one).glob("tokenizer*"))), path)
    found = _tokenizer(speaks, trust_remote_code, must_exist=tokenizer is not None)
    return LoadedModel(
        model=loaded,
        tokenizer=found,
        spec=spec,
        device=where,
        vocab_size=int(loaded.get_input_embeddings().num_embeddings),
        max_model_len=_max_model_len(text),
        eos_ids=_eos_ids(loaded, found),
        identity=identity,
        store_identity=stored_as,
    )


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


def _check_path(model: str | Path) -> None:
    """Refuse a path that cannot be a model at once: transformers would query the hub for it repeatedly."""
    way_out = "name a directory that a transformers model was saved to"
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"a model of type {type(model).__name__}: {way_out}, or pass such a model")
    if not str(model) or not Path(model).is_dir():
        if isinstance(model, str) and _HUB_NAME.fullmatch(model):
            return
        raise ConfigError(f"no directory {str(model)!r}: {way_out}")
    if not os.path.lexists(config := Path(model) / "config.json"):
        raise ConfigError(f"{str(model)!r} has no config.json: {way_out}")
    check_stated(read_config_file(config), str(model))
    _check_folder(Path(model), "cannot load")


def _check_folder(directory: Path, cannot: str) -> None:
    try:
        check_folder(directory)
    except FileError as error:
        raise ConfigError(f"{cannot} {str(directory)!r}: {error}; remove it, or name another directory") from None


def _weights_dtype(dtype: str | torch.dtype) -> torch.dtype:
    names = ", ".join(one.value for one in _COMPUTES_IN)
    refusal = InputError(f"the engine cannot compute in {str(dtype)!r}: choose auto, {names}")
    try:
        parsed = DType.parse(str(dtype))
    except HybridKVError:
        raise refusal from None
    if parsed not in _COMPUTES_IN:
        raise refusal
    return torch_dtype(parsed)


def _cache_dtype(name: str, dtype: str | torch.dtype | None) -> DType | None:
    if dtype is None:
        return None
    parsed = DType.parse(str(dtype))
    if not torch_dtype(parsed).is_floating_point:
        raise InputError(f"{name} {str(dtype)!r}: what is cached would be cut to whole numbers; choose a floating type")
    return parsed


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    if is_quantized(model) and computing_dtype(model) != dtype:
        raise InputError(
            f"dtype {str(dtype).removeprefix('torch.')!r}: a model in memory that is quantised "
            f"({quantization_of(model)}) cannot be converted; leave out dtype, or pass the checkpoint's directory"
        )
    return model if is_quantized(model) else model.to(dtype)


def _place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    if not is_quantized(model):
        return model.to(device)
    if model.device.type == device.type and device.index in (None, model.device.index):
        return model
    try:
        return model.to(device)
    except Exception as error:  # packages of quantisation raise errors of any type
        raise ConfigError(
            f"cannot move the quantised model ({quantization_of(model)}) to {device}: {_first_line(error)}; load it "
            "there"
        ) from error


def _from_checkpoint(
    path: str, dtype: str | torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    wanted = "auto" if dtype == "auto" else _weights_dtype(dtype)
    quantization: str | None = None
    try:
        _check_config(PretrainedConfig.get_config_dict(path)[0], path)  # a class may be too new for this transformers
        config = _own_config(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code), path)
        _check_config(config.to_dict(), path)
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
        raise ConfigError(f"cannot load {path!r}: {_damaged(path)}: {_first_line(error)}; get it again") from error
    except Exception as error:
        if quantization:  # its packages raise errors of any type
            raise ConfigError(
                f"cannot load {path!r}: its quantisation {quantization!r} failed: {type(error).__name__}: "
                f"{_first_line(error)}; name a checkpoint with plain weights"
            ) from error
        if not isinstance(error, (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError)):
            raise
        way_out = "name a directory a transformers model was saved to"
        raise ConfigError(f"cannot load {path!r}: {_first_line(error)}; {way_out}") from error
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


def _check_class(model: PreTrainedModel) -> None:
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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _damaged(path: str) -> str:
    """Find the file that cannot be read: the error does not name it."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return f"{file.name} is cut off or damaged"
    return "a file of weights is cut off or damaged"


def _max_model_len(text: PretrainedConfig) -> int:
    """Number of tokens that the model has positions for.

    "longrope" rotates all keys of a request by different angles once it exceeds the original length. Cached keys cannot
    be rotated again, so requests end at the original length.
    """
    limits = [getattr(text, "max_position_embeddings", None) or _NO_LIMIT]
    stated = getattr(text, "rope_parameters", None) or {}
    for rope in [
        stated,
        *(one for one in stated.values() if isinstance(one, dict)),
    ]:  # one entry for all layers, or one for each layer type
        if rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return int(min(limits))


def _check_config(config: dict[str, Any], name: str) -> None:
    check_supported(open_config(_plain(config), name).model_type, name)


def _as_loaded(model: PreTrainedModel) -> Mapping[str, Any]:
    """The config, with the actual dtype of the weights."""
    config = _plain(model.config.to_dict())
    dtype = str(computing_dtype(model)).removeprefix("torch.")
    config["dtype"] = dtype
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["dtype"] = dtype
    return config


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config with torch dtypes as strings."""
    return {
        key: _plain(value) if isinstance(value, dict) else str(value) if isinstance(value, torch.dtype) else value
        for key, value in config.items()
    }


def _check_tokenizer(tokenizer: str | Path | Any | None) -> None:
    """Refuse a bad `tokenizer` argument before the model is loaded."""
    if isinstance(tokenizer, (str, Path)):
        if Path(tokenizer).is_dir():
            _check_folder(Path(tokenizer), "cannot load the tokenizer")
        elif not _HUB_NAME.fullmatch(str(tokenizer)):
            raise ConfigError(f"no directory {str(tokenizer)!r}: name one that a tokenizer was saved to")
    elif tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(f"a tokenizer of type {type(tokenizer).__name__}: pass a directory, or a tokenizer")


def _tokenizer(tokenizer: str | Path | Any | None, trust_remote_code: bool, must_exist: bool) -> Any | None:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        found: Any = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=trust_remote_code)
    except Exception as error:  # the parser of tokenizer.json raises nothing narrower
        absent = isinstance(error, (OSError, ValueError, KeyError)) and not any(Path(tokenizer).glob("tokenizer*"))
        if must_exist or not absent:
            way_out = "name a directory a tokenizer was saved to"
            raise ConfigError(
                f"cannot load the tokenizer {str(tokenizer)!r}: {_first_line(error)}; {way_out}"
            ) from error
        return None  # token ids in, token ids out
    if len(found) <= len(set(found.all_special_ids)):  # transformers' result for a directory without a tokenizer
        if must_exist:
            raise ConfigError(f"{str(tokenizer)!r} has no vocabulary: name a directory a tokenizer was saved to")
        return None
    return found


def _eos_ids(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(decoder=True), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    ids: set[int] = set()
    for one in stated:
        ids.update(one if isinstance(one, (list, tuple)) else [] if one is None else [one])
    return frozenset(ids)
