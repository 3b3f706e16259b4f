"""Launches attention of a decoding step over pages. Queries are one token for each row.

A key may have two parts, in places of their own: `rest` is the second. Values may be the first part of the keys; they
are then loaded once. Tiles are powers of two: a head dimension that is none is masked, or cut in two parts.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.decode.attention_kernels import attend_kernel, merge_kernel
from hybridkv.kernels.decode.launch import MAX_SPLITS, Launch, Shape, choose_launch, num_processors, padded, token_bound
from hybridkv.kernels.decode.tables import DecodeTokens

_MERGED_AT_ONCE = 16
_MAX_ALIGN = 16
"""Elements. The compiler finds out for itself if all strides are multiples of this, but not if they are of less."""


class Part(NamedTuple):
    """One part of queries, and of the keys they meet."""

    query: Tensor
    """[B, Hq, D]"""
    keys: Tensor
    """[P, T, H, D]"""


class Softmax(NamedTuple):
    """What attention does to scores."""

    scale: float
    sinks: Tensor | None = None
    """[Hq]: one more logit of each head, which only the denominator counts."""
    softcap: float | None = None


def attend_pages(
    main: Part,
    rest: Part | None,
    values: Tensor | None,
    table: DecodeTokens,
    softmax: Softmax,
    launch: Launch | None = None,
) -> Tensor:
    """values: [P, T, H, Dv], or None where they are the keys of `main` -> [B, Hq, Dv]. Padding gives zeros.

    The last axis of every tensor has a stride of 1. launch: chosen by the shapes, unless it is passed.
    """
    query, keys = main
    (num_rows, num_queries, _), num_heads = query.shape, keys.shape[2]
    loaded, second = keys if values is None else values, rest or main
    value_dim, num_folded = loaded.shape[-1], num_queries // num_heads
    launch = launch or _launch_for(main, rest, values, table)
    min_share = max(launch.min_share, launch.block_tokens)
    views = (keys, second.keys, loaded)
    align = gcd(_MAX_ALIGN, *(stride for view in views for stride in view.stride()[:3]))
    output = query.new_empty(num_rows, num_queries, value_dim)
    result, weights, is_split = output, output, launch.splits > 1
    if is_split:
        result = query.new_empty(num_rows, num_queries, launch.splits, value_dim, dtype=torch.float32)
        weights = query.new_empty(num_rows, num_queries, launch.splits, dtype=torch.float32)
    sight = {"window": table.sight.window or 0, "chunk": table.sight.chunk or 0}
    grid = (num_heads * -(-num_folded // launch.block_heads), num_rows, launch.splits)
    attend_kernel[grid](
        query, second.query, keys, second.keys, loaded, softmax.sinks, result, weights,
        table.positions, table.pages, table.shape,
        query.stride()[:2], second.query.stride()[:2],
        keys.stride()[:3], second.keys.stride()[:3], loaded.stride()[:3],
        num_queries, launch.splits, softmax.scale, softmax.softcap or 0.0,
        **sight,
        page_tokens=table.block_tokens, num_folded=num_folded,
        dim=keys.shape[-1], rest_dim=second.keys.shape[-1], value_dim=value_dim,
        dim_tile=padded(keys.shape[-1]), rest_tile=padded(second.keys.shape[-1]), value_tile=padded(value_dim),
        has_rest=rest is not None, values_are_keys=values is None, has_sinks=softmax.sinks is not None,
        has_softcap=softmax.softcap is not None, is_split=is_split,
        block_tokens=launch.block_tokens, block_heads=launch.block_heads, min_share=min_share, align=align,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if is_split:
        merge_kernel[(num_queries, num_rows)](
            result, weights, output, table.positions, launch.splits, num_queries, **sight,
            value_dim=value_dim, value_tile=padded(value_dim), block_tokens=launch.block_tokens, min_share=min_share,
            all_splits=MAX_SPLITS, block_splits=_MERGED_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return output


def _launch_for(main: Part, rest: Part | None, values: Tensor | None, table: DecodeTokens) -> Launch:
    (num_rows, num_queries, _), num_heads = main.query.shape, main.keys.shape[2]
    views = [part.keys for part in (main, rest) if part is not None] + ([] if values is None else [values])
    shape = Shape(
        num_rows=num_rows,
        num_heads=num_heads,
        num_folded=num_queries // num_heads,
        tiles=tuple(padded(view.shape[-1]) for view in views),
        element_bytes=max(main.query.element_size(), main.keys.element_size()),
    )
    bound = token_bound(table.sight, table.pages.numel() // max(num_rows, 1) * table.block_tokens)
    return choose_launch(shape, bound, num_processors(main.query.device))
