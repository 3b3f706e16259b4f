"""Counters of the connector in vLLM's statistics and in its Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybridkv.stream import StreamStats

HELP = {
    "requests_total": "Requests that the store was asked for, by outcome: hit, or the reason why not.",
    "hit_tokens_total": "Prompt tokens that came from the store.",
    "hit_bytes_total": "Bytes of hits on one rank, by group of layers.",
    "loaded_bytes_total": "Bytes read from the store, successfully or not.",
    "load_seconds_total": "Sum over reads of the time from start to last row.",
    "load_failures_total": "Reads that failed, by the first reason. The request was computed instead.",
    "saved_objects_total": "Objects that became visible in the store.",
    "saved_bytes_total": "Bytes of these objects.",
    "save_failures_total": "Objects that were not saved, by reason.",
    "lookup_failures_total": "Lookups without an answer, by reason.",
}
"""Metrics, without the prefix vllm:hybridkv_."""
LABELS = {
    "requests_total": "outcome",
    "hit_bytes_total": "group",
    "load_failures_total": "reason",
    "save_failures_total": "reason",
    "lookup_failures_total": "reason",
}


def counted(stats: StreamStats, counts: Mapping[str, int]) -> Counter[str]:
    """All counters since the start, by metric and label, such as "requests_total hit"."""
    values = Counter[str]()
    for name, count in counts.items():
        kind, _, group = name.partition(" ")
        metric = {"hit_tokens": "hit_tokens_total", "bytes": f"hit_bytes_total {group}"}.get(kind)
        values[metric or f"requests_total {name}"] = count
    values["loaded_bytes_total"] = stats.loaded_bytes
    values["load_seconds_total"] = stats.load_seconds  # type: ignore[assignment]
    for reason, count in stats.failures.items():
        values[f"load_failures_total {reason}"] = count
    values["saved_objects_total"] = stats.dumped
    values["saved_bytes_total"] = stats.dumped_bytes
    values["save_failures_total dropped"] = stats.dumps_dropped
    values["save_failures_total failed"] = stats.dumps_failed
    values["lookup_failures_total slow"] = stats.slow_lookups
    values["lookup_failures_total failed"] = stats.failed_lookups
    values["lookup_failures_total skipped"] = stats.skipped_lookups
    return +values


class HybridKVStats(KVConnectorStats):
    """What was counted since the last time."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> HybridKVStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("_total", ""): value for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HybridKVPromMetrics(KVConnectorPromMetrics):
    """One counter a metric, labelled by engine, and by outcome or reason."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {
            name: counter(
                name=f"vllm:hybridkv_{name}",
                documentation=text,
                labelnames=[*labelnames, *([LABELS[name]] if name in LABELS else [])],
            )
            for name, text in HELP.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, *label = key.split(" ")
            self._counters[name].labels(*engine, *label).inc(value)
