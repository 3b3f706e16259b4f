"""Which objects of a request are stored: full stretches of blocks, and what other requests need at resume points."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.cache import Kind
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.requests import Progress


class DumpPoint(NamedTuple):
    """A position at which objects end: a block boundary, or the end of a reply."""

    end: int
    resumes: bool
    """Requests may resume here, so states are stored too. False: only a full stretch of blocks ends here."""


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
        ends = set(points)
        if catalogue.token_groups or progress.has_taps:
            ends.update(catalogue.stretch_ends(progress.start, progress.end))
        return [DumpPoint(end, end in points) for end in sorted(ends)]

    def of_reply(self, num_tokens: int) -> list[DumpPoint]:
        """The end of a complete reply, to the token: the next turn resumes there."""
        return [DumpPoint(num_tokens, True)] if num_tokens >= self._catalogue.block_tokens else []

    def _resume_points(self, progress: Progress) -> set[int]:
        """Positions where requests may resume: ends of prompts, breakpoints, branches, grid checkpoints.

        Grid checkpoints are stored only at multiples of `grid_tokens`, those that fill idle memory not at all.
        """
        size, grid = self._catalogue.block_tokens, self._catalogue.grid_tokens
        points = {(progress.prompt_tokens - 1) // size * size}
        points |= {point // size * size for point in progress.breakpoints}
        wanted = {p: kind for p, kind in progress.checkpoints.items() if kind is not Kind.FILL}
        points |= {p for p, kind in wanted.items() if kind is not Kind.GRID or p % grid == 0}
        return {point for point in points if progress.start < point <= progress.end}
