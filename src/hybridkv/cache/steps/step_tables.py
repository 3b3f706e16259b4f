"""The tables of one step: which pages a request reads and writes."""

from __future__ import annotations

import json
from typing import NamedTuple

from hybridkv.cache.arena.pages import Pages, make_pages


class Segment(NamedTuple):
    """A run of a request's tokens in one step: the scan reads the state from src and writes it to dst.

    Equal pages: in place. The null page as src: a zero state. A state cut into several pages names them all.
    """

    start: int
    end: int
    src: tuple[int, ...]
    dst: tuple[int, ...]


class Loaded(NamedTuple):
    """What others put into a request's pages before its step computes the rest: blocks, and a state a group."""

    start: int
    """Where the request stood. It is loaded up to the step's own start."""
    states: dict[str, tuple[int, ...]]
    """By state group: the pages of the state at the step's start."""


class StepTables(NamedTuple):
    """Everything a step needs to know of one request: positions are explicit, nothing is inferred from shapes."""

    start: int
    end: int
    block_tokens: int
    tables: dict[str, Pages]
    """By token group: the page of each block, at least up to `end`. The null page: a block it no longer sees."""
    segments: dict[str, list[Segment]]
    """By state group: the step's tokens in order."""
    loaded: Loaded | None = None
    """The tokens before `start` whose pages are filled from elsewhere, if there are such."""

    def encode(self) -> bytes:
        """For another process."""
        tables = {group: list(pages) for group, pages in self.tables.items()}
        return json.dumps({**self._asdict(), "tables": tables}).encode()

    @classmethod
    def decode(cls, data: bytes) -> StepTables:
        raw = json.loads(data)
        segments = {
            group: [Segment(start, end, tuple(src), tuple(dst)) for start, end, src, dst in rows]
            for group, rows in raw["segments"].items()
        }
        tables = {group: make_pages(pages) for group, pages in raw["tables"].items()}
        loaded = raw["loaded"]
        if loaded is not None:
            loaded = Loaded(loaded[0], {group: tuple(pages) for group, pages in loaded[1].items()})
        return cls(raw["start"], raw["end"], raw["block_tokens"], tables, segments, loaded)
