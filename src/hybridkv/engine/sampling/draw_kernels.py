"""Triton kernels of a draw: the bound of top-k and top-p of each row, and the exponential race. Importing needs Triton.

A token's *gap* is how far its score lies below the row's best: `(top - logit) / temperature`. Gaps are not negative, so
their bits, read as integers, have the same order. `bound_kernel` finds the gap of the last kept token bit by bit: 31
passes over a row instead of a sort. Masses are summed as integers, so that no sum depends on its order and a row's
result does not depend on other rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_UNIT: Any = tl.constexpr(float(2**40))
"""Mass of the likeliest token. 2^18 of them fit into 63 bits."""
_KEEPS_ALL: Any = tl.constexpr(0x7FFFFFFF)
_STEP: Any = tl.constexpr(2.0**-31)
_LEAST: Any = tl.constexpr(2.0**-32)
_MOST: Any = tl.constexpr(1 - 2.0**-24)
"""The step of uniform numbers near 0, and what replaces 0 and 1."""


@triton.jit
def _gaps(logits, tokens, VOCAB: tl.constexpr, top, temperature):  # noqa: N803
    """`logits`: pointer to the row. Infinite beyond the vocabulary."""
    values = tl.load(logits + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
    return (top - values) / temperature


@triton.jit
def _within(
    logits,
    bound,
    VOCAB: tl.constexpr,  # noqa: N803
    top,
    temperature,
    COUNTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The mass of the tokens whose gaps have at most the bits `bound`, or their number if COUNTS."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        gaps = _gaps(logits, tokens, VOCAB, top, temperature)
        inside = (gaps.to(tl.int32, bitcast=True) <= bound) & (tokens < VOCAB)
        if COUNTS:
            total += inside.to(tl.int64)
        else:
            total += tl.where(inside, (tl.exp(-gaps) * _UNIT).to(tl.int64), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _reach(
    logits,
    target,
    VOCAB: tl.constexpr,  # noqa: N803
    top,
    temperature,
    COUNTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The smallest bound within which the mass, or the number of tokens, reaches `target`."""
    bound = target.to(tl.int32) * 0
    for step in range(31):
        bit = 30 - step
        lower = bound | ((1 << bit) - 1)
        reached = _within(logits, lower, VOCAB, top, temperature, COUNTS, BLOCK) >= target
        bound = tl.where(reached, bound, bound | (1 << bit))
    return bound


@triton.jit
def bound_kernel(
    logits,
    row_stride,
    VOCAB: tl.constexpr,  # noqa: N803
    tops,
    temperatures,
    top_ks,
    top_ps,
    bounds,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row. bounds: [B], int32: the bits of the largest gap that top-k and then top-p keep."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    top, temperature = tl.load(tops + row), tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    bound = top_k * 0 + _KEEPS_ALL
    if temperature > 0:
        if (top_k > 0) & (top_k < VOCAB):
            bound = _reach(logits, top_k.to(tl.int64), VOCAB, top, temperature, True, BLOCK)
        if top_p < 1:
            mass = _within(logits, bound, VOCAB, top, temperature, False, BLOCK)
            if bound != _KEEPS_ALL:  # top-k counts only some of the tokens that tie with its last one
                extra = _within(logits, bound, VOCAB, top, temperature, True, BLOCK) - top_k
                mass -= extra * (tl.exp(-bound.to(tl.float32, bitcast=True)) * _UNIT).to(tl.int64)
            share = mass.to(tl.float64) * top_p.to(tl.float64)
            target = share.to(tl.int64)
            target += (target.to(tl.float64) < share).to(tl.int64)
            bound = tl.minimum(bound, _reach(logits, target, VOCAB, top, temperature, False, BLOCK))
    tl.store(bounds + row, bound)


@triton.jit
def _log_noise(bits):
    """The logarithm of exponential random numbers, from 32 random bits each; always finite.

    Noise is -log(1 - u). Small noise wins races, so u keeps 31 bits near 0, and a series replaces the logarithm there.
    """
    uniform = tl.minimum(tl.maximum((bits >> 1).to(tl.float32) * _STEP, _LEAST), _MOST)
    series = uniform * (1 + uniform * (0.5 + uniform * 0.33333334))
    return tl.log(tl.where(uniform < 1e-3, series, -tl.log(1 - uniform)))


@triton.jit
def _scores(
    logits,
    tokens,
    VOCAB: tl.constexpr,  # noqa: N803
    top,
    temperature,
    bound,
    bits,
    FILTERED: tl.constexpr,  # noqa: N803
):
    gaps = _gaps(logits, tokens, VOCAB, top, temperature)
    scores = -gaps - _log_noise(bits)
    if FILTERED:
        scores = tl.where(gaps.to(tl.int32, bitcast=True) <= bound, scores, -float("inf"))
    return scores


@triton.jit
def race_kernel(
    logits,
    row_stride,
    VOCAB: tl.constexpr,  # noqa: N803
    tops,
    temperatures,
    seeds,
    bounds,
    best,
    winners,
    FILTERED: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
):
    """One program for each row and each part of 4 * LANES tokens. best, winners: [B, parts]

    Each counter of the random generator serves four tokens of a part.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(1) + part
    logits += row.to(tl.int64) * row_stride
    top, temperature = tl.load(tops + row), tl.load(temperatures + row)
    if temperature > 0:
        bound = tl.load(bounds + row) if FILTERED else 0
        lanes = tl.arange(0, LANES)
        first = part * 4 * LANES + lanes
        b0, b1, b2, b3 = tl.randint4x(tl.load(seeds + row), part * LANES + lanes)
        s0 = _scores(logits, first, VOCAB, top, temperature, bound, b0, FILTERED)
        s1 = _scores(logits, first + LANES, VOCAB, top, temperature, bound, b1, FILTERED)
        s2 = _scores(logits, first + 2 * LANES, VOCAB, top, temperature, bound, b2, FILTERED)
        s3 = _scores(logits, first + 3 * LANES, VOCAB, top, temperature, bound, b3, FILTERED)
        highest = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), axis=0)
        # Of equals, the lowest token wins.
        token = tl.where(s3 == highest, first + 3 * LANES, _KEEPS_ALL)
        token = tl.where(s2 == highest, first + 2 * LANES, token)
        token = tl.where(s1 == highest, first + LANES, token)
        token = tl.where(s0 == highest, first, token)
        tl.store(best + at, highest)
        tl.store(winners + at, tl.min(token, axis=0))


@triton.jit
def finish_kernel(
    tops,
    temperatures,
    best,
    winners,
    tokens,
    num_parts,
    PARTS: tl.constexpr,  # noqa: N803
):
    """One program a row. tokens: [B], int64: the argmax of each row; drawn rows get the winner, bad ones -1."""
    row = tl.program_id(0)
    top = tl.load(tops + row)
    if tl.load(temperatures + row) > 0:
        parts = tl.arange(0, PARTS)
        scores = tl.load(best + row * num_parts + parts, mask=parts < num_parts, other=-float("inf"))
        ids = tl.load(winners + row * num_parts + parts, mask=parts < num_parts, other=_KEEPS_ALL)
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, _KEEPS_ALL), axis=0)
        tl.store(tokens + row, token.to(tl.int64))
    if (top != top) | (tl.abs(top) == float("inf")):
        tl.store(tokens + row, -1)
