"""Recovery from invalid pages: removes them from the index, and finds how far each lease must go back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridkv.cache.arena.pages import Pages
from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.tree import Checkpoint, Node, State
from hybridkv.cache.steps.lease import Lease

BadPages = dict[int, set[int]]
"""By group: page numbers."""


class Invalid:
    """A set of invalid pages, and everything derived from them."""

    def __init__(self, prefixes: PrefixCache, tokens: BadPages, states: BadPages) -> None:
        self.prefixes = prefixes
        self.groups = prefixes.groups
        self.tokens = tokens
        self.states = states

    def first_bad_position(self, lease: Lease) -> int | None:
        """The first position of a lease that is invalid or derived from invalid data.

        A position at or after `lease.computed` concerns only pages that have no computed tokens yet.
        """
        return min([*self._in_tables(lease), *self._in_path(lease), *self._in_states(lease)], default=None)

    def _in_tables(self, lease: Lease) -> Iterator[int]:
        size = self.prefixes.block_tokens
        for group, bad in self.tokens.items():
            table = lease.pages.tables[group]
            block = None if table is None else _first_index(table, bad)
            if block is not None:
                yield block * size
        if any(page in self.tokens.get(group, ()) for group, page in lease.pages.copied):
            yield lease.leaf.end * size

    def _in_states(self, lease: Lease) -> Iterator[int]:
        """A bad state must be recomputed, so the lease goes back to before the state's position."""
        before = max(0, lease.computed - 1)
        if lease.pages.tail is not None and self._is_bad(lease.pages.tail):
            yield before
        if lease.step is None:
            if self._has_bad_state(lease.pages.states):
                yield before
            return
        written_over = lease.step.in_place and any(self._has_bad_state(kept.states) for kept in lease.step.kept)
        if written_over or self._has_bad_state(lease.step.old_states):
            yield before
        elif self._has_bad_state(lease.pages.states) or any(
            self._has_bad_state(kept.states) for kept in lease.step.kept
        ):
            yield before if lease.step.in_place else lease.step.start

    def _in_path(self, lease: Lease) -> Iterator[int]:
        """Blocks that are out of the window, and checkpoints on the path: the lease may be derived from them."""
        for node in lease.leaf.path():
            block = self._first_bad_block(node)
            if block is not None:
                yield block * self.prefixes.block_tokens
            for checkpoint in node.checkpoints:
                if checkpoint.position <= lease.computed and self._is_bad(checkpoint):
                    yield checkpoint.position

    def clear_pages(self) -> None:
        """Zero the invalid pages, so that their next holder does not read leftovers of a failed load."""
        for pools, by_group in ((self.groups.token_pools, self.tokens), (self.groups.state_pools, self.states)):
            for group, bad in by_group.items():
                for page in bad:
                    self.groups.arena.clear(pools[group], page)

    def cut_out(self, node: Node) -> None:
        """Remove invalid blocks and checkpoints of `node`, and everything after them, from the index."""
        size = self.prefixes.block_tokens
        bad = [checkpoint for checkpoint in node.checkpoints if self._is_bad(checkpoint)]
        position = min((checkpoint.position for checkpoint in bad), default=None)
        block = self._first_bad_block(node)
        if block is None and position is None:
            return
        cut = min(node.end if block is None else block, node.end if position is None else position // size)
        if position is not None:
            for checkpoint in [c for c in node.checkpoints if c.position >= position and c.position // size <= cut]:
                self.prefixes.drop_checkpoint(checkpoint)
        if cut >= node.end:
            for child in list(node.children.values()):
                self.prefixes.kill(child)
            self.prefixes.tidy(node)
            return
        if cut > node.start:
            self.prefixes.split(node, cut - node.start)
        self.prefixes.kill(node)

    def _first_bad_block(self, node: Node) -> int | None:
        found = [
            node.start + index
            for group, bad in self.tokens.items()
            if node.parent is not None
            and (pages := node.pages[group]) is not None
            and (index := _first_index(pages, bad)) is not None
        ]
        return min(found, default=None)

    def _is_bad(self, checkpoint: Checkpoint) -> bool:
        tails = any(checkpoint.tail_pages[group] in bad for group, bad in self.tokens.items() if checkpoint.tail_pages)
        return tails or self._has_bad_state(checkpoint.states)

    def _has_bad_state(self, states: Sequence[State | None]) -> bool:
        return any(
            state is not None and not bad.isdisjoint(state.pages)
            for group, bad in self.states.items()
            for state in (states[group],)
        )


def _first_index(pages: Pages, wanted: set[int]) -> int | None:
    """Index of the first page that is in `wanted`."""
    return next((i for i, page in enumerate(pages) if page in wanted), None)
