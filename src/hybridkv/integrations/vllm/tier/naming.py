"""Names of chunks: the object that a chunk of vLLM's is stored in.

A chunk is one row of vLLM's pool in host memory: the blocks of all workers, side by side, with padding at the end. So
the namespace covers the model, how it is spread over workers, how blocks are laid out in rows, and vLLM's version.
"""

from __future__ import annotations

import json
import logging
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, get_offload_group_idx

from hybridkv.errors import ConfigError, StoreInputError
from hybridkv.integrations.vllm.model import hub_directory
from hybridkv.models.checkpoint_digest import checkpoint_digest
from hybridkv.store import ObjectName

logger = logging.getLogger("vllm.hybridkv")

_FORMAT = 1
"""Counts changes of what objects of this tier hold."""


class ChunkNames:
    """Names are asked for only after vLLM has hashed a first block: before, the hashes' seed is not known."""

    def __init__(self, spec: OffloadingSpec, chunk_bytes: int, weights: str) -> None:
        self._facts = _facts(spec, chunk_bytes, weights)
        self.description = _description(spec, chunk_bytes, weights)

    @cached_property
    def namespace(self) -> str:
        described = json.dumps([self._facts, _chain_start()], sort_keys=True, separators=(",", ":"))
        return blake2b(described.encode(), digest_size=16).hexdigest()

    def of(self, key: OffloadKey) -> ObjectName:
        return ObjectName(self.namespace, _group(get_offload_group_idx(key)), sha256(key).hexdigest())


def model_weights(model: str, identity: str | None) -> str:
    """A digest of the model's files, or its name with what the user calls it. Raises StoreInputError for neither."""
    if identity is not None:
        return f"{model} {identity}"
    try:
        directory = _model_directory(model)
        logger.info("hybridkv reads the weights in %s once, for their digest", directory)
        return checkpoint_digest(directory)
    except ConfigError as error:
        raise StoreInputError(
            f"secondary_tiers, HybridKVTier: no digest of the weights of {model!r} ({error}); "
            'name them yourself: "identity": "revision 1"'
        ) from None


def _model_directory(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    directory = hub_directory(model, None)
    revisions = list(directory.parent.iterdir())
    if len(revisions) > 1:  # a tier is not told which one vLLM runs
        raise ConfigError(f"{directory.parent} has {len(revisions)} revisions")
    return directory


def _facts(spec: OffloadingSpec, chunk_bytes: int, weights: str) -> dict[str, Any]:
    config, parallel = spec.config, spec.config.parallel
    return {
        "format": _FORMAT,
        "vllm": vllm.__version__,
        "weights": weights,
        "dtype": str(config.model.dtype),
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "chunk_bytes": chunk_bytes,
        "workers": parallel.world_size,
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": spec.replicated_layout,
        "layout": config.kv_cache_layout,
        "canonical": canonical_format_id(config.kv_cache_layout) if config.canonical_layout else None,
    }


def _description(spec: OffloadingSpec, chunk_bytes: int, weights: str) -> dict[str, str]:
    """For people. Without the seed of vLLM's hashes, which may be a secret."""
    config, parallel = spec.config, spec.config.parallel
    sizes = {"tp": parallel.tp_size, "pp": parallel.pp_size, "pcp": parallel.pcp_size, "dcp": parallel.dcp_size}
    return {
        "model": config.model.name,
        "type": f"chunks of vLLM {vllm.__version__}",
        "weights": weights,
        "dtype": str(config.model.dtype),
        "groups": ", ".join(_group(group.group_id) for group in config.groups),
        "chunk": f"{config.cache.blocks_per_chunk} blocks of each worker, {chunk_bytes:,} bytes",
        "workers": ", ".join(f"{name} {size}" for name, size in sizes.items()),
    }


def _chain_start() -> str:
    """The first link of vLLM's chains of block hashes. It depends on the hash function and on its seed."""
    if "NONE_HASH" in vars(kv_cache_utils):
        return bytes(kv_cache_utils.NONE_HASH).hex()
    return str(kv_cache_utils.get_none_hash_seed())


def _group(index: int) -> str:
    return f"chunks-{index}"
