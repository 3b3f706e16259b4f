"""The tables of one step: which pages a request reads and writes."""

from __future__ import annotations

import json
from typing import NamedTuple

from hybridkv.cache.arena.pages import Pages, make_pages


class Segment(NamedTuple):
    """A run of a request's tokens in one step: the scan reads the state from `src` and writes it to `dst`.

    If both are equal, the state is written in place. The null page as `src` is a zero state. A state that is split into
    several pages lists them all.
    """

    start: int
    end: int
    src: tuple[int, ...]
    dst: tuple[int, ...]


class Loaded(NamedTuple):
    """Pages that the caller fills before the step computes the rest: blocks, and one state per state group."""

    start: int
    """Position of the request before the step. Tokens from here up to the step's `start` are loaded."""
    states: dict[str, tuple[int, ...]]
    """By state group: the pages of the state at the step's start."""
    copied: dict[str, list[int]]
    """By token group: numbers of the blocks that the cache itself fills, by copies from its index. Do not load them."""


class StepTables(NamedTuple):
    """Everything a step needs to know of one request. Positions are explicit; nothing is inferred from shapes."""

    start: int
    end: int
    block_tokens: int
    tables: dict[str, Pages]
    """By token group: the page of each block, at least up to `end`. The null page: a block that is no longer seen."""
    segments: dict[str, list[Segment]]
    """By state group: the segments of the step, in order."""
    loaded: Loaded | None = None
    """The pages of tokens before `start` that the caller fills, if any."""

    def following(self) -> StepTables:
        """The tables of a step of one more token that takes no page and writes states in place."""
        start, end = self.end, self.end + 1
        segments = {name: [Segment(start, end, parts[-1].dst, parts[-1].dst)] for name, parts in self.segments.items()}
        return StepTables(start, end, self.block_tokens, self.tables, segments)

    def encode(self) -> bytes:
        """Encode as JSON, for another process."""
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
            loaded = Loaded(loaded[0], {group: tuple(pages) for group, pages in loaded[1].items()}, loaded[2])
        return cls(raw["start"], raw["end"], raw["block_tokens"], tables, segments, loaded)
