"""What is counted while a replay runs. It looks at the cache and never changes it."""

from __future__ import annotations

import time
from collections import Counter

from hybridkv.cache import Cache, Lease, Role
from hybridkv.replay.report import MISS_REASONS, ReplayReport, Setting, percentiles
from hybridkv.replay.seen import Seen
from hybridkv.replay.service import ComputeModel
from hybridkv.replay.tiers.tiers import TierLoad, Tiers
from hybridkv.replay.traces import TraceRequest

_SAMPLES = 100
_SUPPLY_REASONS = ("state_missing", "window_missing", "tap_missing")


class Meter:
    """The counters of one replay."""

    def __init__(
        self, cache: Cache, num_requests: int, num_pieces: int, compute: ComputeModel | None, tiers: Tiers | None = None
    ) -> None:
        self.seen = Seen(num_pieces)
        self.refused = 0
        self.preempted = 0
        self.followed = 0
        self.output_tokens = 0
        self.queue_waits: list[float] = []
        self.first_token_waits: list[float] = []
        self._cache = cache
        self._compute = compute
        self._tiers = tiers
        self._num_requests = num_requests
        self._input_tokens = 0
        self._breakpoints = 0
        self._hit_tokens = 0
        self._misses: Counter[str] = Counter(dict.fromkeys(MISS_REASONS, 0))
        self._computed_tokens = 0
        self._recomputed_tokens = 0
        self._computed_flops = 0.0
        self._saved_flops = 0.0
        self._saved_parts: list[float] = []
        self._samples: list[dict[str, float]] = []
        self._ended = 0
        self._peak_slabs = 0
        self._started_at = time.perf_counter()
        groups = cache.layout.groups
        self._page_bytes = {group.pool_name: group.page_bytes for group in groups}
        self._evicted = _evicted_reason(cache)
        self._slab_bytes = groups[0].page_bytes * groups[0].pages_per_slab

    def supply_misses(self) -> tuple[int, ...]:
        """The cache's own counters of what kept requests from resuming; the one that grows names the reason."""
        misses = self._cache.stats.misses
        return tuple(misses[reason] for reason in _SUPPLY_REASONS)

    def started(
        self,
        request: TraceRequest,
        lease: Lease,
        supply_before: tuple[int, ...],
        seen: int,
        load: TierLoad | None = None,
    ) -> None:
        """A request got its first pages: where every token of its prompt comes from. `load`: one that it begins.

        0 ........ hit ........ matched ........ seen, whole blocks .. seen ........ prompt
          supplied  state, window   evicted             below a block    never seen
        """
        length, hit, block = request.prompt_tokens, lease.cached_tokens, self._cache.block_tokens
        if load is not None and not load.is_late and self._tiers is not None:
            hit = load.supply.end
            self._tiers.count_hit(load)
        matched = max(lease.matched_tokens, hit)
        shareable = max(matched, min(seen, length - 1) // block * block)
        known = max(shareable, seen)
        self._input_tokens += length
        self._breakpoints += len(request.all_breakpoints)
        self._hit_tokens += hit
        if matched > hit:
            self._misses[self._supply_reason(supply_before)] += matched - hit
        self._misses[self._evicted] += shareable - matched
        self._misses["below_block"] += known - shareable
        self._misses["never_seen"] += length - known
        self._saved_parts.append(hit / length)
        if self._compute is not None:
            self._saved_flops += self._compute.flops(0, hit)

    def _supply_reason(self, before: tuple[int, ...]) -> str:
        grown = [now - then for now, then in zip(self.supply_misses(), before, strict=True)]
        return _SUPPLY_REASONS[max(range(len(grown)), key=grown.__getitem__)]

    def computed(self, start: int, end: int, before: int) -> None:
        """Tokens [start, end) were computed; of the sequence, those up to `before` had been computed earlier."""
        self._computed_tokens += end - start
        self._recomputed_tokens += max(0, min(end, before) - start)
        if self._compute is not None:
            self._computed_flops += self._compute.flops(start, end)

    def never_started(self, request: TraceRequest) -> None:
        """A request that was refused before it computed anything."""
        self._input_tokens += request.prompt_tokens
        self._breakpoints += len(request.all_breakpoints)
        self._misses["refused"] += request.prompt_tokens
        self._saved_parts.append(0.0)

    def ended(self, now: float) -> None:
        """A request was served or refused. `now`: seconds, or requests where there is no time."""
        self._ended += 1
        self._peak_slabs = max(self._peak_slabs, sum(self._cache.slabs_in_use().values()))
        if self._ended * _SAMPLES // self._num_requests > (self._ended - 1) * _SAMPLES // self._num_requests:
            pages = self._cache.pages_in_use()
            held = {name: float(count * self._page_bytes[name]) for name, count in pages.items()}
            self._samples.append({"t": now, **held})

    def _checkpoint_bytes(self) -> int:
        """Bytes of states that were written for checkpoints. A window's blocks are written anyway."""
        states = sum(group.page_bytes * group.pages_per_state for group in self._cache.layout.state_groups)
        return self._cache.stats.checkpoints_kept * states

    def report(self, setting: Setting, *, continued: int, simulated_s: float | None) -> ReplayReport:
        stats = self._cache.stats
        has_flops = self._compute is not None
        return ReplayReport(
            setting=setting,
            requests=self._num_requests,
            refused=self.refused,
            preempted=self.preempted,
            followed=self.followed,
            continued=continued,
            input_tokens=self._input_tokens,
            output_tokens=self.output_tokens,
            breakpoints_per_request=self._breakpoints / self._num_requests,
            hit_tokens=self._hit_tokens,
            misses=dict(self._misses),
            recomputed_tokens=self._recomputed_tokens,
            computed_flops=self._computed_flops if has_flops else None,
            saved_flops=self._saved_flops if has_flops else None,
            checkpoints_kept=stats.checkpoints_kept,
            checkpoints_hit=stats.checkpoints_hit,
            checkpoints_evicted=stats.checkpoints_evicted,
            checkpoints_skipped=stats.checkpoints_skipped,
            kept_by_kind=dict(stats.kept_by_kind),
            hit_by_kind=dict(stats.hit_by_kind),
            checkpoint_bytes_per_token=self._checkpoint_bytes() / max(1, self._computed_tokens),
            compactions=stats.compactions,
            moved_pages=stats.pages_moved,
            peak_bytes=self._peak_slabs * self._slab_bytes,
            arena_bytes=self._cache.layout.num_slabs * self._slab_bytes,
            bytes_by_group=self._samples,
            prefill_saved=percentiles(self._saved_parts),
            queue_wait_s=None if simulated_s is None else percentiles(self.queue_waits),
            ttft_s=None if simulated_s is None else percentiles(self.first_token_waits),
            simulated_s=simulated_s,
            seconds=time.perf_counter() - self._started_at,
            tiers=() if self._tiers is None else self._tiers.tier_reports(),
            tier_loads=None if self._tiers is None else self._tiers.load_report(),
        )


def _evicted_reason(cache: Cache) -> str:
    """What is gone where nothing matches any more: without full attention there is no KV to evict."""
    if any(group.role is Role.FULL for group in cache.layout.token_groups):
        return "kv_evicted"
    return "state_missing" if cache.layout.state_groups else "window_missing"
