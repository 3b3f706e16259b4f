"""What the cache says of a lookup, where brute force has nothing to compare with."""

from __future__ import annotations

import pytest

from hybridkv.cache import CacheGroup, Evicted, Role
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


def test_a_run_that_was_merged_with_the_one_before_is_dropped_from_its_own_beginning() -> None:
    cache = sim(*GROUPS)
    shared = tokens(48, seed=1)
    for seed in (2, 3):
        cache.serve(shared + tokens(40, seed=seed), breakpoints=[48])
    inspector = cache.cache.inspector
    first, second = [run for run in inspector.prefix_tree().runs if run.start == 48]
    assert inspector.drop(first.key) == 32
    [merged] = inspector.prefix_tree().runs
    assert (merged.start, merged.end) == (0, 80)
    assert inspector.keys_below(second.key) < inspector.keys_below(merged.key)
    assert inspector.drop(second.key) == 32
    cache.cache.check_integrity()
    [left] = inspector.prefix_tree().runs
    assert (left.key, left.start, left.end) == (merged.key, 0, 48)
    assert cache.cache.match(shared + tokens(40, seed=2)).num_tokens == 48


def test_an_item_that_ends_in_a_reply_is_cut_to_the_prompt() -> None:
    assert Evicted(203, 1.0, 1).in_prompt(200, 16).position == 192
    assert Evicted(199, 1.0, 1).in_prompt(200, 16).position == 199
