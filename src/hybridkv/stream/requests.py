"""Descriptions of requests by their caller. Plain data, which may come from another process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hybridkv.cache import Kind


class PageRequest(NamedTuple):
    """Pages of a request's tokens from `start` up to `end`, to load into or to dump from."""

    start: int
    end: int
    blocks: Mapping[str, Sequence[int]]
    """By token group: the page of each block of the request, from its first block on. The null page: no page."""
    states: Mapping[str, Mapping[int, Sequence[int]]]
    """By state group and position: the pages of the state there. A load needs those at `end`."""
    filled: Mapping[str, Collection[int]] = {}
    """By token group: blocks whose pages need no load."""


class Progress(NamedTuple):
    """Tokens that a step computes for a request, and positions where other requests may resume."""

    start: int
    end: int
    prompt_tokens: int
    breakpoints: Collection[int] = ()
    """Resume points given by the request."""
    checkpoints: Mapping[int, Kind] = {}
    """Positions where the cache wants checkpoints, and their kinds."""
    has_taps: bool = False
    """Whether hidden states of its tokens are kept."""
