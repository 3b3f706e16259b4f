"""Loads a model, its tokenizer, and the facts that the cache needs about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridkv.engine.adapters.folder import find_base, merge, read_adapter_folder
from hybridkv.engine.loading.devices import cast, choose_device, place
from hybridkv.engine.loading.identity import model_identity, model_name, store_identity
from hybridkv.engine.loading.model_files import check_class, check_config, check_path, plain, read_model, weights_dtype
from hybridkv.engine.loading.packing import can_pack, pack_weights
from hybridkv.engine.loading.quantization import check_latents, computing_dtype, is_quantized
from hybridkv.engine.loading.tokenizer import check_tokenizer, eos_ids, read_tokenizer
from hybridkv.engine.text import Tokenizer
from hybridkv.errors import ConfigError, InputError
from hybridkv.memory.memory import torch_dtype
from hybridkv.models import Compute, read_compute
from hybridkv.models.reader import read_config
from hybridkv.spec import DType, ModelSpec

_NO_LIMIT = 1 << 20
"""Most tokens of a request on models without positions. The cache's memory is the real limit."""


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
    check_tokenizer(tokenizer)
    named = path = None if isinstance(model, PreTrainedModel) else model
    adapter = None
    if isinstance(model, PreTrainedModel):
        loaded = model
        check_config(model.config.to_dict(), type(model).__name__)
        check_class(model)
        if dtype != "auto":
            loaded = cast(loaded, weights_dtype(dtype))
    else:
        adapter = read_adapter_folder(model) if isinstance(model, (str, Path)) else None
        path = model if adapter is None else find_base(adapter)
        check_path(path)
        loaded = read_model(str(path), dtype, where, trust_remote_code)
    loaded = place(loaded, where).eval()
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
    found = read_tokenizer(speaks, trust_remote_code, must_exist=tokenizer is not None)
    return LoadedModel(
        model=loaded,
        tokenizer=found,
        spec=spec,
        device=where,
        vocab_size=int(loaded.get_input_embeddings().num_embeddings),
        max_model_len=_max_model_len(text),
        eos_ids=eos_ids(loaded, found),
        identity=identity,
        store_identity=stored_as,
    )


def _cache_dtype(name: str, dtype: str | torch.dtype | None) -> DType | None:
    if dtype is None:
        return None
    parsed = DType.parse(str(dtype))
    if not torch_dtype(parsed).is_floating_point:
        raise InputError(f"{name} {str(dtype)!r}: what is cached would be cut to whole numbers; choose a floating type")
    return parsed


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


def _as_loaded(model: PreTrainedModel) -> Mapping[str, Any]:
    """The config, with the actual dtype of the weights."""
    config = plain(model.config.to_dict())
    dtype = str(computing_dtype(model)).removeprefix("torch.")
    config["dtype"] = dtype
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["dtype"] = dtype
    return config
