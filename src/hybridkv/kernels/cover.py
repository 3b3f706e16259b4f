"""How the spans of one token group are cut into batched attention calls: buckets and tiles. Host only, no tensors.

Short spans (decoding, drafts) of one length are batched in buckets, padded to the longest of the bucket. Long spans are
cut into tiles of queries; each tile sees only the keys that its window, its chunk and causality leave it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.kernels.spans import Span
from hybridkv.sight import Sight

SHORT_TOKENS = 8
"""Spans up to this long are batched with others of their length."""
TILE_TOKENS = 512
"""Queries of a long span that one call takes: bounds the mask, and what a window does not see is not multiplied."""
TILE_TOKENS_CPU = 128
"""On a CPU calls cost little, and torch's kernel multiplies each query with the next 512 keys, hidden or not: cut into
tiles, causal attention of 300 to 1,000 tokens takes 10 to 30% less."""
FREE_PADDING_TOKENS = 256
"""Padding that costs less than one more call."""
PADDING_SHARE = 4
"""Beyond that, at most one padded token in so many."""
BUCKET_TOKENS_CPU = 2048
"""Tokens gathered at once for each thread, so that they are still in its cache when they are used."""


class Visible(NamedTuple):
    """What one span sees: the tokens from `first` on, in the blocks from `first_block` on."""

    span: Span
    first: int
    first_block: int
    end_block: int

    @property
    def num_tokens(self) -> int:
        return self.span.end - self.first

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block


class Tile(NamedTuple):
    """Queries [start, end) of a span against the keys [first, end): positions of the request."""

    start: int
    end: int
    first: int


def see(span: Span, sight: Sight, block_tokens: int) -> Visible:
    first = sight.first_visible(span.start)
    return Visible(span, first, first // block_tokens, -(-span.end // block_tokens))


def cut_tiles(span: Span, sight: Sight, *, on_cpu: bool) -> list[Tile]:
    """A span's tiles. None crosses a chunk: so inside a tile the mask depends on key minus query only."""
    tiles, start = [], span.start
    num_queries = TILE_TOKENS_CPU if on_cpu else TILE_TOKENS
    if sight.window is not None:  # narrow windows want narrow tiles: a query is multiplied with all its tile sees
        num_queries = max(num_queries // 4, min(sight.window, num_queries))
    while start < span.end:
        end = min(span.end, start + num_queries)
        if sight.chunk is not None:
            end = min(end, sight.next_slide(start, block_tokens=1))
        tiles.append(Tile(start, end, sight.first_visible(start)))
        start = end
    return tiles


def is_square(span: Span, sight: Sight) -> bool:
    """All keys a span sees are its own, and causality is all that hides them: no mask and no tiles are needed."""
    return span.start == 0 and sight.first_visible(span.end - 1) == 0


def fill_buckets(visibles: Sequence[Visible], block_tokens: int, bucket_tokens: int | None) -> list[list[int]]:
    """Short spans by bucket, as indices in row order. Padding stays below a quarter, or what a call costs.

    Buckets of more than one span gather at most `bucket_tokens`.
    """
    lengths: dict[int, list[int]] = {}
    for index, visible in enumerate(visibles):
        if visible.span.length <= SHORT_TOKENS:
            lengths.setdefault(visible.span.length, []).append(index)
    return [bucket for same in lengths.values() for bucket in _split(same, visibles, block_tokens, bucket_tokens)]


def _split(
    indices: list[int], visibles: Sequence[Visible], block_tokens: int, bucket_tokens: int | None
) -> list[list[int]]:
    free = FREE_PADDING_TOKENS // block_tokens
    room = sys.maxsize if bucket_tokens is None else bucket_tokens // block_tokens
    buckets: list[list[int]] = [[]]
    longest = padding = 0
    for index in sorted(indices, key=lambda i: -visibles[i].num_blocks):
        num_blocks, num_members = visibles[index].num_blocks, len(buckets[-1])
        padding += longest - num_blocks
        if padding > max(free, longest * num_members // PADDING_SHARE) or longest * (num_members + 1) > room:
            buckets.append([])
        if not buckets[-1]:
            longest, padding = num_blocks, 0
        buckets[-1].append(index)
    return [sorted(bucket) for bucket in buckets]
