"""Attention of a packed step over pages, or over tokens gathered from them, by torch's own kernels.

Query heads are grouped by KV head everywhere, so that no key or value is repeated: [.., heads, folded, ..] where
`folded` query heads share one KV head. It knows no layers; the table says who sees what.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hybridkv.kernels.cover import Tile
from hybridkv.kernels.pages import blank
from hybridkv.kernels.softmax import Extras, dense_attention, is_fused
from hybridkv.kernels.table import Bucket, TiledSpan, TokenTable


class Source(Protocol):
    """Where keys and values come from, in the query's dtype."""

    num_heads: int
    value_dim: int

    def of_bucket(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, L, H, D], [n, L, H, Dv]"""

    def of_span(self, span: TiledSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """[K, H, D], [K, H, Dv]: exactly the tokens the span sees."""


class Paged:
    """Keys and values in pages: views [P, T, H, D] with any strides."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, table: TokenTable, dtype: torch.dtype) -> None:
        self.views = {"keys": keys, "values": values}
        self.table, self.dtype = table, dtype
        self.num_heads, self.value_dim = values.shape[2:]

    def of_bucket(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bucket("keys", bucket), self._bucket("values", bucket)

    def of_span(self, span: TiledSpan) -> tuple[torch.Tensor, torch.Tensor]:
        seen = slice(span.visible.first - span.origin, span.visible.span.end - span.origin)
        return self._gather("keys", span.pages)[seen], self._gather("values", span.pages)[seen]

    def _bucket(self, name: str, bucket: Bucket) -> torch.Tensor:
        slots = self._gather(name, bucket.pages)
        by_span = slots.view(len(bucket.members), bucket.num_slots, *slots.shape[1:])
        if bucket.cut is not None:
            return by_span[:, bucket.cut]
        slots.index_fill_(0, bucket.stale, 0)
        return by_span

    def _gather(self, name: str, pages: torch.Tensor) -> torch.Tensor:
        """Whole pages, in the query's dtype: [blocks * T, H, D]."""
        view, num_pages = self.views[name], pages.shape[0]
        found = self.table.buffer(name, num_pages, view.dtype, view.shape[1:])
        torch.index_select(view, 0, pages, out=found)
        if view.dtype != self.dtype:
            found = self.table.buffer(name, num_pages, self.dtype, view.shape[1:]).copy_(found)
        return found.view(-1, *view.shape[2:])


class Packed:
    """Keys and values as `gather_tokens` orders them: [K, H, D]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, table: TokenTable, dtype: torch.dtype) -> None:
        self.key, self.value, self.table = key.to(dtype), value.to(dtype), table
        self.num_heads, self.value_dim = value.shape[1:]

    def of_bucket(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        picks = self.table.picks(bucket)
        if isinstance(picks, slice):
            return self.key[None, picks], self.value[None, picks]
        shape = (len(bucket.members), -1, self.num_heads)
        key, value = self.key.index_select(0, picks), self.value.index_select(0, picks)
        return key.view(*shape, key.shape[-1]), value.view(*shape, self.value_dim)

    def of_span(self, span: TiledSpan) -> tuple[torch.Tensor, torch.Tensor]:
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
    return _attend(query, Paged(keys, values, table, query.dtype), table, Extras(scale, sinks, softcap))


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
    return _attend(query, Packed(key, value, table, query.dtype), table, Extras(scale, sinks, softcap))


def _attend(query: torch.Tensor, source: Source, table: TokenTable, extras: Extras) -> torch.Tensor:
    num_tokens, _, dim = query.shape
    query = query.reshape(num_tokens, source.num_heads, -1, dim)  # [N, H, folded, D]
    if len(table.buckets) == 1 and table.buckets[0].num_rows == num_tokens:
        output = _attend_bucket(query, table.buckets[0], source, table, extras)
    else:
        output = query.new_empty((*query.shape[:3], source.value_dim))
        for bucket in table.buckets:
            output[bucket.rows] = _attend_bucket(query[bucket.rows], bucket, source, table, extras)
        for span in table.tiled_spans:
            _attend_long(query, output, span, source, table, extras)
    output = output.flatten(1, 2)
    return output if table.padded is None else blank(output, table.padded)


def _attend_bucket(
    query: torch.Tensor, bucket: Bucket, source: Source, table: TokenTable, extras: Extras
) -> torch.Tensor:
    """query: [n * S, H, folded, D] -> [n * S, H, folded, Dv]."""
    key, value = source.of_bucket(bucket)
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [n, H, L, D]
    num_folded, num_queries = query.shape[2], bucket.num_queries
    mask = table.mask(bucket, query.dtype, num_folded)
    if extras.sinks is not None:
        sinks = extras.sinks.view(1, -1, num_folded)
        extras = extras._replace(sinks=sinks.repeat_interleave(num_queries, -1) if num_queries > 1 else sinks)
    if num_queries == 1:
        return dense_attention(query, key, value, mask, False, extras)
    # Folded heads and queries become one axis of queries.
    query = query.view(-1, num_queries, *query.shape[1:]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    output = dense_attention(query, key, value, mask, False, extras)
    return output.unflatten(2, (num_folded, num_queries)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _attend_long(
    query: torch.Tensor, output: torch.Tensor, span: TiledSpan, source: Source, table: TokenTable, extras: Extras
) -> None:
    """query: [N, H, folded, D]. KV heads take the batch's axis, so that folded heads share them by a stride of zero."""
    key, value = (x.transpose(0, 1)[:, None] for x in source.of_span(span))  # [H, 1, K, D]
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
