"""Refuses features of vLLM that the connector does not support, by name and with the way out.

It reads vLLM's configuration alone, so that it can run before weights are loaded (`integrations.vllm_config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm.config import VllmConfig

from hybridkv.errors import InputError
from hybridkv.integrations.vllm.model import describe_model
from hybridkv.spec import AttentionLayer


def refuse_unsupported(config: VllmConfig, beside: Sequence[str] = ()) -> None:
    """Raise InputError if this configuration uses what the connector does not support.

    `beside`: connectors in the same MultiConnector for which vLLM turns its hybrid KV cache manager off.
    """
    used = next(_features(config), None)
    if used is not None:
        feature, way_out = used
        raise InputError(f"HybridKVConnector does not support {feature}: {way_out}, or run vLLM without a store")
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        _refuse_without_manager(config, beside)


def _features(config: VllmConfig) -> Iterator[tuple[str, str]]:
    """Yield the unsupported features that are used, each with the way out."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    if config.speculative_config is not None:
        yield f"speculative decoding ({config.speculative_config.method})", "leave out --speculative-config"
    if parallel.pipeline_parallel_size > 1:
        size = f"pipeline_parallel_size {parallel.pipeline_parallel_size}"
        yield f"pipeline parallelism ({size})", "use --tensor-parallel-size"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        names = "decode_context_parallel_size or prefill_context_parallel_size"
        yield (
            f"context parallelism ({names})",
            "leave out --decode-context-parallel-size and --prefill-context-parallel-size",
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        yield (
            "several ranks with a scheduler each (distributed_executor_backend 'external_launcher')",
            "set --distributed-executor-backend mp",
        )
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"a quantised KV cache (kv_cache_dtype {cache.cache_dtype!r})", "set --kv-cache-dtype auto"
    if cache.mamba_cache_mode == "none" and (model.is_hybrid or model.is_attention_free):
        yield "states that are not cached, as without prefix caching", "turn it on with --enable-prefix-caching"
    if cache.mamba_cache_mode not in ("align", "none"):
        yield f"states at other places (mamba_cache_mode {cache.mamba_cache_mode!r})", "set --mamba-cache-mode align"
    if cache.prefix_match_unit:
        unit = f"prefix_match_unit {cache.prefix_match_unit}"
        yield f"vLLM's hits inside of blocks ({unit})", "leave out --prefix-match-unit"
    if cache.kv_sharing_fast_prefill:
        yield "a prefill that skips layers (kv_sharing_fast_prefill)", "leave out --kv-sharing-fast-prefill"
    if config.load_config.load_format == "dummy":
        yield "weights that are not read from files (load_format 'dummy')", "leave out --load-format"
    if model.runner_type != "generate":
        yield f"models that are not decoders (runner {model.runner_type!r})", "set --runner generate"


def _refuse_without_manager(config: VllmConfig, beside: Sequence[str]) -> None:
    """Without its hybrid manager vLLM keeps windows and chunks like full attention, and no states."""
    spec = describe_model(config, rank=0)
    kinds = {layer.sight if isinstance(layer, AttentionLayer) else None for layer in spec.layers}
    if len(kinds) == 1:
        return
    if beside:
        way_out = f"{' and '.join(beside)} beside it in MultiConnector cannot run with it; leave that out"
    elif config.model_config.attention_chunk_size is not None:
        way_out = "vLLM turns it off for chunked attention unless VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1"
    else:
        way_out = (
            "leave out --disable-hybrid-kv-cache-manager, and connectors of a MultiConnector that cannot run with it"
        )
    raise InputError(
        f"HybridKVConnector needs vLLM's hybrid KV cache manager for {spec.name}, which has layers of several kinds, "
        f"and it is off: {way_out}"
    )
