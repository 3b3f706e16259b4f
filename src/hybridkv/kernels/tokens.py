"""Tokens in pages: the table of one token group for one packed step, writing a step's tokens, gathering what it sees.

Only pages of blocks that some query sees are read, and slots of them that none sees never reach a result: they may hold
anything, even what a failed request left there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from hybridkv.kernels.cover import BUCKET_TOKENS_CPU, Visible, cut_tiles, fill_buckets, is_square, see
from hybridkv.kernels.spans import Span
from hybridkv.kernels.table import Bucket, Ints, TiledSpan, TokenTable
from hybridkv.sight import Sight

__all__ = ["TokenTable", "gather_tokens", "make_token_table", "write_tokens"]


class _Freight:
    """Small host arrays on their way to the device in one transfer."""

    def __init__(self) -> None:
        self.parts: list[Ints] = []

    def add(self, *parts: Ints) -> None:
        self.parts += parts

    def send(self, device: torch.device) -> list[torch.Tensor]:
        whole = torch.from_numpy(np.concatenate(self.parts)).to(device)
        return list(whole.split([part.size for part in self.parts]))


def make_token_table(
    spans: Sequence[Span],
    tables: Sequence[array[int] | Sequence[int]],
    *,
    block_tokens: int,
    device: torch.device,
    sight: Sight,
) -> TokenTable:
    """The table of one group. `tables[i]` has span i's page of each block up to its end; 0 where no longer seen."""
    visibles = [see(span, sight, block_tokens) for span in spans]
    host_pages = [_visible_pages(table, visible) for table, visible in zip(tables, visibles, strict=True)]
    bucket_tokens = BUCKET_TOKENS_CPU * torch.get_num_threads() if device.type == "cpu" else None
    buckets = fill_buckets(visibles, block_tokens, bucket_tokens)
    short = {index for bucket in buckets for index in bucket}
    long = [index for index in range(len(spans)) if index not in short]

    freight = _Freight()
    freight.add(*_write_slots(visibles, host_pages, block_tokens))
    for members in buckets:
        freight.add(*_bucket_arrays(members, visibles, host_pages, sight, block_tokens))
    freight.add(*(host_pages[index] for index in long))
    pages, offsets, *rest = freight.send(device)

    starts = np.cumsum([0, *(visible.num_tokens for visible in visibles)]).tolist()
    return TokenTable(
        block_tokens=block_tokens,
        sight=sight,
        device=device,
        visibles=visibles,
        visible_lengths=[visible.num_tokens for visible in visibles],
        pages=pages,
        offsets=offsets,
        buckets=[
            _make_bucket(members, visibles, block_tokens, rest[5 * at : 5 * at + 5])
            for at, members in enumerate(buckets)
        ],
        tiled_spans=[
            _make_tiled(visibles[index], sight, span_pages, slice(starts[index], starts[index + 1]), block_tokens)
            for index, span_pages in zip(long, rest[5 * len(buckets) :], strict=True)
        ],
        host_pages=host_pages,
    )


def _visible_pages(table: array[int] | Sequence[int], visible: Visible) -> Ints:
    # A copy in any case: the table belongs to a lease, which goes on.
    return np.array(table[visible.first_block : visible.end_block], dtype=np.int64)


def _write_slots(visibles: Sequence[Visible], host_pages: Sequence[Ints], block_tokens: int) -> tuple[Ints, Ints]:
    """Page and offset of every token of the step: [N], [N]."""
    spans = [visible.span for visible in visibles]
    lengths = [span.length for span in spans]
    positions = np.arange(sum(lengths)) + np.repeat([span.start - span.row for span in spans], lengths)
    # In the visible blocks of all spans, laid one after another.
    first_slots = np.cumsum([0, *(visible.num_blocks for visible in visibles[:-1])])
    shifts = np.repeat([first - v.first_block for first, v in zip(first_slots, visibles, strict=True)], lengths)
    return np.concatenate(host_pages)[positions // block_tokens + shifts], positions % block_tokens


def _bucket_arrays(
    members: list[int], visibles: Sequence[Visible], host_pages: Sequence[Ints], sight: Sight, block_tokens: int
) -> tuple[Ints, ...]:
    """Rows [n * S], pages [n * blocks], stale slots, first and last slot each query sees [n * S]."""
    mine = [visibles[index] for index in members]
    num_blocks = max(visible.num_blocks for visible in mine)
    pages = np.zeros((len(mine), num_blocks), dtype=np.int64)
    for at, index in enumerate(members):
        pages[at, : visibles[index].num_blocks] = host_pages[index]
    queries = np.arange(mine[0].span.length)
    origins = np.array([visible.first_block * block_tokens for visible in mine])[:, None]
    rows = np.array([visible.span.row for visible in mine])[:, None] + queries
    last = np.array([visible.span.start for visible in mine])[:, None] + queries - origins
    first = np.array([[sight.first_visible(v.span.start + q) for q in range(v.span.length)] for v in mine]) - origins
    # Slots before the first visible token and after the last, but none of the padding: the null page is zeros.
    ends = np.array([visible.num_blocks * block_tokens for visible in mine])
    slots = np.arange(num_blocks * block_tokens)
    stale = ((slots < first[:, :1]) | (slots > last[:, -1:])) & (slots < ends[:, None])
    return rows.reshape(-1), pages.reshape(-1), np.flatnonzero(stale), first.reshape(-1), last.reshape(-1)


def _make_bucket(
    members: list[int], visibles: Sequence[Visible], block_tokens: int, tensors: list[torch.Tensor]
) -> Bucket:
    mine = [visibles[index] for index in members]
    rows, pages, stale, first, last = tensors
    num_queries = mine[0].span.length
    in_a_row = mine[-1].span.row - mine[0].span.row == num_queries * (len(mine) - 1)
    origins = [visible.first_block * block_tokens for visible in mine]
    cuts = {(visible.first - origin, visible.span.end - origin) for visible, origin in zip(mine, origins, strict=True)}
    return Bucket(
        members=members,
        num_queries=num_queries,
        num_slots=max(visible.num_blocks for visible in mine) * block_tokens,
        rows=slice(mine[0].span.row, mine[-1].span.row + num_queries) if in_a_row else rows,
        pages=pages,
        cut=slice(*cuts.pop()) if len(cuts) == 1 else None,
        stale=stale,
        first=first.view(-1, num_queries, 1),
        last=last.view(-1, num_queries, 1),
    )


def _make_tiled(visible: Visible, sight: Sight, pages: torch.Tensor, picks: slice, block_tokens: int) -> TiledSpan:
    on_cpu = pages.device.type == "cpu"
    tiles = cut_tiles(visible.span, sight, on_cpu=on_cpu)
    is_whole = is_square(visible.span, sight) and (len(tiles) == 1 or not on_cpu)
    return TiledSpan(visible, tiles, is_whole, pages, visible.first_block * block_tokens, picks)


def write_tokens(view: torch.Tensor, table: TokenTable, values: torch.Tensor) -> None:
    """Put the step's tokens in their pages. view: [P, T, H, D], values: [N, H, D]."""
    view[table.pages, table.offsets] = values.to(view.dtype)


def gather_tokens(view: torch.Tensor, table: TokenTable) -> torch.Tensor:
    """All visible tokens, span after span, positions ascending. view: [P, T, H, D] -> [K, H, D]."""
    pages, offsets = table.visible_slots
    page_stride, token_stride = view.stride()[:2]
    if page_stride % token_stride:
        return view[pages, offsets]
    # Tokens of all pages lie on one grid: rows of a matrix are gathered several times faster than pairs of indices.
    pitch = page_stride // token_stride
    shape = ((view.shape[0] - 1) * pitch + view.shape[1], *view.shape[2:])
    grid = view.as_strided(shape, (token_stride, *view.stride()[2:]))
    return grid.index_select(0, pages * pitch + offsets)
