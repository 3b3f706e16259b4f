"""The prefix cache: nodes and checkpoints in the index, and the pages they hold after their request has ended.

`Index` is the tree and `GroupPages` counts page references; `PrefixCache` changes both together. It offers evictable
nodes and checkpoints to the eviction queue. It knows running requests only by their references on nodes and
checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hybridkv.cache.arena.group_pages import GroupPages
from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.index.tree import Checkpoint, Index, Node
from hybridkv.cache.retention.eviction import EvictionQueue
from hybridkv.cache.retention.history import History, Lineage
from hybridkv.cache.retention.lifetimes import Lifetimes
from hybridkv.cache.retention.policy import KIND_NAMES, EvictionPolicy, Kind
from hybridkv.cache.stats import CacheStats, Events
from hybridkv.sight import NEVER


class PrefixCache:
    """Nodes and checkpoints."""

    def __init__(
        self,
        groups: GroupPages,
        eviction: EvictionPolicy,
        stats: CacheStats,
        events: Events,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = groups.layout
        self.groups = groups
        self.stats = stats
        self.events = events
        self.block_tokens = layout.block_tokens
        self.needs_checkpoints = layout.needs_checkpoints
        self.index = Index(layout.block_tokens, len(layout.token_groups))
        self.queue = EvictionQueue(layout, eviction, Lifetimes(layout.num_bytes, seconds))
        self.history = History(self.queue, layout.block_tokens, seconds)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def add_checkpoint(self, leaf: Node, lineage: Lineage, checkpoint: Checkpoint, *, has_local: bool = False) -> None:
        """Attach a checkpoint of a request to the path to its leaf. Of two equal checkpoints one is kept.

        The checkpoint takes over one reference to each state and, with `has_local`, to each page that local groups see.
        """
        block = checkpoint.position // self.block_tokens
        if block:
            node = leaf.at_block(block - 1)
        else:
            *_, node = leaf.path()
        twin = node.checkpoint_at(checkpoint.position, checkpoint.tail_tokens)
        if twin is not None and None not in twin.states:
            self.groups.drop_states(checkpoint.states)
            self.groups.free_tail(checkpoint)
            twin.last_used = self.history.clock
            if twin.kind is Kind.FILL and checkpoint.kind is not Kind.FILL:
                twin.kind = checkpoint.kind
                self.history.kept(twin)
            else:
                self.queue.offer(twin)
            return
        if twin is not None:
            self.drop_checkpoint(twin)
        for group in () if has_local else self.groups.local:
            first = self.groups.first_visible_block(group, checkpoint.position)
            self.groups.hold_local(node, group, first, block)
        node.add_checkpoint(checkpoint)
        self.index.changed()
        node.hold_slabs(self.groups.state_slabs(checkpoint.states))
        checkpoint.last_used = self.history.clock
        checkpoint.turn, checkpoint.new_tokens = lineage.turn, checkpoint.position - lineage.continued_from
        self.stats.checkpoints_kept += 1
        self.stats.kept_by_kind[KIND_NAMES[checkpoint.kind]] += 1
        if not self.needs_checkpoints:  # it saves less than a block, so the policy learns from its node instead
            self.queue.offer(checkpoint)
            return
        self.history.kept(checkpoint)
        before = node.checkpoint_before(checkpoint)
        if before is not None:
            self.history.superseded(before)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index and drop the references it holds."""
        node = checkpoint.node
        assert node is not None
        node.checkpoints.remove(checkpoint)
        self.index.changed()
        checkpoint.node = None
        self.queue.withdraw(checkpoint)
        self.queue.forget_lifetime(checkpoint)
        block = checkpoint.position // self.block_tokens
        for group in self.groups.local:
            first = self.groups.first_visible_block(group, checkpoint.position)
            self.drop_local(node, group, first, block)
        self.groups.drop_states(checkpoint.states)
        self.groups.free_tail(checkpoint)

    def drop_local(self, leaf: Node, group: int, first: int, last: int) -> None:
        """Drop a reference to each page of a local group in blocks [first, last) of the path to `leaf`."""
        if self.groups.keeps_idle and not leaf.dead:
            for node in self.groups.let_idle(leaf, group, first, last):
                self.queue.offer_bare(node)
        elif self.groups.drop_local(leaf, group, first, last):
            self.index.changed()

    def free_idle(self, node: Node, most: Callable[[int], int]) -> int:
        """Free idle pages of a node, from its end. `most`: by group, at most how many. Returns the number of pages."""
        freed = sum(self.groups.free_idle(node, group, most(group)) for group in self.groups.local)
        if freed:
            self.index.changed()
        return freed

    # --- nodes --------------------------------------------------------------------------------------------------------

    def split(self, node: Node, num_blocks: int) -> Node:
        """Split `node` after `num_blocks`. Returns the new node before it."""
        head = self.index.split(node, num_blocks)
        if self.groups.keeps_idle and self.queue.is_bare(node):
            self.queue.offer_bare(head)
        return head

    def release_node(self, node: Node) -> None:
        """Drop a lease's reference to a node."""
        node.refs -= 1
        if node.refs == 0:
            node.last_used = self.history.clock
            self.tidy(node)

    def tidy(self, node: Node | None) -> None:
        """After a node lost a lease or a child: free, merge or offer it for eviction, then go on to its parent."""
        while node is not None and not node.refs and not node.gone and (node.parent is not None or node.dead):
            if node.dead:
                if node.children:
                    return
                node = self._remove(node)
            elif len(node.children) == 1:
                has_bare = self.queue.is_bare(node)
                self.queue.withdraw(node)
                child = self.index.absorb(node)
                if has_bare and self.groups.keeps_idle:
                    self.queue.offer_bare(child)
                return
            elif node.children:
                return
            else:
                parent = node.parent
                if not self.groups.full and not self.groups.keeps_idle:
                    self._cut_after_last_checkpoint(node)
                elif node.num_blocks:
                    self._offer_leaf(node)
                if node.num_blocks:
                    return
                node = parent
        if node is not None and node.parent is None and not node.refs:
            self.index.drop_empty_root(node)

    def all_nodes(self, leaves: Iterable[Node]) -> set[Node]:
        """All nodes in the index, and dead nodes that leases still use. `leaves`: the leaf of every lease."""
        nodes = {node for root in self.index.roots.values() for node in root.subtree()}
        for leaf in leaves:
            for node in leaf.path():
                nodes.add(node)
                if node.dead:
                    nodes.update(node.subtree())
        return nodes

    def kill(self, node: Node) -> None:
        """Cut a node and its subtree off from the index. Their pages are freed when no lease uses them."""
        if node.parent is not None and node.parent.children.get(node.first) is node:
            self.index.unlink(node)
            node.parent.refs += 1  # leases below still use the path above; `_remove` drops this reference
        below = list(node.subtree())
        for dead in below:
            if self.events.enabled and dead.num_blocks and not dead.dead:
                self.events.removed(dead.keys)
            dead.dead = True
            self.queue.withdraw(dead)
            self.free_idle(dead, _all_pages)
        for dead in reversed(below):
            if not dead.refs and not dead.children:
                self.tidy(dead)

    def _remove(self, node: Node) -> Node | None:
        """Free a dead node that has no leases and no children. Returns its parent."""
        parent = node.parent
        cut_off = parent is not None and parent.children.get(node.first) is not node
        self.free_blocks(node, 0)
        if parent is not None and cut_off:
            parent.refs -= 1  # added by `kill`
        return parent

    def free_blocks(self, node: Node, num_kept: int) -> None:
        """Free all blocks after the first `num_kept` of a node without children, and their checkpoints."""
        boundary = (node.start + num_kept) * self.block_tokens
        end_of_kept = boundary + self.block_tokens if num_kept else 0
        for checkpoint in [c for c in node.checkpoints if c.position >= end_of_kept]:
            self.drop_checkpoint(checkpoint)
        if self.events.enabled and node.num_blocks > num_kept and not node.dead:
            self.events.removed(node.keys[num_kept:])
        if node.parent is None:
            return
        if not num_kept:
            self.queue.withdraw(node)
        lost = self.index.truncate(node, num_kept)
        for group in (*self.groups.full, *self.groups.taps):
            pages = lost[group]
            if pages:
                present = pages if group in self.groups.full else [page for page in pages if page != NULL_PAGE]
                self.groups.arena.give_back(self.groups.token_pools[group], present)
        for group in self.groups.local:
            idle = lost[group]
            if idle:  # all that is left of a window: no checkpoint and no lease needs these blocks
                pool = self.groups.token_pools[group]
                self.groups.arena.give_back(pool, pool.take_idle(idle, len(idle)))

    def free_taps(self, node: Node, groups: Iterable[int]) -> int:
        """Free the pages of these tapped layers of a node and of its checkpoints. Returns the number of pages."""
        num_freed = 0
        self.index.changed()
        for group in groups:
            found = [page for page in node.pages[group] or () if page != NULL_PAGE]
            node.pages[group] = None
            for checkpoint in node.checkpoints:
                if checkpoint.tail_pages and not checkpoint.holds and checkpoint.tail_pages[group] != NULL_PAGE:
                    found.append(checkpoint.tail_pages[group])
                    checkpoint.tail_pages[group] = NULL_PAGE
            self.groups.arena.give_back(self.groups.token_pools[group], found)
            num_freed += len(found)
        if not any(node.pages[group] for group in self.groups.taps):
            del self.index.tapped[node]
        return num_freed

    def _cut_after_last_checkpoint(self, node: Node) -> None:
        """Free the blocks after the last checkpoint: without full attention they cannot be resumed from."""
        last = max((c.position // self.block_tokens for c in node.checkpoints), default=node.start)
        if last < node.end:
            self.free_blocks(node, max(0, last - node.start))

    # --- evictable items ----------------------------------------------------------------------------------------------

    def _offer_leaf(self, node: Node) -> None:
        if not self.needs_checkpoints:
            self.history.kept(node)
        elif self.num_needed(node) < node.num_blocks:
            self.queue.offer_bare(node)

    def num_needed(self, node: Node) -> int:
        """Number of blocks of a leaf that its checkpoints need."""
        if not self.needs_checkpoints or not node.checkpoints:
            return 0
        return max(0, node.checkpoints[-1].position // self.block_tokens - node.start)

    def check_queue(self, nodes: Iterable[Node]) -> None:
        """Assert that every evictable node and checkpoint is in the queue."""
        alive = [node for node in nodes if not node.dead]
        leaves = [node for node in alive if node.parent is not None and not node.refs and not node.children]
        candidates: list[Node | Checkpoint] = [node for node in leaves if self.num_needed(node) < node.num_blocks]
        candidates += [checkpoint for node in alive for checkpoint in node.checkpoints if not checkpoint.holds]
        self.queue.check_integrity(candidates)


def _all_pages(group: int) -> int:
    """No limit to what is freed of a group."""
    return NEVER
