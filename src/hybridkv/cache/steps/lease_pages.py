"""The pages that one running request holds. `placement` and steps change them, `compaction` moves them."""

from __future__ import annotations

from hybridkv.cache.arena.pages import Pages
from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.index.tree import Checkpoint, State


class LeasePages:
    """Page tables and states. Blocks up to the end of the lease's leaf belong to nodes, later ones to the lease."""

    __slots__ = ("copied", "local_first", "named_tables", "slabs", "slide_at", "states", "tables", "tail")

    def __init__(self) -> None:
        self.tables: list[Pages | None] = []
        """By token group: one page per block; None for taps that the request does not use."""
        self.named_tables: dict[str, Pages] = {}
        """The same lists by the group's name."""
        self.local_first: list[int] = []
        """By token group: the first block that a local group still holds."""
        self.slide_at = 0
        """The next position at which some local group drops a block."""
        self.states: list[State | None] = []
        """By state group: the state at `computed`, with one reference; None: the zero state of position 0."""
        self.tail: Checkpoint | None = None
        """The checkpoint inside a block that the lease resumes from, until its tail has been copied."""
        self.copied: list[tuple[int, int]] = []
        """(token group, page) from which unpublished blocks were copied. If such a page is invalid, so is the copy."""
        self.slabs: set[Slab] = set()
        """The slabs of the pages that the lease itself owns, and of its states."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the page tables, the same in every group."""
        for table in self.named_tables.values():
            return len(table)
        return 0
