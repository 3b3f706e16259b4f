"""Integrity check: recounts all references from scratch. Slow; for tests, and for times when nothing runs."""

from __future__ import annotations

from collections import Counter

from hybridkv.cache.arena.pages import NULL_PAGE, make_pages
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.tree import Checkpoint, Node, State
from hybridkv.cache.pins import Pins
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.running import Running


def check_integrity(prefixes: PrefixCache, running: Running, pins: Pins) -> None:
    """Assert that every page is free, waiting or held, and that all reference counts are right.

    Also that all groups of a lease have the same number of blocks, and that pins still have the pages they began with.
    """
    _Recount(prefixes, running).check()
    assert pins.live.keys() == running.transfers.keys()
    assert pins.live.keys() == {lease.id for lease in running.leases.values() if lease.is_pin}
    for pin in pins.live.values():
        pin.check_integrity()
        assert running.transfers[pin.lease.id] == pins.slabs_of(pin.lease)


class _Recount:
    def __init__(self, prefixes: PrefixCache, running: Running) -> None:
        self.prefixes = prefixes
        self.leases = list(running.leases.values())
        self.groups = groups = prefixes.groups
        self.size = prefixes.block_tokens
        self.nodes = prefixes.all_nodes(lease.leaf for lease in self.leases)
        assert not any(node.dead for root in prefixes.index.roots.values() for node in root.subtree())
        self.owned: dict[str, Counter[int]] = {name: Counter() for name in groups.arena.pools}
        """Pages with one owner."""
        self.local: dict[str, Counter[int]] = {name: Counter() for name in groups.arena.pools}
        """References to pages of local groups."""
        self.listed: dict[str, Counter[int]] = {name: Counter() for name in groups.arena.pools}
        """Pages of local groups that are listed in nodes."""
        self.states: dict[State, int] = {}
        """The state group of each state."""
        self.state_holds: Counter[State] = Counter()

    def check(self) -> None:
        for node in self.nodes:
            self._node(node)
        for lease in self.leases:
            self._lease(lease)
        self._check_refs()
        self.prefixes.check_queue(self.nodes)
        for state, group in self.states.items():
            assert state.refs == self.state_holds[state]
            assert len(state.pages) == self.groups.layout.state_groups[group].pages_per_state
            self.owned[self.groups.state_pools[group].name].update(state.pages)
        for name, pool in self.groups.arena.pools.items():
            assert all(count == 1 for count in self.owned[name].values()), name
            more = {page: holds for page, holds in enumerate(pool.holds) if holds}
            counted = {page: n - 1 for page, n in self.local[name].items() if n > 1}
            idle = self.listed[name].keys() - self.local[name].keys()
            assert more == counted | dict.fromkeys(idle, -1), name
            assert pool.num_idle == len(idle), name
            assert not idle or self.groups.keeps_idle, name
            assert self.owned[name].keys().isdisjoint(self.local[name])
            assert all(count == 1 for count in self.listed[name].values()), name
        held = {name: self.owned[name] + (self.local[name] | self.listed[name]) for name in self.owned}
        self.groups.arena.check_integrity(held)

    def _node(self, node: Node) -> None:
        block_bytes = self.prefixes.index.block_bytes
        assert len(node.tokens) == node.num_blocks * block_bytes
        if node.parent is not None:
            assert node.num_blocks > 0
            assert node.start == node.parent.end
            assert node.first == bytes(node.tokens[:block_bytes])
            assert node.dead or node.parent.children[node.first] is node
            assert node.dead or node.refs or len(node.children) != 1, "a chain that should have been merged"
        for group, pages in enumerate(node.pages):
            pool = self.groups.token_pools[group]
            assert pages is not None or group not in self.groups.full
            present = [page for page in pages or () if page != NULL_PAGE]
            assert pages is None or len(pages) == node.num_blocks
            assert group not in self.groups.full or len(present) == node.num_blocks
            assert all(pool.slab_of(page) in node.slabs for page in present)
            if group in self.groups.local:
                self.listed[pool.name].update(present)
            else:
                self.owned[pool.name].update(present)
            assert group not in self.groups.taps or not present or node in self.prefixes.index.tapped
        assert [c.position for c in node.checkpoints] == sorted(c.position for c in node.checkpoints)
        for checkpoint in node.checkpoints:
            self._checkpoint(node, checkpoint)

    def _checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        block, inside = divmod(checkpoint.position, self.size)
        assert checkpoint.node is node
        assert block == 0 if node.parent is None else node.start < block <= node.end
        assert len(checkpoint.tail_tokens) == inside * 4
        assert not checkpoint.tail_pages or len(checkpoint.tail_pages) == len(self.groups.token_pools)
        for pool, page in zip(self.groups.token_pools, checkpoint.tail_pages, strict=False):
            if page != NULL_PAGE:
                self.owned[pool.name][page] += 1
                assert pool.slab_of(page) in node.slabs
        for group in self.groups.local:
            first = self.groups.first_visible_block(group, checkpoint.position)
            self._hold_path(node, group, first, block)
        self._hold_states(checkpoint.states)
        assert self.groups.state_slabs(checkpoint.states) <= node.slabs

    def _lease(self, lease: Lease) -> None:
        end, computed = lease.leaf.end, lease.computed
        assert 0 <= computed <= lease.num_tokens
        assert end == computed // self.size or lease.leaf.dead
        lengths = {len(table) for table in lease.pages.tables if table is not None}
        assert len(lengths) <= 1
        assert not lengths or lease.pages.tail is not None or lengths.pop() >= -(-computed // self.size)
        assert lease.step is not None or all((state is None) == (computed == 0) for state in lease.pages.states)
        for group, table in enumerate(lease.pages.tables):
            if table is None:
                continue
            pool = self.groups.token_pools[group]
            path = make_pages(page for node in reversed([*lease.leaf.path()]) for page in node.pages[group] or ())
            own = make_pages(page for page in table[end:] if page != NULL_PAGE)
            assert len(own) == len(table) - end or (group in self.groups.local and _is_loading(lease))
            assert all(pool.slab_of(page) in lease.pages.slabs for page in own)
            if group in self.groups.local:
                first = lease.pages.local_first[group]
                assert set(table[:first]) <= {NULL_PAGE}
                self._hold_path(lease.leaf, group, first, end)
                self.local[pool.name].update(own)
                assert first == self.groups.first_visible_block(group, computed)
                held = [lease.leaf.at_block(b).pages[group] for b in range(first, end)]
                assert list(table[first:end]) == [
                    pages[b - lease.leaf.at_block(b).start]
                    for b, pages in zip(range(first, end), held, strict=True)
                    if pages is not None
                ]
            else:
                assert table[:end] == path
                self.owned[pool.name].update(own)
        self._hold_states(lease.pages.states)
        if lease.step is not None:
            self._hold_states(lease.step.old_states)
            for kept in lease.step.kept:
                self._hold_states(kept.states)

    def _hold_path(self, leaf: Node, group: int, first: int, last: int) -> None:
        for block in range(first, last):
            node = leaf.at_block(block)
            pages = node.pages[group]
            assert pages is not None
            self.local[self.groups.token_pools[group].name][pages[block - node.start]] += 1

    def _hold_states(self, states: list[State | None]) -> None:
        for group, state in enumerate(states):
            if state is not None:
                self.states[state] = group
                self.state_holds[state] += 1

    def _check_refs(self) -> None:
        leaves = Counter(lease.leaf for lease in self.leases)
        cut_off = Counter(
            node.parent
            for node in self.nodes
            if node.dead and node.parent is not None and node.parent.children.get(node.first) is not node
        )
        for node in self.nodes:
            assert node.refs == leaves[node] + cut_off[node]
        holds = Counter(lease.pages.tail for lease in self.leases if lease.pages.tail is not None)
        for node in self.nodes:
            for checkpoint in node.checkpoints:
                assert checkpoint.holds == holds[checkpoint]


def _is_loading(lease: Lease) -> bool:
    """Whether a load is in flight. Blocks that a local group does not see after the load have no pages."""
    return lease.step is not None and lease.step.loaded_to > lease.step.start
