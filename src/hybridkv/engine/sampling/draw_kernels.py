"""Triton kernels of a draw: an exponential race among the tokens of each row that filters keep. Importing needs Triton.

What a token's gap is, and how the bound of a row's gaps is found: see `bound_kernels`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hybridkv.engine.sampling.bound_kernels import gaps_of

_NO_TOKEN: Any = tl.constexpr(0x7FFFFFFF)
_STEP: Any = tl.constexpr(2.0**-31)
_LEAST: Any = tl.constexpr(2.0**-32)
_MOST: Any = tl.constexpr(1 - 2.0**-24)
"""The step of uniform numbers near 0, and what replaces 0 and 1."""


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
    gaps = gaps_of(logits, tokens, VOCAB, top, temperature)
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
        token = tl.where(s3 == highest, first + 3 * LANES, _NO_TOKEN)
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
        ids = tl.load(winners + row * num_parts + parts, mask=parts < num_parts, other=_NO_TOKEN)
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, _NO_TOKEN), axis=0)
        tl.store(tokens + row, token.to(tl.int64))
    if (top != top) | (tl.abs(top) == float("inf")):
        tl.store(tokens + row, -1)
