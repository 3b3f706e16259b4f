"""What kernels of a decoding step know of its rows: tensors on the device, at addresses that stay the same.

A row is one request's one token. A step has B rows, some of which may be padding: kernels skip them, and write zeros
as their result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hybridkv.sight import Sight


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """Where the tokens of one token group lie."""

    positions: Tensor
    """[B], int32: the position of each row's token, so that it may see `positions + 1` tokens; -1 for padding."""
    pages: Tensor
    """int32, flat: row `b` has its page of block `i` at `origin + b * width + i`. Unseen blocks may be anything."""
    shape: Tensor
    """[2], int32: `width`, how many blocks each row has in `pages`, and `origin`. They change from step to step."""
    block_tokens: int
    sight: Sight


@dataclass(frozen=True, slots=True)
class DecodeStates:
    """Which page each row's state is read from, and which it is written to. Both may be the same."""

    src: Tensor
    """[B], int32; -1 for padding. The null page, 0, is a zero state."""
    dst: Tensor
    """[B], int32; -1 for padding."""


class StepNumbers(NamedTuple):
    """Numbers of a decoding step of B rows that the next step changes. Each is `[B]`, unless it says otherwise."""

    tokens: Tensor
    positions: Tensor
    shifts: Tensor
    """Position minus index of the row."""
    seeds: Tensor
    next_seeds: Tensor
    places: Tensor
    """int32: the position, or -1 for padding."""
    left: Tensor
    """int32: steps that may follow."""
    ends: Tensor
    """int32, `[B, E]`: tokens that end the row; -1 for none."""
    src: Tensor
    """int32, `[states, B]`"""
    dst: Tensor
