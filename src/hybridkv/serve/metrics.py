"""Prometheus metrics of one server: counters of the engine and its cache, and histograms of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridkv.cache import KIND_NAMES, CacheStats, Outcome
from hybridkv.engine import Engine, EngineError, EngineStats, MemoryUse, Result
from hybridkv.errors import DiskError
from hybridkv.link.stats import LinkStats
from hybridkv.serve.hidden_folder import HiddenFolder
from hybridkv.serve.history import History
from hybridkv.serve.jobs import Admission
from hybridkv.serve.live import Live
from hybridkv.store import StoreStats
from hybridkv.stream import StreamStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_BYTES = tuple(float(1 << power) for power in range(14, 37, 2))
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

OUTCOMES = ("completed", "refused", "busy", "disconnected", "stopped", "failed")
_CACHE_COUNTERS = {
    "checkpoints_kept": "Checkpoints that were kept",
    "checkpoints_hit": "Requests that resumed from a checkpoint",
    "checkpoints_skipped": "Checkpoints that were wanted, with no page to spare",
    "checkpoints_evicted": "Checkpoints that had to go",
    "places_declined": "Likely places without a checkpoint: it was worth less than what would be evicted for it",
    "blocks_published": "Blocks of tokens that others can find",
    "blocks_shared": "Blocks computed although another request had published them meanwhile",
    "blocks_evicted": "Blocks of tokens that had to go",
    "rollbacks": "Times a request had to go back",
    "rolled_back_tokens": "Tokens computed again after going back",
    "invalid_pages": "Pages whose content was wrong",
    "no_room": "Times a step found no room",
    "compactions": "Slabs that were emptied by moving their pages",
    "pages_moved": "Pages moved by compaction, or together before they were pinned",
    "pins": "Prefixes that were pinned for a transfer",
    "pins_expired": "Pins that ended because their time had passed",
    "pins_broken": "Pins that ended because their pages turned out invalid",
}

_STREAM_COUNTERS = {
    "lookups": "Prompts that a store was asked for",
    "found": "Prompts that it had more of",
    "slow_lookups": "Prompts that it took too long to answer for",
    "failed_lookups": "Prompts that asking it failed for",
    "skipped_lookups": "Prompts that it was not asked for because earlier questions hang",
    "late_loads": "Layerwise loads that steps stopped waiting for because other requests waited",
    "loaded_tokens": "Tokens of prompts that a store supplied",
    "loaded_bytes": "Read for requests",
    "load_seconds": "From the start of each load to its last row, all loads together",
    "wait_seconds": "That steps have waited for rows",
    "dumped": "Objects written",
    "dumped_bytes": "Written",
    "dumps_dropped": "Objects not written because too much was waiting",
    "dumps_failed": "Objects that could not be written",
    "dumps_discarded": "Objects whose step did not count",
}
_LINK_COUNTERS = {
    "offers": "Prompts computed for another engine",
    "sent_requests": "Prompts that were sent whole",
    "sent_bytes": "Written to other engines",
    "sent_descriptors": "Runs of bytes written to other engines",
    "received_requests": "Prompts that came whole",
    "received_tokens": "Tokens of prompts that came from another engine",
    "received_bytes": "Of prompts that came whole",
    "received_descriptors": "Runs of bytes of prompts that came whole",
    "full_attention_bytes": "What these prompts would have taken if every layer kept all tokens",
}
_STORE_COUNTERS = {
    "hits": "Names looked up and found",
    "misses": "Names looked up in vain",
    "saved": "Objects saved",
    "evicted": "Objects that had to go",
    "dropped": "Objects that found no room, or no time",
    "corrupt": "Objects that were not what had been written",
    "unknown": "Times an object was not read because a later version of hybridkv had written it",
    "faults": "Times the store itself failed",
    "skipped": "Names not looked up and objects not written while the store rested after a fault",
    "promoted": "Objects copied to a faster tier while they were read",
    "prefetched": "Objects copied to the fastest tier while the request that needs them was waiting",
    "round_trips": "Times a thread waited for the store's server",
}


class Metrics:
    """The metrics of `/metrics`."""

    def __init__(self, engine: Engine, admission: Admission, hidden_folder: HiddenFolder | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, admission))
        if hidden_folder is not None:
            self._registry.register(_HiddenCollector(hidden_folder))
        self._requests = self._counter("requests", "Requests for text by how they ended", ["outcome"])
        self._replies = self._counter("replies", "Replies by why they ended; n for each prompt", ["finish_reason"])
        self._breakpoints = self._counter("breakpoints", "Breakpoints of prompts by what became of them", ["outcome"])
        self._breakpoint_bytes = self._counter("breakpoint_bytes", "Of checkpoints kept at breakpoints")
        self._reply_tokens = self._histogram("reply_tokens", "Tokens of a reply", _TOKENS)
        self._prompt_tokens = self._histogram("prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._queue = self._histogram("queue_seconds", "From arrival to the first computed token", _SECONDS)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", _SECONDS)
        self._per_token = self._histogram("time_per_output_token_seconds", "Between two tokens", _TOKEN_SECONDS)
        self._total = self._histogram("request_seconds", "From arrival to the last token", _SECONDS)
        if engine.link is not None:
            self._received_bytes = self._histogram(
                "link_request_bytes", "Of a prompt that came from another engine", _BYTES
            )
            self._received_descriptors = self._histogram(
                "link_request_descriptors", "Runs of bytes of a prompt that came from another engine", _TOKENS
            )
        for kept in Outcome:
            self._breakpoints.labels(str(kept))
        for outcome in OUTCOMES:
            self._requests.labels(outcome)  # start at 0, so that Prometheus sees the first failure as an increase

    def add_inspection(self, history: History, live: Live) -> None:
        self._registry.register(_InspectionCollector(history, live))

    def add(self, collector: Collector) -> None:
        self._registry.register(collector)

    def finished(self, results: Sequence[Result]) -> None:
        """Record the results of finished prompts."""
        for result in results:
            self._prompt_tokens.observe(len(result.prompt_token_ids))
            for one in result.completions:
                self._replies.labels(one.finish_reason).inc()
                self._reply_tokens.observe(len(one.token_ids))
            for account in () if result.record is None else result.record.kept:
                self._breakpoints.labels(str(account.outcome)).inc()
                self._breakpoint_bytes.inc(account.num_bytes)
            if result.received is not None:
                self._received_bytes.observe(result.received.num_bytes)
                self._received_descriptors.observe(result.received.num_descriptors)
            metrics = result.metrics
            if any(one.token_ids for one in result.completions):
                self._queue.observe(metrics.queue_s)
                self._ttft.observe(metrics.ttft_s)
                self._total.observe(metrics.total_s)
            if metrics.per_token_s:
                self._per_token.observe(metrics.per_token_s)

    def ended(self, outcome: str) -> None:
        """Count a finished generation request. `outcome`: one of `OUTCOMES`."""
        self._requests.labels(outcome).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format. Waits until the engine is between two steps."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"hybridkv_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"hybridkv_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the engine's statistics at every scrape."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission

    def describe(self) -> list[Metric]:
        return []  # the metrics depend on the model and are only known when collected

    def collect(self) -> Iterator[Metric]:
        yield _gauge("server_waiting_samples", "Samples without a first token", self._admission.num_waiting)
        try:
            stats = self._engine.stats()
        except EngineError:
            yield _gauge("up", "Whether the engine runs", 0)
            return
        yield _gauge("up", "Whether the engine runs", 1)
        yield from _engine_metrics(stats)
        yield from _cache_metrics(stats.cache)
        yield from _memory_metrics(stats.memory)
        if stats.stream is not None and stats.store is not None:
            yield from _stream_metrics(stats.stream)
            yield from _store_metrics(stats.store)
        if stats.link is not None:
            yield from _link_metrics(stats.link)


class _HiddenCollector(Collector):
    """Looks into the directory of hidden states at every scrape."""

    def __init__(self, folder: HiddenFolder) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _count("hidden_states_written", "Files of hidden states written", self._folder.num_written)
        yield _count("hidden_states_expired", "Files of hidden states not read in time", self._folder.num_expired)
        with suppress(DiskError):  # the directory cannot be read; requests are told so
            usage = self._folder.usage()
            yield _gauge("hidden_states_files", "In the directory of hidden states", usage.files)
            yield _gauge("hidden_states_bytes", "In the directory of hidden states", usage.nbytes)


class _InspectionCollector(Collector):
    """Counts what is kept and watched at every scrape."""

    def __init__(self, history: History, live: Live) -> None:
        self._history = history
        self._live = live

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _gauge("history_requests", "Requests whose records are kept", self._history.num_requests)
        yield _gauge("inspection_streams", "Open streams of live events", self._live.num_streams)


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("running_samples", "Samples that have a lease", stats.running)
    yield _gauge("waiting_samples", "Samples that do not run", stats.waiting)
    yield _count("steps", "Forward passes", stats.steps)
    yield _count("captured_steps", "Forward passes that ran as CUDA graphs", stats.captured_steps)
    yield _gauge("graph_bytes", "GPU memory of these graphs", stats.graph_bytes)
    yield _count("computed_tokens", "Tokens that went through the model", stats.computed_tokens)
    yield _count("preemptions", "Samples sent back to the queue for want of memory", stats.preemptions)
    yield _count("followed", "Samples that waited for another to compute their prefix", stats.followed)
    seconds = CounterMetricFamily("hybridkv_step_seconds", "Where the time of steps went", labels=["part"])
    for part, spent in stats.seconds.items():
        seconds.add_metric([part], spent)
    yield seconds
    text = "Of the engine's thread, for records of requests and for those who watch"
    yield _count("publish_seconds", text, stats.publish_seconds)


def _cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    yield _count("cache_lookups", "Prompts that were looked up", stats.requests)
    yield _count("cache_prompt_tokens", "Tokens of prompts that were looked up", stats.prompt_tokens)
    yield _count("cache_hit_tokens", "Tokens of prompts that the cache supplied", stats.hit_tokens)
    missed = CounterMetricFamily("hybridkv_cache_missed_tokens", "Tokens it did not supply", labels=["reason"])
    for reason, tokens in stats.misses.items():
        missed.add_metric([reason or "none"], tokens)
    yield missed
    for name, text in _CACHE_COUNTERS.items():
        yield _count(f"cache_{name}", text, getattr(stats, name))
    kinds = CounterMetricFamily("hybridkv_cache_checkpoints", "Checkpoints by kind", labels=["event", "kind"])
    for event, counts in (("kept", stats.kept_by_kind), ("hit", stats.hit_by_kind)):
        for kind in KIND_NAMES:
            kinds.add_metric([event, kind], counts[kind])
    yield kinds


def _memory_metrics(memory: MemoryUse) -> Iterator[Metric]:
    yield _gauge("memory_bytes", "Of the arena", memory.total_bytes)
    yield _gauge("memory_free_bytes", "In slabs that no group has", memory.free_bytes)
    used = GaugeMetricFamily("hybridkv_memory_used_bytes", "In pages that are held or kept", labels=["group"])
    slabs = GaugeMetricFamily("hybridkv_memory_slab_bytes", "In slabs of the group", labels=["group"])
    for group, nbytes in memory.used_bytes.items():
        used.add_metric([group], nbytes)
        slabs.add_metric([group], memory.slab_bytes[group])
    yield from (used, slabs)
    yield _gauge("pinned_prefixes", "Prefixes that are pinned for a transfer", memory.pinned_prefixes)
    yield _gauge("memory_pinned_bytes", "In slabs that pinned prefixes keep in place", memory.pinned_bytes)


def _stream_metrics(stats: StreamStats) -> Iterator[Metric]:
    for name, text in _STREAM_COUNTERS.items():
        yield _count(f"stream_{name}", text, getattr(stats, name))
    yield _gauge("stream_dump_bytes_waiting", "Copied from pages, and not written yet", stats.dump_bytes_waiting)
    loads = CounterMetricFamily("hybridkv_stream_loads", "Loads that came whole", labels=["mode"])
    for mode, count in stats.loads.items():
        loads.add_metric([mode], count)
    failures = CounterMetricFamily("hybridkv_stream_load_failures", "Loads that failed", labels=["reason"])
    for reason, count in stats.failures.items():
        failures.add_metric([reason], count)
    yield from (loads, failures)


def _link_metrics(stats: LinkStats) -> Iterator[Metric]:
    for name, text in _LINK_COUNTERS.items():
        yield _count(f"link_{name}", text, getattr(stats, name))
    yield _gauge("link_quarantined", "Transfers given up whose pages may still be written to", stats.quarantined)
    seconds = CounterMetricFamily("hybridkv_link_seconds", "Where the time of transfers went", labels=["phase"])
    for phase, spent in stats.seconds.items():
        seconds.add_metric([phase], spent)
    failures = CounterMetricFamily("hybridkv_link_failures", "Transfers that failed", labels=["reason"])
    for reason, count in stats.failures.items():
        failures.add_metric([reason], count)
    yield from (seconds, failures)


def _store_metrics(stats: StoreStats) -> Iterator[Metric]:
    yield _gauge("store_objects", "In the store", stats.objects)
    yield _gauge("store_bytes", "Of objects in the store", stats.nbytes)
    yield _gauge("store_spare_bytes", "Of objects that only fill idle room", stats.spare_bytes)
    for name, text in _STORE_COUNTERS.items():
        yield _count(f"store_{name}", text, getattr(stats, name))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hybridkv_{name}", text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"hybridkv_{name}", text, value=value)
