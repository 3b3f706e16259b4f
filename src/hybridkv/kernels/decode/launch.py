"""How the attention kernels of a decoding step are launched: pure functions of shapes, and of nothing on the device."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from hybridkv.sight import Sight

MAX_SPLITS = 256
_CPU_PROCESSORS = 2
"""For Triton's interpreter, which runs programs one after another: few splits."""
_PROGRAMS_PER_PROCESSOR = 2
_BLOCK_BYTES = 32 * 1024
"""Keys and values that a program loads at a time."""
_LOADED_BYTES = 96 * 1024
"""Keys and values on their way to one program: two such programs fit in the memory of a Hopper processor."""
_MAX_BLOCK_TOKENS = 128
_MIN_TILE = 16
"""Matrix units take no fewer rows and columns."""
_MAX_BLOCK_HEADS = 64
_GOOD_ENOUGH = 0.9
"""Share of the best possible use of the processors at which no further splits are tried."""
_LONG_TOKENS, _LONG_SPLITS, _LONG_SHARE = 8192, 16, 2048
"""Rows that may see more than `_LONG_TOKENS` are split though all processors are busy, lest one row is the last. Such
splits are at most `_LONG_SPLITS`, and none has less than `_LONG_SHARE` tokens: rows of equal length lose nothing."""


class Launch(NamedTuple):
    """One launch of the attention kernel."""

    block_tokens: int
    """Tokens that a program loads at a time."""
    block_heads: int
    """Query heads of one KV head that a program computes."""
    splits: int
    """Programs that share the visible tokens of a row, at most. Their results are merged by a second kernel."""
    min_share: int
    """Tokens of a split, at least: shorter rows have fewer splits."""
    num_warps: int
    num_stages: int


class Shape(NamedTuple):
    num_rows: int
    num_heads: int
    num_folded: int
    """Query heads of each KV head."""
    tiles: tuple[int, ...]
    """Elements that are loaded of each token: of its key, and of its value if that is another."""
    element_bytes: int


def choose_launch(shape: Shape, bound: int, num_processors: int) -> Launch:
    """bound: tokens that a row may see, at most."""
    token_bytes = sum(shape.tiles) * shape.element_bytes
    # Keys in two parts have a small second one: it does not count here.
    large_bytes = sum(tile for tile in shape.tiles if tile >= max(shape.tiles) // 4) * shape.element_bytes
    block_tokens = max(_MIN_TILE, min(_MAX_BLOCK_TOKENS, tile_size(_BLOCK_BYTES // large_bytes + 1) // 2))
    # No matrix unit computes in float32: what it would keep is in registers instead.
    max_heads = _MAX_BLOCK_HEADS if shape.element_bytes < 4 else _MIN_TILE
    block_heads = max(_MIN_TILE, min(max_heads, tile_size(shape.num_folded)))
    num_programs = max(1, shape.num_rows * shape.num_heads * -(-shape.num_folded // block_heads))
    splits = choose_splits(num_programs, num_processors, -(-bound // block_tokens))
    min_share = block_tokens
    if splits == 1:
        splits = 1 if bound <= _LONG_TOKENS else min(-(-bound // _LONG_SHARE), _LONG_SPLITS)
        min_share = _LONG_SHARE
    widest = max(shape.tiles)
    return Launch(
        block_tokens=block_tokens,
        block_heads=block_heads,
        splits=splits,
        min_share=min_share,
        num_warps=8 if widest * shape.element_bytes >= 1024 or block_heads * widest >= 64 * 256 else 4,
        num_stages=max(2, min(4, 1 + _LOADED_BYTES // (block_tokens * token_bytes))),
    )


def choose_splits(num_programs: int, num_processors: int, num_blocks: int) -> int:
    """The fewest programs for each row that keep almost all processors busy until the end.

    num_programs: without splits; num_blocks: blocks of tokens that a row may see, at most.
    """
    places = num_processors * _PROGRAMS_PER_PROCESSOR
    most = max(1, min(num_blocks, MAX_SPLITS, -(-2 * places // num_programs)))
    used = [num_programs * splits / (-(-num_programs * splits // places) * places) for splits in range(1, most + 1)]
    return next(splits for splits, share in enumerate(used, 1) if share >= _GOOD_ENOUGH * max(used))


def token_bound(sight: Sight, num_slots: int) -> int:
    """Tokens that one row may see, at most. num_slots: those of its page table."""
    return min(num_slots, sight.window or sight.chunk or num_slots)


def tile_size(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


def padded(dim: int) -> int:
    """The width of a tile that holds `dim` elements, and that matrix units take."""
    return max(_MIN_TILE, tile_size(dim))


def num_processors(device: torch.device) -> int:
    return _processors_of(device) if device.type == "cuda" else _CPU_PROCESSORS


@cache
def _processors_of(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
