"""How much of a prompt a replay computes at once."""

from __future__ import annotations

from hybridkv.cache import Cache, Lease, Role

_PREFILL_STEP = 8192
"""Tokens a step where windows slide: a whole long prompt at once would hold all it has ever seen."""


def prefill_step(cache: Cache, lease: Lease) -> int:
    """Tokens to compute next."""
    remaining = lease.num_tokens - lease.computed
    slides = any(group.role is Role.LOCAL for group in cache.layout.token_groups)
    return min(remaining, _PREFILL_STEP) if slides else remaining
