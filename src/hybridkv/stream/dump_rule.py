"""What of a request is worth storing: whole stretches of blocks, and what it takes to resume where others may."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.cache import Kind
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.requests import Progress


class DumpPoint(NamedTuple):
    """A whole block's end at which objects end."""

    end: int
    resumes: bool
    """Others may resume here: the states are stored too. False: a stretch of blocks is full, and that is all."""


class DumpRule:
    """Says where objects of a request end. It knows no pages."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def of_step(self, progress: Progress) -> list[DumpPoint]:
        """Ends of objects whose last tokens this step computes, in order."""
        catalogue = self._catalogue
        if progress.start // catalogue.block_tokens == progress.end // catalogue.block_tokens:
            return []  # no block ends here
        points = self._resume_points(progress)
        ends = set(points)
        if catalogue.token_groups:
            ends.update(catalogue.stretch_ends(progress.start, progress.end))
        return [DumpPoint(end, end in points) for end in sorted(ends)]

    def of_reply(self, num_tokens: int) -> list[DumpPoint]:
        """The last whole block of a complete reply, on models that can resume at every block."""
        end = num_tokens // self._catalogue.block_tokens * self._catalogue.block_tokens
        return [DumpPoint(end, True)] if end and not self._catalogue.state_groups else []

    def _resume_points(self, progress: Progress) -> set[int]:
        """Where requests may resume: ends of prompts, breakpoints, branches.

        On a grid, only where its states take a quarter of the bytes of the KV between them.
        """
        size, grid = self._catalogue.block_tokens, self._catalogue.grid_tokens
        points = {(progress.prompt_tokens - 1) // size * size}
        points |= {point // size * size for point in progress.breakpoints}
        points |= {p for p, kind in progress.checkpoints.items() if kind is not Kind.GRID or p % grid == 0}
        return {point for point in points if progress.start < point <= progress.end}
