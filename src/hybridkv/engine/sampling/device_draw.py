"""Draws tokens on a GPU without the host: no synchronization and no shapes that depend on data. Knows no requests.

The rules are those of `Sampler` and `filters`. Random numbers are a function of a row's seed and the token alone, so a
draw does not depend on other rows, and a step that runs as a CUDA graph draws what it draws without.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridkv.engine.sampling.params import SamplingParams

_WORDS = 5
"""32-bit words of one row's parameters."""
_NARROW_PASSES = 4
"""How often `find_bounds` narrows where the bounds are. Rows that have few candidates earlier skip the rest."""
_THRESHOLDS = 8
"""Sums of one pass; a power of two. Each pass but the first narrows by a factor of one more."""
_CHUNK_TOKENS = 2048
"""At most 2048, because of how `narrow_kernel` sums."""
_PART_CHUNKS = 4
_PART_WARPS = 4
"""One program reads a part of a row, chunk by chunk."""
_CANDIDATES = 4096
"""At most so many logits of a row are bisected in registers; a row with more is read once for each bit left."""
_BLOCK_TOKENS = 4096
_BOUND_WARPS = 8
_LANES = 1024
"""Counters of the random generator in one part of a row. The numbers of a seed depend on it: do not change it."""


class Draw(NamedTuple):
    """How one row's token is chosen."""

    temperature: float
    """0: the likeliest token."""
    top_k: int
    """0: all."""
    top_p: float
    seed: int
    """64 bits."""


GREEDY = Draw(0.0, 0, 1.0, 0)


class PlainParams(NamedTuple):
    """The parameters of plain rows, on the device."""

    temperature: Tensor
    """[B], float32; 0: greedy."""
    top_k: Tensor
    """[B], int32; 0: all."""
    top_p: Tensor
    """[B], float32; 1: all."""
    seed: Tensor
    """[B], int64: the 64 bits of each row's draw."""

    @classmethod
    def over(cls, packed: Tensor) -> PlainParams:
        """Views of parameters that `pack` has packed, wherever they have been copied to."""
        # packed: [5 * B], int32
        num_rows = len(packed) // _WORDS
        seed, temperature, top_k, top_p = packed.split([2 * num_rows, num_rows, num_rows, num_rows])
        return cls(temperature.view(torch.float32), top_k, top_p.view(torch.float32), seed.view(torch.int64))


def pack(params: Sequence[SamplingParams], seeds: Sequence[int] | npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """The parameters of rows in one array, to be copied to the device at once. `seeds`: 64 bits for each row."""
    temperature = np.array([0 if p.greedy else p.temperature for p in params], dtype=np.float32)
    top_k = np.array([max(p.top_k, 0) for p in params], dtype=np.int32)
    top_p = np.array([p.top_p for p in params], dtype=np.float32)
    words = (np.array(seeds, dtype=np.uint64), temperature, top_k, top_p)
    return np.concatenate([one.view(np.int32) for one in words])


def are_drawn(params: Sequence[SamplingParams]) -> bool:
    """Whether some row is not greedy."""
    return any(not p.greedy for p in params)


def are_filtered(params: Sequence[SamplingParams]) -> bool:
    """Whether some row that is not greedy has top-k or top-p."""
    return any(not p.greedy and (p.top_k > 0 or p.top_p < 1) for p in params)


def is_available(device: torch.device) -> bool:
    """Whether draws of this device are made here."""
    return device.type == "cuda" and find_spec("triton") is not None


def draw_plain(logits: Tensor, params: PlainParams, *, filtered: bool, drawn: bool) -> Tensor:
    """One token for each row; -1 where the maximum of its logits is NaN or infinite.

    filtered: some rows may have top-k or top-p. drawn: some rows may have a temperature. A row's token does not depend
    on these flags, as long as they are not False where they must be True.
    """
    # logits: [B, V] -> [B]
    top, tokens = logits.max(dim=-1)
    if not drawn or not len(logits):
        return tokens.masked_fill_(~top.isfinite(), -1)
    from hybridkv.engine.sampling import draw_kernels as kernels

    num_rows, vocab_size = logits.shape
    logits, top = logits if logits.stride(1) == 1 else logits.contiguous(), top.float()
    row = (logits, logits.stride(0), vocab_size, top, params.temperature)
    bounds = find_bounds(logits, top, params) if filtered else top  # not read without filters
    num_parts = -(-vocab_size // (4 * _LANES))
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    winners = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    kernels.race_kernel[(num_rows, num_parts)](
        *row, params.seed, bounds, best, winners, FILTERED=filtered, LANES=_LANES, num_warps=4
    )
    parts = _power_of_two(num_parts)
    kernels.finish_kernel[(num_rows,)](
        top, params.temperature, best, winners, tokens, num_parts, PARTS=parts, num_warps=1
    )
    return tokens


def find_bounds(logits: Tensor, top: Tensor, params: PlainParams) -> Tensor:
    """The bits of the largest gap that each row keeps."""
    # logits: [B, V], top: [B], float32 -> [B], int32
    from hybridkv.engine.sampling import bound_kernels as kernels

    num_rows, vocab_size = logits.shape
    zeros = torch.zeros(num_rows * (_NARROW_PASSES * 2 * _THRESHOLDS + 1), dtype=torch.int64, device=logits.device)
    sums, cursors = zeros[:-num_rows], zeros[-num_rows:]
    candidates = logits.new_empty(num_rows, _CANDIDATES)
    bounds = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    row = (logits, logits.stride(0), vocab_size, top, params.temperature, params.top_k, params.top_p, sums)
    sizes = {"PASSES": _NARROW_PASSES, "THRESHOLDS": _THRESHOLDS, "CANDIDATES": _CANDIDATES}
    part = {"CHUNK": min(_CHUNK_TOKENS, _power_of_two(vocab_size)), "CHUNKS": _PART_CHUNKS}
    parts = (num_rows, -(-vocab_size // (part["CHUNK"] * _PART_CHUNKS)))
    for number in range(_NARROW_PASSES):
        kernels.narrow_kernel[parts](*row, PASS=number, **sizes, **part, num_warps=_PART_WARPS)
    kernels.gather_kernel[parts](*row, cursors, candidates, **sizes, **part, num_warps=_PART_WARPS)
    block = min(_BLOCK_TOKENS, _power_of_two(vocab_size))
    kernels.bound_kernel[(num_rows,)](*row, candidates, bounds, **sizes, BLOCK=block, num_warps=_BOUND_WARPS)
    return bounds


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
