"""How often a prompt's tokens are packed and scanned, and how often the index is walked for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import hybridkv.cache.cache
import hybridkv.cache.steps.lease
import hybridkv.engine.prompts
import hybridkv.engine.request
from hybridkv.cache import Cache
from hybridkv.cache.index.tree import Index
from hybridkv.cache.tokens import pack_tokens


def count_work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts from now on: `packs`, `scans`, `matches` and `walks`. Single tokens are sampled ones, and do not count."""
    counts: Counter[str] = Counter()
    prompts = hybridkv.engine.prompts
    scan, match, walk = prompts._scan, Cache.match, Index.walk

    def counted_pack(tokens: Any) -> bytes:
        counts["packs"] += not isinstance(tokens, bytes) and len(tokens) > 1
        return pack_tokens(tokens)

    def counted_scan(*args: Any) -> Any:
        counts["scans"] += 1
        return scan(*args)

    def counted_match(*args: Any) -> Any:
        counts["matches"] += 1
        return match(*args)

    def counted_walk(*args: Any) -> Any:
        counts["walks"] += 1
        return walk(*args)

    for module in (prompts, hybridkv.engine.request, hybridkv.cache.cache, hybridkv.cache.steps.lease):
        monkeypatch.setattr(module, "pack_tokens", counted_pack)
    monkeypatch.setattr(prompts, "_scan", counted_scan)
    monkeypatch.setattr(Cache, "match", counted_match)
    monkeypatch.setattr(Index, "walk", counted_walk)
    return counts
