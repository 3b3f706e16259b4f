"""Statistics of an engine: counters and current memory use, in one record. docs/stats.md explains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.cache import Cache, CacheStats
from hybridkv.link.stats import LinkStats
from hybridkv.store import StoreStats
from hybridkv.stream import StreamStats

if TYPE_CHECKING:
    from hybridkv.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the arena, by use."""

    total_bytes: int
    used_bytes: dict[str, int]
    """By group: pages that requests hold or the cache keeps."""
    slab_bytes: dict[str, int]
    """By group: the slabs that contain these pages."""
    free_bytes: int
    """Slabs that belong to no group."""
    pinned_prefixes: int
    pinned_bytes: int
    """Slabs that pinned prefixes occupy."""

    @classmethod
    def of(cls, cache: Cache, arena_bytes: int) -> MemoryUse:
        layout = cache.layout
        groups = layout.groups
        pages = {group.pool_name: group.page_bytes for group in groups}
        slab_bytes = groups[0].page_bytes * groups[0].pages_per_slab
        slabs = {name: count * slab_bytes for name, count in cache.slabs_in_use().items()}
        used = {name: count * pages[name] for name, count in cache.pages_in_use().items()}
        free = (layout.num_slabs - 1) * slab_bytes - sum(slabs.values())
        return cls(arena_bytes, used, slabs, free, len(cache.pins), cache.pinned_slabs() * slab_bytes)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and current values."""

    running: int
    waiting: int
    """Samples that do not run, n for each prompt that has not been computed."""
    steps: int
    captured_steps: int
    """Steps that ran as CUDA graphs."""
    kernels: dict[str, str]
    """Whose kernels compute: `prefill` and `decode`, each "torch" or "triton"."""
    graph_bytes: int
    """GPU memory that the graphs hold, besides weights and arena."""
    computed_tokens: int
    preemptions: int
    followed: int
    """Samples that waited for another request to compute their prefix."""
    seconds: dict[str, float]
    """Total time of each part of a step."""
    publish_seconds: float
    """Time of the engine's thread for records and, while there was work, for snapshots. `seconds` has some of it."""
    cache: CacheStats
    memory: MemoryUse
    stream: StreamStats | None
    """Traffic with the store; None without one."""
    store: StoreStats | None = None
    link: LinkStats | None = None
    """Traffic with other engines; None without a link."""

    @classmethod
    def of(cls, core: EngineCore) -> EngineStats:
        """Everything but `store`: a store on a server may be slow to answer, and the engine's thread must not wait."""
        counted = core.cache.stats
        return cls(
            running=len(core.scheduler.running),
            waiting=core.scheduler.num_waiting,
            steps=core.steps,
            captured_steps=core.captured_steps,
            kernels=core.runner.kernels,
            graph_bytes=core.runner.decoder.graph_bytes if core.runner.decoder is not None else 0,
            computed_tokens=core.computed_tokens,
            preemptions=core.scheduler.preempted,
            followed=core.scheduler.followed,
            seconds=dict(core.seconds),
            publish_seconds=core.publishing.seconds,
            cache=counted.copy(),
            memory=MemoryUse.of(core.cache, core.runner.memory.plan.arena_bytes),
            stream=core.streaming.streamer.snapshot() if core.streaming is not None else None,
            link=core.linking.link.stats.snapshot() if core.linking is not None else None,
        )
