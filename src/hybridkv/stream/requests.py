"""What a caller says of one of its requests. Plain data: it may come from another process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hybridkv.cache import Kind


class PageRequest(NamedTuple):
    """Where the tokens from `start` up to `end` of a request lie, or are to lie."""

    start: int
    end: int
    blocks: Mapping[str, Sequence[int]]
    """By token group: the page of each block of the request, from its first block on. The null page: it has none."""
    states: Mapping[str, Mapping[int, Sequence[int]]]
    """By state group and position: the pages of the state there. A load needs those at `end`."""


class Progress(NamedTuple):
    """How far a step takes a request, and where others may resume it."""

    start: int
    end: int
    prompt_tokens: int
    breakpoints: Collection[int] = ()
    """Where the request itself says that others resume."""
    checkpoints: Mapping[int, Kind] = {}
    """Where the cache wants checkpoints, and why."""
