"""`HybridKVTier`: what vLLM calls. All methods run on the scheduler's thread; bytes move on threads of `Jobs`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault, UnknownFormat
from hybridkv.integrations.vllm.tier.chores import Chores
from hybridkv.integrations.vllm.tier.counts import Counts, definitions
from hybridkv.integrations.vllm.tier.jobs import Job, Jobs
from hybridkv.integrations.vllm.tier.lookups import Lookups
from hybridkv.integrations.vllm.tier.naming import ChunkNames, model_weights
from hybridkv.integrations.vllm.tier.settings import read_settings
from hybridkv.store import open_store

_CLOSE_S = 20.0
_REASONS = {MissingObject: "missing", CorruptObject: "corrupt", UnknownFormat: "unknown", StoreFault: "fault"}

logger = logging.getLogger("vllm.hybridkv")


class HybridKVTier(SecondaryTierManager):
    """Chunks of vLLM's offloading in any store of hybridkv, one object each. All bytes are verified when read."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **fields: Any,
    ) -> None:
        """`fields`: see `TierSettings`. Raises StoreInputError for fields that cannot be used."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = settings = read_settings(fields)
        self.locality = settings.locality
        config = offloading_spec.config
        weights = model_weights(config.model.name, settings.identity)
        self._names = ChunkNames(offloading_spec, self.block_size_bytes, weights)
        tokens = config.cache.blocks_per_chunk * max(group.tokens_per_block for group in config.groups)
        self._value = tokens / self.block_size_bytes
        """As of other objects of hybridkv: tokens a byte."""
        self._store = open_store(list(settings.store))
        self._memory = primary_kv_view.cast("B")
        self._counts = Counts()
        self._lookups = Lookups(self._ask, self._counts, settings.lookup_timeout_s)
        threads = settings.read_threads, settings.write_threads
        self._jobs = Jobs(threads, self.block_size_bytes, settings.waiting, self._counts)
        self._chores = Chores(self._store, self._names)
        self._is_closed = False

    # --- lookups ------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._jobs.is_stuck:  # a load would only wait
            self._counts.fail("lookup_failures", "skipped")
            return LookupResult.MISS
        found = self._lookups.find(key, req_context.req_id)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.finish(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()
        self._chores.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._chores.touch(keys)

    def _ask(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._store.lookup([self._names.of(key) for key in keys])

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, chunks = _contents(job_metadata)
        self._jobs.load(job_metadata.job_id, keys, chunks, self._load)

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys, chunks = _contents(job_metadata)
        known = job_metadata.req_context
        ends = {key: known.get_offload_key_position(key) or 0 for key in keys}
        self._chores.describe()
        self._jobs.save(job_metadata.job_id, keys, chunks, lambda key, chunk: self._save(key, chunk, ends[key]))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._jobs.expire(self._settings.load_timeout_s)
        return [self._result(job) for job in self._jobs.take_ended()]

    def has_pending_work(self) -> bool:
        return self._jobs.is_busy

    def drain_jobs(self) -> None:
        self._jobs.drain()

    def _result(self, job: Job) -> JobResult:
        if job.is_load and not job.is_done:
            self._lookups.fail(set(job.keys) - set(job.done))
        return JobResult(
            job_id=job.number,
            success=job.is_done,
            successful_keys=tuple(job.done) if job.is_load else None,
            transfer_time=job.seconds,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )

    def _load(self, key: OffloadKey, chunk: int) -> bool:
        """Read a chunk into vLLM's memory. If it fails, vLLM does not use what lies there."""
        try:
            with self._store.open(self._names.of(key)) as reader, self._chunk(chunk) as view:
                reader.read(0, [view])
        except (MissingObject, CorruptObject, UnknownFormat, StoreFault) as error:
            self._counts.fail("load_failures", next(name for kind, name in _REASONS.items() if isinstance(error, kind)))
            return False
        self._counts.add("read_bytes", self.block_size_bytes)
        self._chores.touch([key])
        return True

    def _save(self, key: OffloadKey, chunk: int, end: int) -> bool:
        """Write a chunk, unless it is stored already. `end`: number of tokens before the chunk's end; 0 if unknown."""
        name = self._names.of(key)
        try:
            writer = self._store.create(name, [self.block_size_bytes], value=self._value, position=end)
            if writer is None:
                is_there = self._store.lookup([name])[0]
                if not is_there:
                    self._counts.fail("save_failures", "refused")
                return is_there
            with writer, self._chunk(chunk) as view:
                writer.write(0, [view])
                writer.commit()
        except StoreFault:
            self._counts.fail("save_failures", "fault")
            return False
        self._counts.add("saved_bytes", self.block_size_bytes)
        return True

    @contextmanager
    def _chunk(self, index: int) -> Iterator[memoryview]:
        size = self.block_size_bytes
        with self._memory[index * size : (index + 1) * size] as view:
            yield view

    # --- the rest -----------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counts.take(self.tier_type)

    def shutdown(self) -> None:
        """Raises StoreFault if a copy hangs: vLLM then keeps the memory that the copy uses."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lookups.close()
        self._chores.close()
        if not self._jobs.close(_CLOSE_S):
            raise StoreFault(
                f"{' '.join(self._settings.store)}: a copy still runs after {_CLOSE_S:.0f} s, so vLLM's memory is not "
                "freed; see whether the store hangs, and end the process"
            )
        self._memory.release()
        try:
            self._store.close()
        except StoreError as error:
            logger.warning("a store was not closed well: %s", error)


def _contents(job: TransferJob) -> tuple[list[OffloadKey], list[int]]:
    return list(job.keys), [int(chunk) for chunk in job.chunk_ids]
