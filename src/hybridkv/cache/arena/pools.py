"""Slabs and the pools that own them: their free pages, and the holders of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from hybridkv.cache.arena.pages import MANY_PAGES, NULL_PAGE, Pages, as_numbers, make_pages


class PageHolder(Protocol):
    """An object that holds pages. A slab lists its holders, so that they can be updated when its pages move."""

    slabs: set[Slab]
    """The slabs that contain its pages; may also contain slabs that its pages have left."""


class Slab:
    """A slab as one pool sees it. Another pool that gets the same memory has its own object."""

    __slots__ = ("_prune_at", "free", "free_class", "holders", "index", "is_owned", "limbo", "pool")

    def __init__(self, index: int, pool: Pool) -> None:
        first = index * pool.pages_per_slab
        self.index = index
        self.pool = pool
        self.free = make_pages(range(first + pool.pages_per_slab - 1, first - 1, -1))
        self.free_class = 0
        self.is_owned = False
        """Whether its pool owns it now."""
        self.limbo = 0  # pages that were given back but wait for an unacknowledged operation
        self.holders: dict[PageHolder, None] = {}
        self._prune_at = 16

    @property
    def num_used(self) -> int:
        """Number of pages that are not free: held, or waiting for an operation."""
        return self.pool.pages_per_slab - len(self.free)

    def used_pages(self) -> Pages:
        first = self.index * self.pool.pages_per_slab
        free = set(self.free)
        return make_pages(page for page in range(first, first + self.pool.pages_per_slab) if page not in free)

    def add_holder(self, holder: PageHolder) -> None:
        self.holders[holder] = None
        holder.slabs.add(self)
        if len(self.holders) > self._prune_at:  # remove those that hold no page here any more
            self.holders = {kept: None for kept in self.holders if self in kept.slabs}
            self._prune_at = 2 * len(self.holders) + 16


class Pool:
    """The slabs of pages of one size. Slabs with free pages are listed by their number, in powers of two."""

    __slots__ = (
        "_made",
        "by_free",
        "holds",
        "name",
        "num_free",
        "num_idle",
        "pages_per_slab",
        "returned",
        "slabs",
        "spare",
    )

    def __init__(self, name: str, pages_per_slab: int) -> None:
        self.name = name
        self.pages_per_slab = pages_per_slab
        self.num_free = 0
        """Number of free pages that are listed in their slabs."""
        self.returned = make_pages()
        """Pages that were given back and are not yet listed in their slabs: batches are cheaper."""
        self.spare: list[Slab] = []
        """Free slabs that this pool owned last. It reuses them first, because they need no zeroing."""
        self.slabs: dict[int, Slab] = {}
        self._made: dict[int, Slab] = {}
        """All slab objects of this pool, kept for reuse: slabs often change pools, and creating an object is slow."""
        self.by_free: list[dict[Slab, None]] = [{} for _ in range(pages_per_slab.bit_length() + 1)]
        self.holds = make_pages()
        """By page: references beyond the first; -1: the page is idle. Empty unless single pages are shared, as in
        local groups."""
        self.num_idle = 0
        """Number of pages without references that stay where they are until their room is needed."""

    def slab_of(self, page: int) -> Slab:
        return self.slabs[page // self.pages_per_slab]

    def get_slab(self, index: int) -> Slab:
        """The pool's object for a slab that is entirely free."""
        slab = self._made.get(index)
        if slab is None:
            slab = self._made[index] = Slab(index, self)
        return slab

    def file(self, slab: Slab) -> None:
        """Update the list entry of a slab after its number of free pages has changed."""
        self.by_free[slab.free_class].pop(slab, None)
        slab.free_class = len(slab.free).bit_length()
        if slab.free_class:
            self.by_free[slab.free_class][slab] = None

    def share_pages(self, num_slabs: int) -> None:
        """Allow pages to have several holders."""
        self.holds = make_pages((0,)) * (num_slabs * self.pages_per_slab)

    def add_holds(self, pages: Pages) -> None:
        """Add a reference to each of these pages, which must be distinct. Some may be idle."""
        holds = self.holds
        if len(pages) > MANY_PAGES:
            numbers, many = as_numbers(pages), as_numbers(holds)
            many[numbers] += 1
            if self.num_idle:
                self.num_idle -= len(numbers) - int(np.count_nonzero(many[numbers]))
            return
        for page in pages:
            left = holds[page] + 1
            holds[page] = left
            if not left:
                self.num_idle -= 1

    def let_idle(self, pages: Pages) -> bool:
        """Drop a reference to each of these pages. Those without references become idle; True if there are any."""
        holds, before = self.holds, self.num_idle
        if len(pages) > MANY_PAGES:
            numbers, many = as_numbers(pages), as_numbers(holds)
            many[numbers] -= 1
            self.num_idle += int(np.count_nonzero(many[numbers] < 0))
        else:
            for page in pages:
                left = holds[page] - 1
                holds[page] = left
                if left < 0:
                    self.num_idle += 1
        return self.num_idle > before

    def take_idle(self, pages: Pages, most: int) -> Pages:
        """Remove up to `most` idle pages from the end of `pages`, where null pages take their places. They are no
        longer idle; the caller frees them."""
        numbers, holds = as_numbers(pages), as_numbers(self.holds)
        places = np.flatnonzero(holds[numbers] < 0)[-most:]
        taken, found = make_pages(), numbers[places]
        taken.frombytes(found.tobytes())
        holds[found], numbers[places] = 0, NULL_PAGE
        self.num_idle -= len(taken)
        return taken

    def drop_holds(self, pages: Pages) -> Pages:
        """Drop a reference to each of these pages. Returns the pages without references."""
        if len(pages) > MANY_PAGES:
            return self._drop_many_holds(pages)
        holds, freed = self.holds, make_pages()
        for page in pages:
            if holds[page]:
                holds[page] -= 1
            else:
                freed.append(page)
        return pages if len(freed) == len(pages) else freed

    def _drop_many_holds(self, pages: Pages) -> Pages:
        numbers, holds = as_numbers(pages), as_numbers(self.holds)
        left = holds[numbers]
        if not left.any():
            return pages
        holds[numbers] = np.maximum(left - 1, 0)
        freed = make_pages()
        freed.frombytes(numbers[left == 0].tobytes())
        return freed

    def emptiest_first(self) -> Iterable[Slab]:
        for filed in reversed(self.by_free):
            yield from sorted(filed, key=lambda slab: -len(slab.free))
