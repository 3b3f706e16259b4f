"""Counters of the tier, as vLLM's offloading reports them."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

_PREFIX = "vllm:kv_offload_hybridkv_"
PLAIN = {
    "hits": "Chunks that were looked up in a store of hybridkv and found.",
    "misses": "Chunks that were looked up in a store of hybridkv and not found.",
    "read_bytes": "Bytes of chunks that were read from a store of hybridkv and verified.",
    "saved_bytes": "Bytes of chunks that were written to a store of hybridkv.",
}
BY_REASON = {
    "load_failures": "Chunks that were found in a store of hybridkv and could not be loaded, by reason.",
    "save_failures": "Chunks that were not kept by a store of hybridkv, by reason.",
    "lookup_failures": "Chunks whose lookup in a store of hybridkv got no answer, by reason.",
}


def definitions() -> dict[str, OffloadingCounterMetadata]:
    plain = {_PREFIX + name: OffloadingCounterMetadata(text, ("tier",)) for name, text in PLAIN.items()}
    by_reason = {
        _PREFIX + name: OffloadingCounterMetadata(text, ("tier", "reason")) for name, text in BY_REASON.items()
    }
    return plain | by_reason


class Counts:
    """Counts since the last `take`. Any thread may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        assert name in PLAIN, name
        with self._lock:
            self._counts[(name,)] += amount

    def fail(self, name: str, reason: str, amount: int = 1) -> None:
        assert name in BY_REASON, name
        with self._lock:
            self._counts[name, reason] += amount

    def take(self, tier: str) -> OffloadingConnectorStats:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        stats = OffloadingConnectorStats()
        for (name, *reason), count in counts.items():
            if count:
                stats.increase_counter(_PREFIX + name, count, (tier, *reason))
        return stats
