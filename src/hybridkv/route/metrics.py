"""Prometheus metrics of a router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridkv.route.pool import Pool

OUTCOMES = ("completed", "refused", "busy", "disconnected", "stopped", "failed")
FALLBACKS = ("no_worker", "down", "failed", "timeout", "no_transfer")
"""Why a decode worker computed a prompt: no prefill worker is up; it is not there; it answered 5xx; it took too long;
it answered without a transfer."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """The metrics of `/metrics`."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_WorkerCollector(pools))
        self._requests = self._counter("requests", "Requests for text by how they ended", ["outcome"])
        self._fallbacks = self._counter("fallbacks", "Prompts left to a decode worker", ["reason"])
        self.direct = self._counter("direct", "Requests that a prefill worker cannot help with")
        self.prefill_s = self._histogram("prefill_seconds", "Of prefills that succeeded")
        self.first_byte_s = self._histogram("first_byte_seconds", "From arrival to the first byte of the reply")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)  # start at 0, so that Prometheus sees the first failure as an increase
        for reason in FALLBACKS:
            self._fallbacks.labels(reason)

    def add(self, collector: Collector) -> None:
        self._registry.register(collector)

    def ended(self, outcome: str) -> None:
        """Count a finished request. `outcome`: one of `OUTCOMES`."""
        self._requests.labels(outcome).inc()

    def fell_back(self, reason: str) -> None:
        """Count a prompt that the decode worker computes. `reason`: one of `FALLBACKS`."""
        self._fallbacks.labels(reason).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"hybridkv_route_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"hybridkv_route_{name}", text, buckets=_SECONDS, registry=self._registry)


class _WorkerCollector(Collector):
    """Looks at the workers at every scrape."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "worker"]
        in_flight = GaugeMetricFamily("hybridkv_route_in_flight", "Requests at a worker", labels=labels)
        is_up = GaugeMetricFamily("hybridkv_route_worker_up", "0 while a worker is skipped", labels=labels)
        for pool in self._pools:
            for worker in pool.workers:
                in_flight.add_metric([pool.role, worker.url], worker.in_flight)
                is_up.add_metric([pool.role, worker.url], worker.is_up)
        yield from (in_flight, is_up)
