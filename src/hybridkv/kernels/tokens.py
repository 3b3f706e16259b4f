"""Tokens in pages: the table of one token group for one packed step, writing a step's tokens, gathering what it sees.

Only pages of blocks that some query sees are read, and slots of them that none sees never reach a result: they may hold
anything, even what a failed request left there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridkv.kernels.cover import BUCKET_TOKENS_CPU, Visible, cut_tiles, fill_buckets, is_square, see
from hybridkv.kernels.pages import blank
from hybridkv.kernels.spans import PADDED, Span
from hybridkv.kernels.table import Bucket, Ints, TiledSpan, TokenTable
from hybridkv.memory import Column, Uploader
from hybridkv.sight import Sight

__all__ = ["TokenTable", "gather_tokens", "make_token_table", "write_tokens"]


def make_token_table(
    spans: Sequence[Span],
    tables: Sequence[array[int] | Sequence[int]],
    *,
    block_tokens: int,
    uploader: Uploader,
    name: str = "tokens",
    sight: Sight,
) -> TokenTable:
    """The table of one group. `tables[i]` has span i's page of each block up to its end; 0 where no longer seen.

    A span whose pages are `PADDED` is padding: it is not written, and what it computes counts for nothing. As in
    segment tables it stays in the table where buffers persist, with the null page to read, and else is left out.
    """
    visibles = [see(span, sight, block_tokens) for span in spans]
    host_pages = [_visible_pages(table, visible) for table, visible in zip(tables, visibles, strict=True)]
    pages, offsets = _write_slots(visibles, host_pages, block_tokens)
    columns: dict[str, Column] = {"pages": pages, "offsets": offsets}
    is_padded = pages.min() == PADDED
    if is_padded:
        offsets[pages == PADDED] = PADDED
        columns["padded"] = pages == PADDED
        if uploader.is_persistent:
            host_pages = [np.maximum(its_pages, 0) for its_pages in host_pages]
        else:
            real = [index for index, its_pages in enumerate(host_pages) if its_pages[-1] != PADDED]
            visibles, host_pages = [visibles[index] for index in real], [host_pages[index] for index in real]
    cover = _Cover(visibles, host_pages, sight, block_tokens)
    on_cpu = uploader.device.type == "cpu"
    buckets = fill_buckets(visibles, block_tokens, BUCKET_TOKENS_CPU * torch.get_num_threads() if on_cpu else None)
    short = {index for members in buckets for index in members}
    long = [index for index in range(len(visibles)) if index not in short]
    for at, members in enumerate(buckets):
        columns |= cover.bucket_columns(at, members)
    columns |= {f"span{index}.pages": host_pages[index] for index in long}
    sent = uploader.send(name, **columns)
    return TokenTable(
        block_tokens=block_tokens,
        sight=sight,
        uploader=uploader,
        name=name,
        visibles=visibles,
        visible_lengths=[visible.num_tokens for visible in visibles],
        pages=sent["pages"],
        offsets=sent["offsets"],
        padded=uploader.flags(f"{name}.padded", sent["padded"]) if is_padded else None,
        buckets=[cover.bucket(at, members, sent) for at, members in enumerate(buckets)],
        tiled_spans=cover.tiled_spans(long, sent),
        host_pages=host_pages,
    )


def _visible_pages(table: array[int] | Sequence[int], visible: Visible) -> Ints:
    # A copy in any case: the table belongs to a lease, which goes on.
    return np.array(table[visible.first_block : visible.end_block], dtype=np.int64)


def _write_slots(visibles: Sequence[Visible], host_pages: Sequence[Ints], block_tokens: int) -> tuple[Ints, Ints]:
    """Page and offset of every token of the step: [N], [N]. Pages of padding are `PADDED`."""
    spans = [visible.span for visible in visibles]
    lengths = [span.length for span in spans]
    positions = np.arange(sum(lengths)) + np.repeat([span.start - span.row for span in spans], lengths)
    # In the visible blocks of all spans, laid one after another.
    first_slots = np.cumsum([0, *(visible.num_blocks for visible in visibles[:-1])])
    shifts = np.repeat([first - v.first_block for first, v in zip(first_slots, visibles, strict=True)], lengths)
    return np.concatenate(host_pages)[positions // block_tokens + shifts], positions % block_tokens


class _Cover(NamedTuple):
    """The batched attention calls of a table: their columns on the host, then what they are on the device."""

    visibles: Sequence[Visible]
    host_pages: Sequence[Ints]
    sight: Sight
    block_tokens: int

    def bucket_columns(self, at: int, members: list[int]) -> dict[str, Column]:
        mine = [self.visibles[index] for index in members]
        num_blocks = max(visible.num_blocks for visible in mine)
        pages = np.zeros((len(mine), num_blocks), dtype=np.int64)
        for row, index in enumerate(members):
            pages[row, : self.visibles[index].num_blocks] = self.host_pages[index]
        queries = np.arange(mine[0].span.length)
        origins = np.array([visible.first_block * self.block_tokens for visible in mine])[:, None]
        last = np.array([visible.span.start for visible in mine])[:, None] + queries - origins
        see_from = self.sight.first_visible
        first = np.array([[see_from(v.span.start + q) for q in range(v.span.length)] for v in mine]) - origins
        # Slots before the first visible token and after the last, but none of the padding: the null page is zeros.
        ends = np.array([visible.num_blocks * self.block_tokens for visible in mine])
        slots = np.arange(num_blocks * self.block_tokens)
        stale = ((slots < first[:, :1]) | (slots > last[:, -1:])) & (slots < ends[:, None])
        return {
            f"bucket{at}.rows": np.array([visible.span.row for visible in mine])[:, None] + queries,
            f"bucket{at}.pages": pages,
            f"bucket{at}.stale": np.flatnonzero(stale),
            f"bucket{at}.first": first,
            f"bucket{at}.last": last,
        }

    def bucket(self, at: int, members: list[int], sent: Mapping[str, torch.Tensor]) -> Bucket:
        mine = [self.visibles[index] for index in members]
        num_queries = mine[0].span.length
        in_a_row = mine[-1].span.row - mine[0].span.row == num_queries * (len(mine) - 1)
        origins = [visible.first_block * self.block_tokens for visible in mine]
        cuts = {(v.first - origin, v.span.end - origin) for v, origin in zip(mine, origins, strict=True)}
        rows = slice(mine[0].span.row, mine[-1].span.row + num_queries)
        return Bucket(
            at=at,
            members=members,
            num_queries=num_queries,
            num_slots=max(visible.num_blocks for visible in mine) * self.block_tokens,
            rows=rows if in_a_row else sent[f"bucket{at}.rows"],
            pages=sent[f"bucket{at}.pages"],
            cut=slice(*cuts.pop()) if len(cuts) == 1 else None,
            stale=sent[f"bucket{at}.stale"],
            first=sent[f"bucket{at}.first"].view(-1, num_queries, 1),
            last=sent[f"bucket{at}.last"].view(-1, num_queries, 1),
        )

    def tiled_spans(self, long: list[int], sent: Mapping[str, torch.Tensor]) -> list[TiledSpan]:
        starts = np.cumsum([0, *(visible.num_tokens for visible in self.visibles)]).tolist() if long else []
        return [self._tiled(i, sent[f"span{i}.pages"], slice(starts[i], starts[i + 1])) for i in long]

    def _tiled(self, index: int, pages: torch.Tensor, picks: slice) -> TiledSpan:
        visible, on_cpu = self.visibles[index], pages.device.type == "cpu"
        tiles = cut_tiles(visible.span, self.sight, on_cpu=on_cpu)
        is_whole = is_square(visible.span, self.sight) and (len(tiles) == 1 or not on_cpu)
        return TiledSpan(visible, tiles, is_whole, pages, visible.first_block * self.block_tokens, picks)


def write_tokens(view: torch.Tensor, table: TokenTable, values: torch.Tensor) -> None:
    """Put the step's tokens in their pages, all but padding. view: [P, T, H, D], values: [N, H, D]."""
    if table.padded is None:
        view[table.pages, table.offsets] = values.to(view.dtype)
    else:  # as in `PageNumbers.write_together`: zeros in the null page, which has no others
        values = blank(values.to(view.dtype, copy=True), table.padded)
        view[table.pages.clamp(min=0), table.offsets.clamp(min=0)] = values


def write_both(
    first: torch.Tensor, second: torch.Tensor, table: TokenTable, key: torch.Tensor, value: torch.Tensor
) -> None:
    """`write_tokens` of a layer's two parts."""
    write_tokens(first, table, key)
    write_tokens(second, table, value)


def gather_tokens(view: torch.Tensor, table: TokenTable) -> torch.Tensor:
    """All visible tokens, span after span, positions ascending. view: [P, T, H, D] -> [K, H, D]."""
    page_stride, token_stride = view.stride()[:2]
    if page_stride % token_stride:
        return view[table.visible_slots]
    # Tokens of all pages lie on one grid: rows of a matrix are gathered several times faster than pairs of indices.
    pitch = page_stride // token_stride
    shape = ((view.shape[0] - 1) * pitch + view.shape[1], *view.shape[2:])
    grid = view.as_strided(shape, (token_stride, *view.stride()[2:]))
    return grid.index_select(0, table.visible_rows(pitch))
