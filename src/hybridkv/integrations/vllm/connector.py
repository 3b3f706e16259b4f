"""`HybridKVConnector`: hybridkv's stores inside vLLM. Each method hands over to the half that runs in its process."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from hybridkv.integrations.vllm.admission import guard
from hybridkv.integrations.vllm.messages import StepOrders, WorkerReport
from hybridkv.integrations.vllm.scheduler import SchedulerHalf
from hybridkv.integrations.vllm.settings import read_settings
from hybridkv.integrations.vllm.stats import HybridKVPromMetrics, HybridKVStats, counted
from hybridkv.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

LOG = logging.getLogger("vllm.hybridkv")
_TELL_EVERY_S = 0.2
_LOG_EVERY_S = 60.0


class HybridKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds prefixes in a store and saves what is computed, for every kind of layer."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config)
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, settings)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, settings)
        self._told: Counter[str] = Counter()
        """Counters that vLLM knows already."""
        self._told_at = 0.0
        self._logged: Counter[str] = Counter()
        self._logged_at = time.monotonic()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, and nothing more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Hooks of layers do not run when a whole graph is replayed."""
        return bool(extra_config.get("layerwise", True))

    # --- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        assert self._worker is not None
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        assert self._worker is not None
        self._worker.layer_ran(layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        return KVConnectorTransferResults(finished_sending=self._worker.take_saved())

    def build_connector_worker_meta(self) -> WorkerReport | None:
        assert self._worker is not None
        return self._worker.report()

    # --- scheduler ----------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler is not None
        guard(kv_cache_manager, self._scheduler.give_up)

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.new(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens), False

    def branch_of(self, request: Request) -> int:
        """For `CheckpointScheduler`: where a state is missing that others would have used."""
        assert self._scheduler is not None
        return self._scheduler.branch_of(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        partly = self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        if partly:
            assert self._kv_cache_manager is not None
            self._kv_cache_manager.evict_blocks(partly)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        assert self._scheduler is not None
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.reported(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True: vLLM keeps the request's blocks until the end of its reply is saved, one step later.

        A worker of this process saves it now. Blocks that are kept would let `reset_prefix_cache` fail.
        """
        assert self._scheduler is not None
        end = self._scheduler.finished(request, block_ids)
        if end is None:
            return False, None
        if worker := self._worker_here():
            worker.save_end(self._scheduler.identity, end)
            return False, None
        self._scheduler.order_end(end)
        return True, None

    def _worker_here(self) -> WorkerHalf | None:
        """Return this engine's worker, or None if it is in another process or in a `MultiConnector`.

        Another connector of a `MultiConnector` may write to blocks as soon as they are free, by RDMA and not in the
        order of CUDA's streams, while the copy out of them still waits in its stream.
        """
        theirs = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(theirs, HybridKVConnector) or theirs._engine_id != self._engine_id:
            return None
        return theirs._worker

    def reset_cache(self) -> bool:
        """From now on nothing is found that was stored before, such as KV of other weights."""
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    # --- both ---------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> HybridKVStats | None:
        if time.monotonic() - self._told_at < _TELL_EVERY_S:
            return None
        half = self._scheduler or self._worker
        assert half is not None
        self._told_at = time.monotonic()
        now = counted(half.stats, half.counts)
        since, self._told = now - self._told, now
        self._log(now)
        return HybridKVStats(data=dict(since)) if since else None

    def _log(self, now: Counter[str]) -> None:
        """One line a minute, if there is something to say."""
        if time.monotonic() - self._logged_at < _LOG_EVERY_S:
            return
        since, self._logged, self._logged_at = now - self._logged, now, time.monotonic()
        if since:
            told = ", ".join(f"{name.replace('_total', '')} {value:,.6g}" for name, value in sorted(since.items()))
            LOG.info("hybridkv, last minute: %s", told)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HybridKVStats:
        return HybridKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HybridKVPromMetrics:
        return HybridKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
        self._scheduler = self._worker = None
