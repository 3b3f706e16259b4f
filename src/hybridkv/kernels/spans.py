"""One request's part of a packed step."""

from __future__ import annotations

from typing import NamedTuple

PADDED = -1
"""In place of a page: the span is padding. Nothing is read or written for it, and its rows of every result are zero."""


class Span(NamedTuple):
    """One request's tokens in a packed step."""

    row: int
    """Where they begin in the packed row."""
    start: int
    """Position of the first of them in the request."""
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start
