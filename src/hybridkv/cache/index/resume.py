"""The resume rule: the longest n that *every* group a request needs can supply, at that same n.

Full attention has all blocks of the path by construction. A local group must have the blocks it still sees at n, a
tapped layer must have all blocks, and a state group must have a state at exactly n. The minimum of each group's own
best position would be wrong: two state groups can both have states, but at different positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.index.tree import Checkpoint, Index, PathNode
from hybridkv.cache.layout import CacheGroup, CacheLayout, Role
from hybridkv.cache.retention.partings import Parting
from hybridkv.cache.tokens import TOKEN_BYTES, LookupKey

NO_HOLE = -1


class Missing(StrEnum):
    """Why a request resumes before the end of its matching KV, or why no more KV matches."""

    NEVER_SEEN = "never_seen"
    BELOW_BLOCK = "below_block"
    STATE = "state_missing"
    WINDOW = "window_missing"
    TAP = "tap_missing"


class Resume(NamedTuple):
    """The position and checkpoint from which a request may resume, and what is missing for a larger position."""

    position: int
    checkpoint: Checkpoint | None
    matched_tokens: int
    """Full-attention KV that matches, in whole blocks. Only states, windows or taps can be missing up to here."""
    missing: Missing


class Found(NamedTuple):
    """Result of an index lookup for a request, and the index version at that time."""

    key: LookupKey
    tokens: bytes
    path: list[PathNode]
    resume: Resume
    source: Index
    version: int

    def parting(self, block_tokens: int) -> Parting | None:
        """Where the prompt leaves earlier prompts that go on; None if it does not."""
        num_blocks = (len(self.tokens) // TOKEN_BYTES - 1) // block_tokens
        if len(self.path) < 2:
            return None
        node, reached = self.path[-1]
        position = (node.start + reached) * block_tokens
        if node.start + reached >= num_blocks:  # it ends inside an earlier prompt
            return None
        if reached < node.num_blocks:
            end = node.prompt_tokens if node.prompt_tokens > position else 0
            return Parting(position, node.start * block_tokens, end)
        return Parting(position, node.start * block_tokens, 0) if node.children else None

    @property
    def is_current(self) -> bool:
        """Whether the index has not changed since the lookup."""
        return self.source.version == self.version


class ResumeRule:
    """The rule for one layout."""

    def __init__(self, layout: CacheLayout) -> None:
        self.block_tokens = layout.block_tokens
        self.has_states = bool(layout.state_groups)
        self.local = [(i, group) for i, group in enumerate(layout.token_groups) if group.role is Role.LOCAL]

    def find(self, path: Sequence[PathNode], tokens: bytes | bytearray, limit: int, taps: Sequence[int]) -> Resume:
        """The largest n <= `limit` for a request that uses the tapped layers `taps` (indices of token groups)."""
        if not path:
            return Resume(0, None, 0, Missing.NEVER_SEEN)
        last = path[-1]
        matched = (last.node.start + last.num_blocks) * self.block_tokens
        missing = (
            Missing.BELOW_BLOCK if limit // self.block_tokens * self.block_tokens <= matched else Missing.NEVER_SEEN
        )
        best, why = self._best_checkpoint(path, tokens, limit, taps)
        position = best.position if best else 0
        if not self.has_states:
            aligned, lacking = self.best_boundary(path, self.local, taps)
            why = why or lacking
            if aligned * self.block_tokens > position or best is None:
                best, position = None, aligned * self.block_tokens
        return Resume(position, best, matched, (why or self._default) if position < matched else missing)

    @property
    def _default(self) -> Missing:
        return Missing.STATE if self.has_states else Missing.WINDOW

    def _best_checkpoint(
        self, path: Sequence[PathNode], tokens: bytes | bytearray, limit: int, taps: Sequence[int]
    ) -> tuple[Checkpoint | None, Missing | None]:
        """The deepest checkpoint on the path that can be resumed, and what the deepest unusable one lacks."""
        why: Missing | None = None
        for checkpoint in self.reachable(path, tokens, limit):
            lacks = self.lacks(path, checkpoint, taps)
            if lacks is None:
                return checkpoint, why
            why = why or lacks
        return None, why

    def reachable(self, path: Sequence[PathNode], tokens: bytes | bytearray, limit: int) -> Iterator[Checkpoint]:
        """The checkpoints on the path whose tokens match, at most at `limit`, the deepest first."""
        for depth in range(len(path) - 1, -1, -1):
            node, num_blocks = path[depth]
            reached = node.start + num_blocks
            for checkpoint in reversed(node.checkpoints):
                block = checkpoint.position // self.block_tokens
                if block > reached or checkpoint.position > limit:
                    continue
                tail = checkpoint.tail_tokens
                if not tail or tokens.startswith(tail, block * self.block_tokens * TOKEN_BYTES):
                    yield checkpoint

    def lacks(self, path: Sequence[PathNode], checkpoint: Checkpoint, taps: Sequence[int]) -> Missing | None:
        """What a checkpoint on the path lacks; None if a request can resume there."""
        if None in checkpoint.states:
            return Missing.STATE
        block = checkpoint.position // self.block_tokens
        for index, group in self.local:
            if _last_hole(path, index, self._first_block(group, checkpoint.position), block) != NO_HOLE:
                return Missing.WINDOW
        for index in taps:
            tail_lacks = bool(checkpoint.tail_tokens) and checkpoint.tail_pages[index] == NULL_PAGE
            if tail_lacks or _last_hole(path, index, 0, block) != NO_HOLE:
                return Missing.TAP
        return None

    def best_boundary(
        self, path: Sequence[PathNode], local: Sequence[tuple[int, CacheGroup]], taps: Sequence[int]
    ) -> tuple[int, Missing | None]:
        """The last block boundary at which these local groups and taps have what they need, and what a later one lacks.

        A layout without states can be resumed there.
        """
        last = path[-1]
        block = last.node.start + last.num_blocks
        why: Missing | None = None
        for index in taps:
            hole = _first_hole(path, index, block)
            if hole != NO_HOLE:
                block, why = hole, Missing.TAP
        settled = False
        while not settled:
            settled = True
            for index, group in local:
                hole = _last_hole(path, index, self._first_block(group, block * self.block_tokens), block)
                if hole != NO_HOLE:
                    # With a window, every boundary inside a run of holes lacks a block, so skip the whole run.
                    # A chunk may begin inside the run and need none of those blocks: try the boundary before the hole.
                    block = hole if group.sight.window is None else _start_of_holes(path, index, hole)
                    why, settled = Missing.WINDOW, False
        return block, why

    def _first_block(self, group: CacheGroup, position: int) -> int:
        return group.sight.first_visible_block(position, self.block_tokens)


def _last_hole(path: Sequence[PathNode], group: int, first: int, last: int) -> int:
    """The last block in [first, last) that has no page in `group`; NO_HOLE if all have one."""
    for depth in range(len(path) - 1, -1, -1):
        if last <= first:
            break
        node = path[depth].node
        if node.start >= last:
            continue
        low, pages = max(first, node.start), node.pages[group]
        if pages is None:
            return last - 1
        run = pages[low - node.start : last - node.start]
        if NULL_PAGE in run:
            run.reverse()
            return last - 1 - run.index(NULL_PAGE)
        last = low
    return NO_HOLE


def _first_hole(path: Sequence[PathNode], group: int, last: int) -> int:
    """The first block before `last` that has no page in `group`; NO_HOLE if all have one."""
    for node, num_blocks in path:
        pages, count = node.pages[group], min(num_blocks, last - node.start)
        if count > 0 and (pages is None or NULL_PAGE in pages[:count]):
            return node.start + (0 if pages is None else pages.index(NULL_PAGE))
    return NO_HOLE


def _start_of_holes(path: Sequence[PathNode], group: int, hole: int) -> int:
    """First block of the run of blocks without pages that contains `hole`, within its node."""
    node = next(step.node for step in reversed(path) if step.node.start <= hole)
    pages = node.pages[group]
    if pages is None:
        return node.start
    while hole > node.start and pages[hole - 1 - node.start] == NULL_PAGE:
        hole -= 1
    return hole
