"""Policies by name, and the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from hybridkv.cache.layout import CacheLayout
from hybridkv.cache.retention.policy import (
    CheckpointPolicy,
    EvictionPolicy,
    LeastRecentlyUsed,
    PromptEndBranchesGrid,
    RecencyAndFlops,
    affordable_grid,
)
from hybridkv.cache.retention.reuse import PredictedReuse
from hybridkv.errors import InputError

Flops = Callable[[int, int], float]
"""`flops(start, end)`: FLOPs to compute the tokens [start, end) of a sequence."""

POLICIES: Mapping[str, Callable[[Callable[[], Flops] | None], EvictionPolicy]] = {
    "reuse": lambda find_flops: PredictedReuse(),
    "lru": lambda find_flops: LeastRecentlyUsed(),
    "flops": lambda find_flops: RecencyAndFlops(None if find_flops is None else find_flops()),
}
DEFAULT_POLICY = "reuse"


def named_policy(name: str, find_flops: Callable[[], Flops] | None = None) -> EvictionPolicy:
    """Create the policy of that name. `find_flops`: called by policies that use FLOPs; if None, they count tokens."""
    if name not in POLICIES:
        close = get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"no policy {name!r}: choose one of {', '.join(POLICIES)}{hint}")
    return POLICIES[name](find_flops)


_FILL_TOKENS = 512
"""The densest grid of checkpoints in idle memory. A checkpoint there costs only time: scans stop to write their states.
With 512 tokens between them that is 1 to 3% of a prefill (docs/performance.md)."""
_MOST_FILLS = 16
"""Most checkpoints of that grid in one prompt: in a long prompt, a denser grid would save little more."""


def default_checkpoints(layout: CacheLayout) -> CheckpointPolicy:
    """An affordable grid, and no checkpoint at a prompt end that closely follows a breakpoint of the caller."""
    grid = affordable_grid(layout.checkpoint_bytes, layout.kv_bytes_per_token)
    fill_tokens = _FILL_TOKENS if layout.state_groups else None  # all blocks of windows stay in idle memory
    return PromptEndBranchesGrid(grid, grid // 16, fill_tokens, _MOST_FILLS)
