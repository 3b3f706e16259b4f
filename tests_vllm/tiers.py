"""vLLM's own offloading with our tier, on host memory: everything that its scheduler does, but for the GPU.

A chunk's bytes depend on its key, so that no chunk can be taken for another.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hybridkv.integrations.vllm.tier import HybridKVTier

CHUNK_BYTES = 8192
BLOCK_BYTES = 3000
"""Bytes of each of two blocks; the rest of a chunk is padding."""
LONGEST_WAIT_S = 20.0
NO_REQUESTS = ScheduleEndContext((), ())


def key_of(number: int, group: int = 0, *, digits: int = 32) -> OffloadKey:
    return make_offload_key(sha256(str(number).encode()).digest()[:digits], group)


def keys_of(numbers: Iterable[int], group: int = 0) -> list[OffloadKey]:
    return [key_of(number, group) for number in numbers]


def bytes_of(key: OffloadKey) -> bytes:
    return random.Random(key).randbytes(CHUNK_BYTES)


def config(tiers: Sequence[dict[str, Any]], num_chunks: int = 8, **changes: Any) -> OffloadingConfig:
    """`changes`: other fields, of the config or of one of its parts."""
    model = {"name": "some/model", "dtype": "bfloat16"}
    cache = {"tokens_per_hash": 16, "blocks_per_chunk": 2}
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    for part in (model, cache, parallel):
        part.update({name: changes.pop(name) for name in list(changes) if name in part})
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("layers.0", "layers.2"), 0), OffloadingGroupConfig(16, ("layers.1",), 1)),
        "worker_kv_bytes_per_block": BLOCK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": num_chunks * CHUNK_BYTES, "secondary_tiers": list(tiers)},
        "engine_id": f"test-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig(**model),
        "cache": OffloadingCacheConfig(**cache),
        "parallel": OffloadingParallelConfig(
            **parallel,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        "kv_cache_layout": "LBNHC",
    }
    return OffloadingConfig(**(fields | changes))


class Offloading:
    """vLLM's manager with one tier of ours. `changes`: see `config`."""

    def __init__(self, store: str | Path | list[str], fields: dict[str, Any] | None = None, **changes: Any) -> None:
        urls = f"file://{store}?size=1GiB" if isinstance(store, Path) else store
        tier = {"type": "HybridKVTier", "module_path": "hybridkv.integrations.vllm.tier", "store": urls}
        self.spec = TieringOffloadingSpec(config([{**tier, "identity": "weights 1", **(fields or {})}], **changes))
        self.manager = self.spec.get_manager()
        assert isinstance(self.manager, TieringOffloadingManager)
        [self.tier] = self.manager.secondary_tiers
        assert isinstance(self.tier, HybridKVTier)
        self._requests = 0
        self._is_closed = False

    def __enter__(self) -> Offloading:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.manager.shutdown()

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(NO_REQUESTS)

    def until(self, is_over: Callable[[], bool]) -> None:
        """Step like an engine that has nothing else to do."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not is_over():
            assert time.monotonic() < deadline, "this takes too long"
            self.step()
            time.sleep(0.001)

    def settle(self) -> None:
        self.until(lambda: not self.manager.has_pending_work())

    def save(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> bool:
        """What a GPU has computed comes to host memory, and from there to the tier. False: no room in host memory."""
        request = context or self.request()
        prepared = self.manager.prepare_store(keys, request)
        if prepared is not None and prepared.keys_to_store:
            for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
                self._write(int(chunk), bytes_of(key))
            self.manager.complete_store(prepared.keys_to_store, request)
        if context is None:
            self.manager.on_request_finished(request)
        return prepared is not None

    def forget(self) -> None:
        """Empty host memory. The tier keeps what it has."""
        self.settle()
        self.manager.reset_cache()

    def find(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """vLLM's answer for a chunk, when it has one. HIT: the chunk is in host memory."""
        found = self.manager.lookup(key, context)
        deadline = time.monotonic() + LONGEST_WAIT_S
        while found in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            assert time.monotonic() < deadline, "this takes too long"
            self.step()
            time.sleep(0.001)
            found = self.manager.lookup(key, context)
        return found

    def load(self, key: OffloadKey, context: ReqContext | None = None) -> bytes | None:
        """The bytes that a GPU would be given. None: the chunk has to be computed."""
        request = context or self.request()
        try:
            if self.find(key, request) is LookupResult.MISS:
                return None
            [chunk] = self.manager.prepare_load([key], request).chunk_ids
            found = self._read(int(chunk))
            self.manager.complete_load([key], request)
            return found
        finally:
            if context is None:
                self.manager.on_request_finished(request)

    def stats(self) -> dict[str, float]:
        """Counters of our tier since the last call, such as "hits" or "load_failures missing"."""
        counted = self.manager.get_stats()
        values: dict[str, float] = {}
        for name, by_labels in (counted.data["data"] if counted else {}).items():
            if name.startswith("vllm:kv_offload_hybridkv_"):
                for (tier, *reason), value in by_labels.items():
                    assert tier == "HybridKVTier"
                    values[" ".join([name.removeprefix("vllm:kv_offload_hybridkv_"), *reason])] = value
        return values

    def _write(self, chunk: int, data: bytes) -> None:
        with self.manager.primary_tier.get_kv_memoryview().cast("B") as memory:
            memory[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES] = data

    def _read(self, chunk: int) -> bytes:
        with self.manager.primary_tier.get_kv_memoryview().cast("B") as memory:
            return bytes(memory[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])


def objects(store: Path) -> list[Path]:
    """Files of objects in a store."""
    return sorted(path for path in store.glob("*/objects/*/*/*/*") if path.is_file())
