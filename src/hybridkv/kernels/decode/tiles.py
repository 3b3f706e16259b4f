"""How a kernel over states is cut into programs: a small pure function of shapes, since nothing is tuned at run time.

A program holds a tile of one state in registers: all of one axis, over which it sums, and a block of the other.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_WARPS = 8
FULL_WARPS = 4
"""Warps of a program, where there are programs enough."""
MIN_PROGRAMS = 1024
"""Fewer leave multiprocessors of a large GPU idle: tiles become smaller then."""
WARP_THREADS = 32


class Tile(NamedTuple):
    block: int
    """Entries of the axis that is cut, a power of two."""
    num_warps: int
    num_stages: int = 1
    policy: str = "evict_first"
    """`eviction_policy` of states: a step reads each once, and together they are larger than a GPU's cache."""


def pow2(size: int) -> int:
    """The least power of two that is not below."""
    return 1 << (size - 1).bit_length()


def num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def choose(states: int, whole: int, cut: int, *, least: int = 4, per_thread: int = 32) -> Tile:
    """A tile for so many states of [whole, cut] entries, with about `per_thread` entries a thread.

    `least`: the smallest block, so that what is adjacent in memory is read together.
    """
    whole = pow2(whole)
    block = max(least, min(pow2(cut), FULL_WARPS * WARP_THREADS * per_thread // whole))
    while (
        states * num_blocks(cut, block) < MIN_PROGRAMS and block > least and whole * block > WARP_THREADS * per_thread
    ):
        block //= 2
    num_warps = pow2(num_blocks(whole * block, WARP_THREADS * per_thread))
    return Tile(block, min(num_warps, MAX_WARPS))
