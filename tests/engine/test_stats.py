"""What an engine tells of its memory."""

from __future__ import annotations

from hybridkv.cache import CacheGroup, Role
from hybridkv.engine import MemoryUse
from tests.cache.test_named import sim, tokens


def test_pins_show_in_the_use_of_memory() -> None:
    groups = [CacheGroup("full", Role.FULL, 8, page_bytes=10), CacheGroup("state", Role.STATE, 1, page_bytes=80)]
    cache = sim(*groups)
    cache.serve(tokens(100))
    pin = cache.cache.pin(tokens(100), 60)
    use = MemoryUse.of(cache.cache, 80 * 400)
    assert (use.pinned_prefixes, use.pinned_bytes) == (1, 2 * 80)  # a slab of 7 blocks, and one of the state
    cache.cache.unpin(pin)
    use = MemoryUse.of(cache.cache, 80 * 400)
    assert (use.pinned_prefixes, use.pinned_bytes) == (0, 0)
