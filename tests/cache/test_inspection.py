"""What the cache says of a lookup, where brute force has nothing to compare with."""

from __future__ import annotations

import pytest

from hybridkv.cache import CacheGroup, Role
from hybridkv.cache.index.tree import Checkpoint
from tests.cache.sim import Sim
from tests.cache.test_named import sim, tokens

GROUPS = [CacheGroup("full", Role.FULL, 8, page_bytes=10), CacheGroup("state", Role.STATE, 1, page_bytes=80)]


def evict(cache: Sim, position: int) -> None:
    """Evict one checkpoint, as making room does."""
    prefixes = cache.cache._prefixes
    found: list[Checkpoint] = [
        one
        for root in prefixes.index.roots.values()
        for node in root.subtree()
        for one in node.checkpoints
        if one.position == position
    ]
    [checkpoint] = found
    prefixes.queue.withdraw(checkpoint)
    prefixes.history.evicted(checkpoint, prefixes.queue.policy.rate(prefixes.queue.facts(checkpoint)))
    cache.cache._reclaimer.evict_checkpoint(checkpoint)


@pytest.mark.parametrize("policy", ["lru", "flops", "reuse"])
def test_a_state_that_was_evicted_while_its_blocks_stayed(policy: str) -> None:
    cache = sim(*GROUPS, policy=policy)
    shared = tokens(48, seed=1)
    cache.serve(shared + tokens(20, seed=2), breakpoints=[48])
    evict(cache, 48)
    cache.serve(tokens(30, seed=3))
    prompt = shared + tokens(20, seed=4)
    explained = cache.cache.explain(cache.cache.match(prompt))
    assert (explained.matched_tokens, explained.missing) == (48, "state_missing")
    assert explained.position < 48
    assert explained.evicted is not None
    assert (explained.evicted.position, explained.evicted.requests_ago) == (48, 1)
    cache.cache.check_integrity()


def test_what_was_never_kept_was_not_evicted() -> None:
    cache = sim(*GROUPS)
    shared = tokens(48, seed=1)
    cache.serve(shared + tokens(20, seed=2))
    explained = cache.cache.explain(cache.cache.match(shared + tokens(20, seed=4)))
    assert (explained.matched_tokens, explained.evicted) == (48, None)
