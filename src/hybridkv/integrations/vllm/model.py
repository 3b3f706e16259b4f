"""What vLLM's configuration says of a model: its layers, and the identity of its weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from hybridkv.errors import ConfigError
from hybridkv.integrations.vllm.groups import layer_specs
from hybridkv.models.checkpoint_digest import checkpoint_digest
from hybridkv.models.reader import read_config
from hybridkv.spec import DType, ModelSpec

LOG = logging.getLogger("vllm.hybridkv")


def model_spec(config: VllmConfig, kv_cache_config: KVCacheConfig, rank: int) -> ModelSpec:
    """The model as hybridkv describes it, with the dtypes that vLLM computes in."""
    states = {spec.dtypes[-1] for spec in layer_specs(kv_cache_config).values() if isinstance(spec, MambaSpec)}
    return describe_model(config, rank, DType.parse(str(states.pop())) if len(states) == 1 else None)


def describe_model(config: VllmConfig, rank: int, state_dtype: DType | None = None) -> ModelSpec:
    """Describe the model by its config alone. Raises InputError for families and sizes that hybridkv does not know."""
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    described = json.loads(model.hf_config.to_json_string(use_diff=False)) | {"dtype": dtype}
    if isinstance(described.get("text_config"), dict):
        described["text_config"]["dtype"] = dtype
    spec = read_config(
        described,
        name=Path(model.model).name,
        tp=config.parallel_config.tensor_parallel_size,
        rank=rank,
        kv_cache_dtype=DType.parse(dtype),
        state_dtype=state_dtype,
        source="vLLM",
    )
    if not spec.has_record:  # read from its layer types, which is enough for a plan, not for a store
        raise ConfigError(f"{spec.name} is of the unknown model type {spec.model_type!r}: run vLLM without a store")
    return spec


def model_identity(config: VllmConfig) -> str:
    """The digest that an embedded engine gets from the same directory, if vLLM does not quantise the weights."""
    model = config.model_config
    directory = Path(model.model)
    if not directory.is_dir():
        directory = hub_directory(model.model, model.revision)
    computed = [str(model.dtype).removeprefix("torch.")]
    if model.quantization:
        computed.append(f"quantization {model.quantization}")
    LOG.info("hybridkv reads the weights in %s once, for their digest", directory)
    return checkpoint_digest(directory, *computed)


def hub_directory(name: str, revision: str | None) -> Path:
    """Where vLLM has downloaded a model of the hub to."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no files of {name!r} on this machine ({error}): name a directory with the model") from None
