# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Turns the numbers of a decoding step into those of the step that follows it, without the host: one small kernel.

A row goes on with the token it has drawn, one position further, in the same pages and with its states in place. It
becomes padding if the token ends it, if it is bad (-1), or if the row may not go on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybridkv.kernels.decode.tables import StepNumbers
from hybridkv.kernels.decode.tiles import pow2
from hybridkv.kernels.spans import PADDED


def advance(numbers: StepNumbers, drawn: Tensor) -> None:
    """drawn: [B], the token that each row has drawn."""
    size = len(numbers.places)
    num_states, state_stride = len(numbers.src), numbers.src.stride(0)
    _advance_kernel[(1,)](
        *(drawn, *numbers, size, state_stride, num_states, PADDED),
        most_ends=numbers.ends.shape[1],
        block=pow2(size),
        num_warps=1,
    )


@triton.jit
def _advance_kernel(
    drawn, tokens, positions, shifts, seeds, next_seeds, places, left, ends, src, dst,
    size,
    state_stride,
    num_states,
    padded,
    most_ends: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, block)
    is_row = row < size
    token = tl.load(drawn + row, mask=is_row, other=-1)
    place = tl.load(places + row, mask=is_row, other=-1)
    steps_left = tl.load(left + row, mask=is_row, other=0)
    goes_on = (place != padded) & (token >= 0) & (steps_left > 0)
    for number in tl.static_range(most_ends):
        goes_on &= token != tl.load(ends + row * most_ends + number, mask=is_row, other=-1)
    place = tl.where(goes_on, place + 1, padded)
    position = tl.where(goes_on, place, 0).to(tl.int64)
    tl.store(tokens + row, tl.where(goes_on, token, 0), mask=is_row)
    tl.store(positions + row, position, mask=is_row)
    tl.store(shifts + row, tl.where(goes_on, position - row, 0), mask=is_row)
    tl.store(seeds + row, tl.load(next_seeds + row, mask=is_row, other=0), mask=is_row)
    tl.store(places + row, place, mask=is_row)
    tl.store(left + row, steps_left - 1, mask=is_row)
    for _ in range(num_states):
        page = tl.where(goes_on, tl.load(dst + row, mask=is_row, other=0), padded)
        tl.store(src + row, page, mask=is_row)
        tl.store(dst + row, page, mask=is_row)
        src += state_stride
        dst += state_stride
