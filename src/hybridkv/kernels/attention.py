"""Attention of a packed step over pages, or over tokens gathered from them, by torch's own kernels.

Query heads are grouped by KV head everywhere, so that no key or value is repeated: [.., heads, folded, ..] where
`folded` query heads share one KV head. It knows no layers; the table says who sees what.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hybridkv.kernels.cover import Tile
from hybridkv.kernels.softmax import Extras, dense_attention, is_fused
from hybridkv.kernels.table import Bucket, LongSpan, TokenTable


class Source(Protocol):
    """Where keys and values come from."""

    num_heads: int
    value_dim: int

    def of_bucket(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, L, H, D], [n, L, H, Dv]"""

    def of_span(self, span: LongSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """[K, H, D], [K, H, Dv]: exactly the tokens the span sees."""


class Paged:
    """Keys and values in pages: views [P, T, H, D] with any strides."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.num_heads, self.value_dim = values.shape[2:]

    def of_bucket(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bucket(self.keys, bucket), self._bucket(self.values, bucket)

    def of_span(self, span: LongSpan) -> tuple[torch.Tensor, torch.Tensor]:
        return self._span(self.keys, span), self._span(self.values, span)

    @staticmethod
    def _bucket(view: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        slots = view.index_select(0, bucket.pages).flatten(0, 1)
        if bucket.cut is None:
            slots.index_fill_(0, bucket.stale, 0)
            return slots.unflatten(0, (-1, bucket.num_slots))
        return slots.unflatten(0, (-1, bucket.num_slots))[:, bucket.cut]

    @staticmethod
    def _span(view: torch.Tensor, span: LongSpan) -> torch.Tensor:
        slots = view.index_select(0, span.pages).flatten(0, 1)
        return slots[span.visible.first - span.origin : span.visible.span.end - span.origin]


class Packed:
    """Keys and values as `gather_tokens` orders them: [K, H, D]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, table: TokenTable) -> None:
        self.key, self.value, self.table = key, value, table
        self.num_heads, self.value_dim = value.shape[1:]

    def of_bucket(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        picks, num_spans = self.table.picks(bucket), len(bucket.members)
        if isinstance(picks, slice):
            return self.key[None, picks], self.value[None, picks]
        shape = (num_spans, picks.shape[0] // num_spans)
        return self.key.index_select(0, picks).unflatten(0, shape), self.value.index_select(0, picks).unflatten(
            0, shape
        )

    def of_span(self, span: LongSpan) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key[span.picks], self.value[span.picks]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: TokenTable,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query: [N, Hq, D], keys: [P, T, H, D], values: [P, T, H, Dv] -> [N, Hq, Dv]. The step's own keys are written."""
    return _attend(query, Paged(keys, values), table, Extras(scale, sinks, softcap))


def attend_visible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: TokenTable,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query: [N, Hq, D], key: [K, H, D], value: [K, H, Dv] as `gather_tokens` orders them -> [N, Hq, Dv]."""
    return _attend(query, Packed(key, value, table), table, Extras(scale, sinks, softcap))


def _attend(query: torch.Tensor, source: Source, table: TokenTable, extras: Extras) -> torch.Tensor:
    query = query.unflatten(1, (source.num_heads, -1))  # [N, H, folded, D]
    output = query.new_empty((*query.shape[:3], source.value_dim))
    for bucket in table.buckets:
        output[bucket.rows] = _attend_bucket(query[bucket.rows], bucket, source, table, extras)
    for span in table.long_spans:
        _attend_long(query, output, span, source, table, extras)
    return output.flatten(1, 2)


def _attend_bucket(
    query: torch.Tensor, bucket: Bucket, source: Source, table: TokenTable, extras: Extras
) -> torch.Tensor:
    """query: [n * S, H, folded, D] -> [n * S, H, folded, Dv]. Folded heads and queries form one axis of queries."""
    key, value = (x.to(query.dtype).transpose(1, 2) for x in source.of_bucket(bucket))  # [n, H, L, D]
    _, num_heads, num_folded, dim = query.shape
    query = query.view(-1, bucket.num_queries, num_heads, num_folded, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    sinks = extras.sinks
    if sinks is not None:
        sinks = sinks.view(1, num_heads, num_folded).repeat_interleave(bucket.num_queries, -1)
    mask = table.mask(bucket, query.dtype, num_folded)
    output = dense_attention(query, key, value, mask, False, extras._replace(sinks=sinks))
    return output.unflatten(2, (num_folded, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _attend_long(
    query: torch.Tensor, output: torch.Tensor, span: LongSpan, source: Source, table: TokenTable, extras: Extras
) -> None:
    """query: [N, H, folded, D]. KV heads take the batch's axis, so that folded heads share them by a stride of zero."""
    key, value = (x.to(query.dtype).transpose(0, 1)[:, None] for x in source.of_span(span))  # [H, 1, K, D]
    row, start, end = span.visible.span
    num_folded = query.shape[2]
    if extras.sinks is not None:
        extras = extras._replace(sinks=extras.sinks.view(-1, num_folded, 1))
    whole = span.square and is_fused(extras, query.device)
    for tile in [Tile(start, end, 0)] if whole else span.tiles:
        seen = slice(tile.first - span.visible.first, tile.end - span.visible.first)
        rows = slice(row + tile.start - start, row + tile.end - start)
        mask = None if whole else table.band(tile, query.dtype)
        part = dense_attention(query[rows].permute(1, 2, 0, 3), key[:, :, seen], value[:, :, seen], mask, whole, extras)
        output[rows] = part.permute(2, 0, 1, 3)
