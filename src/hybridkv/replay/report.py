"""What a replay found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybridkv.cache import DEFAULT_POLICY
from hybridkv.replay.tiers.figures import LoadReport, TierReport
from hybridkv.replay.tiers.spec import TierSpec

PERCENTILES = (10, 25, 50, 75, 90, 99)
MISS_REASONS = ("never_seen", "kv_evicted", "state_missing", "window_missing", "tap_missing", "below_block", "refused")


@dataclass(frozen=True, slots=True)
class Setting:
    """What was replayed, and on what."""

    trace: str
    model: str
    tp: int
    memory_bytes: int
    block_tokens: int
    kv_cache_dtype: str | None = None
    state_dtype: str | None = None
    policy: str = DEFAULT_POLICY
    serial: bool = False
    prompts_only: bool = False
    speed: float = 1.0
    accelerator: str | None = None
    tiers: tuple[TierSpec, ...] = ()
    """Stores below the memory, the fastest first; of all ranks together."""
    tier_loads: str = "all"
    """Which loads are begun: all, as engines do, or only those that are faster than computing."""
    tier_fill: bool = False
    """The first tier is host memory: its idle room is filled with checkpoints, as engines do."""
    breakpoints: bool = True
    """Ask for checkpoints where the trace names breakpoints: at the ends of messages."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The numbers of one replay. Tokens of prompts are counted once, however often a request had to start."""

    setting: Setting
    requests: int
    refused: int
    """Could not be served at all."""
    preempted: int
    followed: int
    """Found the prefix they need being computed, and waited for it."""
    continued: int
    """Replies that a later request contains."""
    input_tokens: int
    output_tokens: int
    breakpoints_per_request: float
    """Mean number of positions at which requests ask for a checkpoint."""
    hit_tokens: int
    misses: Mapping[str, int]
    recomputed_tokens: int
    computed_flops: float | None
    saved_flops: float | None
    checkpoints_kept: int
    checkpoints_hit: int
    checkpoints_evicted: int
    checkpoints_skipped: int
    kept_by_kind: Mapping[str, int]
    hit_by_kind: Mapping[str, int]
    checkpoint_bytes_per_token: float
    """Bytes of checkpoints written for each token computed."""
    compactions: int
    moved_pages: int
    peak_bytes: int
    arena_bytes: int
    bytes_by_group: Sequence[Mapping[str, float]]
    prefill_saved: Mapping[str, float]
    queue_wait_s: Mapping[str, float] | None
    ttft_s: Mapping[str, float] | None
    simulated_s: float | None
    seconds: float
    tiers: Sequence[TierReport] = ()
    tier_loads: LoadReport | None = None

    @property
    def memory_tokens(self) -> int:
        """Tokens of `hit_tokens` that memory had; the others were loaded from tiers."""
        return self.hit_tokens - sum(tier.hit_tokens for tier in self.tiers)

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def seen_ratio(self) -> float:
        """The part of all prompt tokens that an earlier request had: no cache, however large, supplies more.

        Requests that were refused count as new: what they share with others is not known.
        """
        new = self.misses["never_seen"] + self.misses["refused"]
        return 1 - new / self.input_tokens if self.input_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON: the setting first. Without tiers nothing is said about them."""
        numbers = asdict(self)
        setting = numbers.pop("setting")
        tiers = {name: numbers.pop(name) for name in ("tiers", "tier_loads")}
        for name in tiers:
            del setting[name]  # the reports of tiers say it, too
        found = {**setting, **numbers, "hit_ratio": self.hit_ratio, "seen_ratio": self.seen_ratio}
        return {**found, "memory_tokens": self.memory_tokens, **tiers} if self.tiers else found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p10 to p99 of `values`; all 0 without any."""
    found = np.percentile(values, PERCENTILES) if len(values) else np.zeros(len(PERCENTILES))
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}
