"""Triton kernels of a decoding step's attention: over shares of the tokens, the merging of shares, and new tokens.

Strides are tuples, in elements, of all axes but the last, whose stride is 1 unless it is passed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _visible(positions, row, window: tl.constexpr, chunk: tl.constexpr):
    """The positions that a row sees: the first, and the end. Padding sees none."""
    position = tl.load(positions + row)
    first = 0
    if window > 0:
        first = tl.maximum(position + 1 - window, 0)
    if chunk > 0:
        first = tl.maximum(position, 0) // chunk * chunk
    return first, position + 1


@triton.jit
def _share(first, end, splits, block_tokens: tl.constexpr, min_share: tl.constexpr):
    """The number of tokens that each program of a row takes, but for the last ones: whole blocks."""
    return tl.maximum(tl.cdiv(tl.cdiv(end - first, splits), block_tokens) * block_tokens, min_share)


@triton.jit
def _load_queries(query, strides, row, heads, is_head, dims, dim: tl.constexpr):
    at = query + row * strides[0] + heads[:, None] * strides[1] + dims[None, :]
    return tl.load(at, mask=is_head[:, None] & (dims < dim)[None, :], other=0.0)


@triton.jit
def _load_slots(
    view, strides, align: tl.constexpr, pages, offsets, head, seen, dims, dim: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Of each token what `view` has of it, for one head: [tokens, tile]. Nothing unseen is read."""
    starts = tl.multiple_of(pages * strides[0] + offsets * strides[1] + head * strides[2], align)
    at = view + starts[:, None] + dims[None, :]
    mask = seen[:, None]
    if dim != tile:
        mask = mask & (dims < dim)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["splits"])
def attend_kernel(
    query, query_rest, keys, keys_rest, values, sinks, result, weights,
    positions, pages, shape,
    query_strides, query_rest_strides,
    keys_strides, keys_rest_strides, values_strides,
    num_queries, splits, scale, softcap,
    window: tl.constexpr, chunk: tl.constexpr,
    page_tokens: tl.constexpr, num_folded: tl.constexpr,
    dim: tl.constexpr, rest_dim: tl.constexpr, value_dim: tl.constexpr,
    dim_tile: tl.constexpr, rest_tile: tl.constexpr, value_tile: tl.constexpr,
    has_rest: tl.constexpr, values_are_keys: tl.constexpr, has_sinks: tl.constexpr,
    has_softcap: tl.constexpr, is_split: tl.constexpr,
    block_tokens: tl.constexpr, block_heads: tl.constexpr, min_share: tl.constexpr, align: tl.constexpr,
):  # fmt: skip
    """One program: a row, some query heads of one KV head, and a share of the tokens that the row sees.

    result: [B, Hq, Dv]; with splits [B, Hq, splits, Dv], and weights: [B, Hq, splits], log2 of each denominator.
    """
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, end = _visible(positions, row, window, chunk)
    share = _share(first, end, splits, block_tokens, min_share)
    begin = first + split * share
    end = tl.minimum(begin + share, end)
    if (begin >= end) & is_split:
        return
    head_blocks: tl.constexpr = (num_folded + block_heads - 1) // block_heads
    head = tl.program_id(0) // head_blocks
    folded = tl.program_id(0) % head_blocks * block_heads + tl.arange(0, block_heads)
    is_head = folded < num_folded
    heads = head * num_folded + folded
    dims, rest_dims, value_dims = tl.arange(0, dim_tile), tl.arange(0, rest_tile), tl.arange(0, value_tile)
    q = _load_queries(query, query_strides, row, heads, is_head, dims, dim)
    if has_rest:
        q_rest = _load_queries(query_rest, query_rest_strides, row, heads, is_head, rest_dims, rest_dim)
    head = head.to(tl.int64)
    pages += tl.load(shape + 1) + row * tl.load(shape)
    # Scores are powers of two: `log2e` goes where they are scaled.
    log2e: tl.constexpr = 1.4426950408889634
    highest = tl.full([block_heads], float("-inf"), tl.float32)
    total = tl.zeros([block_heads], tl.float32)
    if has_sinks:  # the first split has it
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * log2e
        highest = tl.where(split == 0, sink, highest)
        total += tl.where(split == 0, 1.0, 0.0)
    sums = tl.zeros([block_heads, value_tile], tl.float32)
    tokens = begin + tl.arange(0, block_tokens)
    # Pages are looked up one block ahead: loads that wait for no other load are all that the compiler pipelines well.
    next_page = tl.load(pages + tokens // page_tokens, mask=tokens < end, other=0)
    for start in range(begin, end, block_tokens):
        tokens = start + tl.arange(0, block_tokens)
        page, seen, offsets = next_page.to(tl.int64), tokens < end, tokens % page_tokens
        tokens += block_tokens
        next_page = tl.load(pages + tokens // page_tokens, mask=tokens < end, other=0)
        k = _load_slots(keys, keys_strides, align, page, offsets, head, seen, dims, dim, dim_tile).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if has_rest:
            k_rest = _load_slots(
                keys_rest, keys_rest_strides, align, page, offsets, head, seen, rest_dims, rest_dim, rest_tile
            )
            scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision="ieee")
        if has_softcap:
            scores = scores * (scale / softcap)
            scores = softcap * log2e * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # tanh
        else:
            scores = scores * (scale * log2e)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        fade = tl.exp2(highest - new_highest)
        p = tl.exp2(scores - new_highest[:, None])
        total = total * fade + tl.sum(p, 1)
        if values_are_keys:
            v = k
        else:
            v = _load_slots(
                values, values_strides, align, page, offsets, head, seen, value_dims, value_dim, value_tile
            ).to(q.dtype)
        sums = tl.dot(p.to(q.dtype), v, sums * fade[:, None], input_precision="ieee")
        highest = new_highest
    sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (row * num_queries + heads) * splits + split
    if is_split:
        tl.store(weights + at, highest + tl.log2(total), mask=is_head)
    mask = is_head[:, None] & (value_dims < value_dim)[None, :]
    tl.store(result + at[:, None] * value_dim + value_dims[None, :], sums.to(result.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    results, weights, output, positions, splits, num_queries,
    window: tl.constexpr, chunk: tl.constexpr, value_dim: tl.constexpr, value_tile: tl.constexpr,
    block_tokens: tl.constexpr, min_share: tl.constexpr, all_splits: tl.constexpr, block_splits: tl.constexpr,
):  # fmt: skip
    """One program: a row and a query head. Splits that had no tokens have written nothing, and are not read."""
    row = tl.program_id(1).to(tl.int64)
    first, end = _visible(positions, row, window, chunk)
    count = tl.cdiv(tl.maximum(end - first, 0), _share(first, end, splits, block_tokens, min_share))
    head = row * num_queries + tl.program_id(0)
    weights += head * splits
    results += head * splits * value_dim
    every = tl.arange(0, all_splits)
    logs = tl.load(weights + every, mask=every < count, other=float("-inf"))
    highest = tl.maximum(tl.max(logs, 0), -1e30)  # padding has no splits: no NaN may come of it
    total = tl.sum(tl.exp2(logs - highest), 0)
    dims = tl.arange(0, value_tile)
    sums = tl.zeros([value_tile], tl.float32)
    for start in range(0, count, block_splits):
        some = start + tl.arange(0, block_splits)
        share = tl.exp2(tl.load(weights + some, mask=some < count, other=float("-inf")) - highest) / total
        mask = (some < count)[:, None] & (dims < value_dim)[None, :]
        found = tl.load(results + some[:, None] * value_dim + dims[None, :], mask=mask, other=0.0)
        sums += tl.sum(share[:, None] * found, 0)
    tl.store(output + head * value_dim + dims, sums.to(output.dtype.element_ty), mask=dims < value_dim)


@triton.jit
def write_kernel(
    keys, values, key, value, positions, pages, shape,
    keys_strides, values_strides, key_strides, value_strides,
    page_tokens: tl.constexpr, num_heads: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr,
    dim_tile: tl.constexpr, value_tile: tl.constexpr, block_heads: tl.constexpr,
):  # fmt: skip
    """One program: a row and some heads."""
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row)
    if position < 0:
        return
    page = tl.load(pages + tl.load(shape + 1) + row * tl.load(shape) + position // page_tokens).to(tl.int64)
    offset = (position % page_tokens).to(tl.int64)
    heads = (tl.program_id(0) * block_heads + tl.arange(0, block_heads)).to(tl.int64)
    is_head = heads < num_heads
    _write_part(keys, keys_strides, key, key_strides, page, offset, row, heads, is_head, dim, dim_tile)
    _write_part(values, values_strides, value, value_strides, page, offset, row, heads, is_head, value_dim, value_tile)


@triton.jit
def _write_part(
    view, view_strides, rows, rows_strides, page, offset, row, heads, is_head, dim: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    dims = tl.arange(0, tile)
    mask = is_head[:, None] & (dims < dim)[None, :]
    source = rows + row * rows_strides[0] + heads[:, None] * rows_strides[1] + dims[None, :] * rows_strides[2]
    target = view + page * view_strides[0] + offset * view_strides[1] + heads[:, None] * view_strides[2]
    found = tl.load(source, mask=mask, other=0.0)
    tl.store(target + dims[None, :] * view_strides[3], found.to(view.dtype.element_ty), mask=mask)
