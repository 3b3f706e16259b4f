"""The pages that one running request holds. `placement`, `sending` and `steps` change them, `compaction` moves them."""

from __future__ import annotations

from hybridkv.cache.arena.pages import Pages
from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.index.tree import Checkpoint, State


class LeasePages:
    """Page tables and states. Blocks up to the end of the lease's leaf belong to nodes, later ones to the lease."""

    __slots__ = ("copied", "local_first", "named_tables", "slabs", "slide_at", "states", "tables", "tail")

    def __init__(self) -> None:
        self.tables: list[Pages | None] = []
        """By token group: a page a block; None for taps the request did not ask for."""
        self.named_tables: dict[str, Pages] = {}
        """The same lists by the group's name."""
        self.local_first: list[int] = []
        """By token group: the first block a local group still holds."""
        self.slide_at = 0
        """The position at which some local group next lets go of a block."""
        self.states: list[State | None] = []
        """By state group: the state at `computed`, one hold each; None: the zero state of position 0."""
        self.tail: Checkpoint | None = None
        """The checkpoint inside a block that the lease resumes from, until its tail has been copied."""
        self.copied: list[tuple[int, int]] = []
        """(token group, page) that the block begun was copied from: if that turns out bad, so is the copy."""
        self.slabs: set[Slab] = set()
        """The slabs of the pages that are the lease's own, and of its states."""

    @property
    def num_blocks(self) -> int:
        """Blocks that have pages, in every group the lease uses."""
        for table in self.named_tables.values():
            return len(table)
        return 0
