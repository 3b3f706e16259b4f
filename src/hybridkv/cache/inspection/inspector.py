"""Looks into a cache, for people: nothing here is needed to serve requests, and only `drop` changes anything."""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.cache.index.leaders import Match
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.inspection.breakpoints import BreakpointAccount, account_for
from hybridkv.cache.inspection.explanation import Evicted, Explainer, Explanation
from hybridkv.cache.inspection.memory_map import MemoryMap, memory_map
from hybridkv.cache.inspection.prefix_tree import PrefixTree, find_block, prefix_tree, resumable_prefixes, tokens_up_to
from hybridkv.cache.pins import Pins
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.placement import Placement
from hybridkv.cache.tokens import TOKEN_BYTES, LookupKey

_MOST_CELLS = 4096
_MOST_RUNS = 1000
_HEAD_TOKENS = 12


class Inspector:
    """Views of one cache."""

    def __init__(self, prefixes: PrefixCache, placement: Placement, pins: Pins) -> None:
        self._prefixes = prefixes
        self._placement = placement
        self._pins = pins
        self._explainer = Explainer(prefixes, placement.rule)

    @property
    def version(self) -> tuple[int, int, int]:
        """While it is the same, all views are the same but for times."""
        prefixes = self._prefixes
        return prefixes.index.version, prefixes.history.clock, len(self._pins.live)

    def explain(self, match: Match, taps: tuple[int, ...]) -> Explanation:
        """Why a request with this match resumes where it does. Call it before `begin`, which forgets evictions."""
        found = match.found
        if not found.is_current:
            limit = len(found.tokens) // TOKEN_BYTES - 1
            path, resume = self._placement.find(found.key.root, found.tokens, limit, taps)
            found = found._replace(path=path, resume=resume)
        return self._explainer.explain(found, taps)

    def evicted(self, lease: Lease) -> Evicted | None:
        """The deepest evicted item whose blocks a request has computed again."""
        return self._explainer.evicted(lease.lineage.recalled)

    def breakpoints(self, lease: Lease, positions: Iterable[int], cached_tokens: int) -> list[BreakpointAccount]:
        """What became of the breakpoints of a request that is about to give up its lease."""
        return account_for(self._prefixes, lease, positions, cached_tokens)

    def memory_map(self, max_cells: int = _MOST_CELLS, num_evictions: int = 16) -> MemoryMap:
        return memory_map(self._prefixes, self._placement.running, max_cells, num_evictions)

    def prefix_tree(self, max_runs: int = _MOST_RUNS) -> PrefixTree:
        leaves = [pin.lease.leaf for pin in self._pins.live.values()]
        return prefix_tree(self._prefixes, leaves, max_runs, _HEAD_TOKENS)

    def prefix(self, key: bytes) -> tuple[int, bytes] | None:
        """A run by the key of its first block: its first position, and all tokens up to its end."""
        place = find_block(self._prefixes, key)
        if place is None:
            return None
        return (place.node.start + place.block) * self._prefixes.block_tokens, tokens_up_to(place.node)

    def resumable(self, key: bytes, most: int = 16) -> tuple[LookupKey, list[bytes]] | None:
        """The lookup key of a run, and the tokens up to each of its last checkpoints (or to its end)."""
        place = find_block(self._prefixes, key)
        if place is None:
            return None
        *_, root = place.node.path()
        found = resumable_prefixes(place.node, self._prefixes.block_tokens, most)
        return LookupKey(root.keys[0], ()), found

    def keys_below(self, key: bytes) -> set[bytes]:
        """The keys of all blocks of a run from `key` on, and of what continues it."""
        place = find_block(self._prefixes, key)
        if place is None:
            return set()
        keys = set(place.node.keys[place.block :])
        return keys.union(*(node.keys for node in place.node.subtree() if node is not place.node))

    def drop(self, key: bytes) -> int:
        """Remove a run and all that continues it from the index. Returns the number of tokens; 0 if it is not there.

        Requests that run there, and pins, keep their pages until they end.
        """
        place = find_block(self._prefixes, key)
        if place is None:
            return 0
        node, block = place
        if block:
            self._prefixes.index.split(node, block)
        num_blocks = sum(one.num_blocks for one in node.subtree())
        for one in node.subtree():
            self._prefixes.history.log.forget(one.keys)
        self._prefixes.kill(node)
        return num_blocks * self._prefixes.block_tokens
