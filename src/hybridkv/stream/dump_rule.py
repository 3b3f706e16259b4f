"""Which objects of a request are stored: full stretches of blocks, and what other requests need at resume points."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.cache import Kind
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.requests import Progress

_SPARE_STRETCHES = 16
"""Stretches (4,096 tokens) between checkpoints of the grid in idle memory that also fill idle room of a store: to copy
a state takes some percent of the prefill of 512 tokens (docs/performance.md)."""


class DumpPoint(NamedTuple):
    """A position at which objects end: a block boundary, or the end of a reply."""

    end: int
    resumes: bool
    """Requests may resume here, so states are stored too. False: only a full stretch of blocks ends here."""
    is_spare: bool = False
    """What is stored only to resume here fills idle room of the store."""


class DumpRule:
    """Decides where objects of a request end. It knows no pages."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def of_step(self, progress: Progress) -> list[DumpPoint]:
        """Ends of objects whose last tokens this step computes, in order."""
        catalogue = self._catalogue
        if progress.start // catalogue.block_tokens == progress.end // catalogue.block_tokens:
            return []  # no block ends here
        points = self._resume_points(progress)
        spare = self._spare_points(progress) - points
        ends = points | spare
        if catalogue.token_groups or progress.has_taps:
            ends.update(catalogue.stretch_ends(progress.start, progress.end))
        return [DumpPoint(end, end in points or end in spare, end in spare) for end in sorted(ends)]

    def of_reply(self, num_tokens: int) -> list[DumpPoint]:
        """The end of a complete reply, to the token: the next turn resumes there."""
        return [DumpPoint(num_tokens, True)] if num_tokens >= self._catalogue.block_tokens else []

    def _resume_points(self, progress: Progress) -> set[int]:
        """Positions where requests may resume: the prompt's end, breakpoints, and all checkpoints but spare ones."""
        size = self._catalogue.block_tokens
        points = {(progress.prompt_tokens - 1) // size * size}
        points |= {point // size * size for point in progress.breakpoints}
        points |= {point for point, kind in progress.checkpoints.items() if kind is not Kind.FILL}
        return {point for point in points if progress.start < point <= progress.end}

    def _spare_points(self, progress: Progress) -> set[int]:
        """Checkpoints that fill idle memory: likely places, which are seldom the ends of stretches, and a sparse grid.

        Models without states need none: their stretches suffice. A checkpoint at the end of a step is kept a block
        before it, and counts as one at the end.
        """
        catalogue = self._catalogue
        if not catalogue.state_groups:
            return set()
        apart = _SPARE_STRETCHES * catalogue.stretch_blocks * catalogue.block_tokens
        places = {point: point for point, kind in progress.checkpoints.items() if kind is Kind.FILL}
        before = progress.end - catalogue.block_tokens
        if before in places and progress.end in places:
            places[before] = progress.end
        wanted = {point for point, at in places.items() if not catalogue.ends_stretch(at) or at % apart == 0}
        return {point for point in wanted if progress.start < point <= progress.end}
