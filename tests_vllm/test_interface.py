"""What the connector relies on in vLLM. A test that fails here names what has moved, before an engine dies of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import vllm
from vllm.config import CacheConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hybridkv.integrations.vllm import HybridKVConnector

OVERRIDDEN = {
    "__init__": "self vllm_config role kv_cache_config",
    "bind_kv_cache_manager": "self kv_cache_manager",
    "bind_connector_metadata": "self connector_metadata",
    "build_connector_meta": "self scheduler_output",
    "build_connector_worker_meta": "self",
    "build_kv_connector_stats": "data",
    "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    "get_kv_connector_stats": "self",
    "get_num_new_matched_tokens": "self request num_computed_tokens",
    "get_transfer_results": "self finished_req_ids",
    "on_new_request": "self request",
    "register_kv_caches": "self kv_caches",
    "request_finished": "self request block_ids",
    "requires_piecewise_for_cudagraph": "extra_config",
    "reset_cache": "self",
    "save_kv_layer": "self layer_name kv_layer attn_metadata kwargs",
    "shutdown": "self",
    "start_load_kv": "self forward_context kwargs",
    "update_connector_output": "self connector_output",
    "update_state_after_alloc": "self request blocks num_external_tokens",
    "wait_for_layer_load": "self layer_name",
    "wait_for_save": "self",
}
"""Methods of `KVConnectorBase_V1` with their parameters."""
PROPERTIES = {"requires_kv_delivery"}
OUR_OWN = {"branch_of"}
"""Methods that vLLM does not know."""
OTHERS: list[tuple[Any, str, str]] = [
    (SupportsHMA, "request_finished_all_groups", "self request block_ids"),
    (KVConnectorWorkerMetadata, "aggregate", "self other"),
    (KVConnectorStats, "aggregate", "self other"),
    (KVConnectorStats, "reduce", "self"),
    (KVConnectorStats, "reset", "self"),
    (KVConnectorStats, "is_empty", "self"),
    (KVConnectorPromMetrics, "__init__", "self vllm_config metric_types labelnames per_engine_labelvalues"),
    (KVConnectorPromMetrics, "observe", "self transfer_stats_data engine_idx"),
    (KVCacheBlocks, "get_block_ids", "self allow_none group_ids"),
    (
        KVCacheManager,
        "allocate_slots",
        "self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens "
        "num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks "
        "has_scheduled_reqs skip_zeroing_group_ids",
    ),
    (SingleTypeKVCacheManager, "get_num_skipped_tokens", "self num_computed_tokens"),
]
FIELDS: list[tuple[Any, str]] = [
    (KVConnectorTransferResults, "finished_sending finished_recving failed_recving"),
    (KVConnectorOutput, "kv_connector_worker_meta"),
    (
        SchedulerOutput,
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
        "kv_connector_block_state",
    ),
    (NewRequestData, "req_id num_computed_tokens"),
    (CachedRequestData, "req_ids num_computed_tokens"),
    (CacheConfig, "block_size cache_dtype mamba_cache_mode enable_prefix_caching"),
    (ParallelConfig, "world_size pipeline_parallel_size decode_context_parallel_size distributed_executor_backend"),
    (VllmConfig, "kv_transfer_config speculative_config load_config compilation_config"),
]
CALLS = [
    "connector.bind_kv_cache_manager",
    "connector.get_num_new_matched_tokens",
    "connector.update_state_after_alloc",
    "connector.on_new_request",
    "connector.request_finished_all_groups",
    "connector.update_connector_output",
    "connector.build_connector_meta",
    "connector.reset_cache",
    "connector.shutdown",
]
"""Calls in vLLM's scheduler: where a hook is named but never called, nothing would be found or saved."""


def parameters(function: Any) -> str:
    return " ".join(inspect.signature(function).parameters)


def test_the_version() -> None:
    assert vllm.__version__.startswith("0.32"), f"vLLM {vllm.__version__}: read its connectors' interface again"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_we_override(name: str) -> None:
    assert parameters(getattr(KVConnectorBase_V1, name)) == OVERRIDDEN[name]
    ours = inspect.signature(getattr(HybridKVConnector, name)).parameters
    assert " ".join(ours) == OVERRIDDEN[name]


def test_that_is_all_we_override() -> None:
    ours = {name for name in vars(HybridKVConnector) if not name.startswith("_") or name == "__init__"}
    assert ours == OVERRIDDEN.keys() | PROPERTIES | OUR_OWN | {"request_finished_all_groups"}
    assert not OUR_OWN & vars(KVConnectorBase_V1).keys()
    assert all(isinstance(vars(KVConnectorBase_V1)[name], property) for name in PROPERTIES)
    assert not HybridKVConnector.__abstractmethods__


@pytest.mark.parametrize(("owner", "name", "expected"), OTHERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_beside_it(owner: Any, name: str, expected: str) -> None:
    assert parameters(getattr(owner, name)) == expected


@pytest.mark.parametrize(("owner", "names"), FIELDS, ids=lambda value: getattr(value, "__name__", None))
def test_fields(owner: Any, names: str) -> None:
    known = set(inspect.signature(owner).parameters) | set(vars(owner)) | set(getattr(owner, "__annotations__", ()))
    assert set(names.split()) <= known


def test_a_request() -> None:
    source = inspect.getsource(Request)
    for name in ("num_computed_tokens", "num_prompt_tokens", "num_preemptions", "cache_salt", "mm_features"):
        assert f"self.{name}" in source, name
    assert isinstance(vars(Request)["num_tokens"], property)
    assert RequestStatus.FINISHED_STOPPED.name
    assert RequestStatus.FINISHED_LENGTH_CAPPED.name


@pytest.mark.parametrize("call", CALLS)
def test_a_hook_is_called(call: str) -> None:
    assert f"{call}(" in inspect.getsource(Scheduler)


def test_what_admission_reads_is_passed_by_name() -> None:
    source = inspect.getsource(Scheduler.schedule)
    for name in ("num_new_computed", "num_external_computed", "num_lookahead"):
        assert f" {name}_tokens=" in source, name
    for name in ("new_computed_blocks", "has_scheduled_reqs"):
        assert f" {name}=" in source, name
