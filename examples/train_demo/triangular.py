"""The one kernel that torch has no fast form of: many small triangular inverses at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _invert(lower_ptr, out_ptr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """One matrix a program. Row i of the inverse is e_i minus row i of `lower` times the rows above."""
    base = tl.program_id(0).to(tl.int64) * size * size
    rows, columns = tl.arange(0, size), tl.arange(0, size)
    at = base + rows[:, None] * size + columns[None, :]
    lower_by_column = tl.load(lower_ptr + base + columns[None, :] * size + rows[:, None])  # [k, i] = lower[i, k]
    found = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0)
    for i in range(1, size):
        weights = tl.sum(tl.where(columns[None, :] == i, lower_by_column, 0.0), axis=1)  # lower[i, :]
        row = tl.sum(weights[:, None] * tl.where(rows[:, None] < i, found, 0.0), axis=0)
        found = tl.where(rows[:, None] == i, found - row[None, :], found)
    tl.store(out_ptr + at, found)


def invert_unit_lower_cuda(lower: torch.Tensor) -> torch.Tensor:
    """(1 + lower)^-1 for contiguous float32 [..., C, C]."""
    lower = lower.contiguous()
    out = torch.empty_like(lower)
    side = lower.shape[-1]
    _invert[(lower.numel() // side**2,)](lower, out, size=side, num_warps=4)
    return out
