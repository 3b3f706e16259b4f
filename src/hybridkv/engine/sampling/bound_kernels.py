"""Triton kernels that find the bound of top-k and top-p of each row. They know no randomness. Importing needs Triton.

A token's *gap* is how far its score lies below the row's best: `(top - logit) / temperature`. Gaps are not negative, so
their bits, read as integers, have the same order. A row's bound is the bits of the largest gap that it keeps. It is
found without a sort:

1. `narrow_kernel`, a few times: sums the tokens up to each of several thresholds. The bound lies between two of them.
2. `gather_kernel`: copies the logits between those two, the *candidates*, into a small buffer.
3. `bound_kernel`: bisects among the candidates, or in the whole row if there are too many of them.

Masses are summed as integers, so that no sum depends on its order and a row's result does not depend on other rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_UNIT: Any = tl.constexpr(float(2**40))
"""Mass of the likeliest token. 2^18 of them fit into 63 bits."""
_KEEPS_ALL: Any = tl.constexpr(0x7FFFFFFF)
_INFINITE: Any = tl.constexpr(0x7F800000)
"""Bits of an infinite gap. No token has a larger one."""
_FIRST: Any = tl.constexpr((127 - 3) << 23)
_OCTAVES: Any = tl.constexpr(12)
"""The thresholds of the first pass: 2^-3, octaves above it, and infinity."""
_FLOOR: Any = tl.constexpr((127 - 11) << 23)
"""Later passes have no thresholds below it: few rows need them, and bits are no good measure of distance near 0."""
_MAX_CHUNK: Any = tl.constexpr(2048)
_MASS_BITS: Any = tl.constexpr(52)
_ONE_TOKEN: Any = tl.constexpr(1 << 52)
_MASSES: Any = tl.constexpr((1 << 52) - 1)
_COUNTS: Any = tl.constexpr((1 << 12) - 1)
"""A chunk's count and mass are summed as one 64-bit integer: up to 2048 tokens have 52 bits of mass, 12 of count."""


@triton.jit
def gaps_of(logits, tokens, size, top, temperature):
    """`logits`: pointer to `size` logits. Infinite beyond them."""
    values = tl.load(logits + tokens, mask=tokens < size, other=-float("inf")).to(tl.float32)
    return (top - values) / temperature


@triton.jit
def _mass(gaps):
    return (tl.exp(-gaps) * _UNIT).to(tl.int64)


@triton.jit
def _share(mass, top_p):
    """`mass` times `top_p`, rounded up."""
    share = mass.to(tl.float64) * top_p.to(tl.float64)
    target = share.to(tl.int64)
    return target + (target.to(tl.float64) < share).to(tl.int64)


@triton.jit
def _filters(row, VOCAB: tl.constexpr, tops, temperatures, top_ks, top_ps):  # noqa: N803
    """Whether top-k and whether top-p matter for the row, and its parameters."""
    top, temperature = tl.load(tops + row), tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    is_drawn = (temperature > 0) & (tl.abs(top) < float("inf"))
    return is_drawn & (top_k > 0) & (top_k < VOCAB), is_drawn & (top_p < 1), top, temperature, top_k, top_p


@triton.jit
def _threshold(lower, upper, index, PASS: tl.constexpr, THRESHOLDS: tl.constexpr):  # noqa: N803
    """Thresholds ascend with `index`. Those of later passes divide the interval evenly."""
    if PASS == 0:
        bits = _FIRST + index * ((_OCTAVES << 23) // (THRESHOLDS - 2))
        bits = tl.where(index == THRESHOLDS - 1, _INFINITE, bits)
    else:
        start = tl.maximum(lower, _FLOOR)
        bits = start + (upper - start) // (THRESHOLDS + 1) * (index + 1)
    return bits


@triton.jit
def _interval(
    sums,
    row,
    by_count,
    by_mass,
    top_k,
    top_p,
    VOCAB: tl.constexpr,  # noqa: N803
    DONE: tl.constexpr,  # noqa: N803
    PASSES: tl.constexpr,  # noqa: N803
    THRESHOLDS: tl.constexpr,  # noqa: N803
    CANDIDATES: tl.constexpr,  # noqa: N803
):
    """What the first DONE passes tell of the first filter: its bound is in (lower, upper].

    Returns lower, upper, the filter's target (tokens of top-k or mass of top-p), the bits that gaps of candidates
    exceed, how many tokens are candidates, and the count and the mass of tokens before them. If top-p follows top-k,
    all tokens up to `upper` are candidates, because the target of top-p depends on them.
    """
    # sums: [B, PASSES, 2, THRESHOLDS]
    lower, upper = top_k * 0 - 1, top_k * 0 + _INFINITE
    target = top_k.to(tl.int64)
    count, mass, count_within = target * 0, target * 0, target * 0 + VOCAB
    num_candidates = count_within
    has_both = by_count & by_mass
    index = tl.arange(0, THRESHOLDS)
    for n in tl.static_range(DONE):
        at = sums + (row * PASSES + n) * 2 * THRESHOLDS + index
        counts, masses = tl.load(at), tl.load(at + THRESHOLDS)
        if n == 0:
            target = tl.where(by_count, target, _share(tl.max(masses, axis=0), top_p))
        thresholds = _threshold(lower, upper, index, n, THRESHOLDS)
        is_summed = (num_candidates > CANDIDATES) | (n == 0)
        reaches = tl.where(by_count, counts, masses) >= target
        is_short, reaches = is_summed & (reaches == 0), is_summed & reaches
        lower = tl.maximum(lower, tl.max(tl.where(is_short, thresholds, -1), axis=0))
        upper = tl.minimum(upper, tl.min(tl.where(reaches, thresholds, _INFINITE), axis=0))
        count_within = tl.minimum(count_within, tl.min(tl.where(reaches, counts, VOCAB), axis=0))
        is_before = is_short & (has_both == 0)
        count = tl.maximum(count, tl.max(tl.where(is_before, counts, 0), axis=0))
        mass = tl.maximum(mass, tl.max(tl.where(is_before, masses, 0), axis=0))
        num_candidates = count_within - count
    return lower, upper, target, tl.where(has_both, -1, lower), num_candidates, count, mass


@triton.jit
def narrow_kernel(
    logits,
    row_stride,
    VOCAB: tl.constexpr,  # noqa: N803
    tops,
    temperatures,
    top_ks,
    top_ps,
    sums,
    PASS: tl.constexpr,  # noqa: N803
    PASSES: tl.constexpr,  # noqa: N803
    THRESHOLDS: tl.constexpr,  # noqa: N803
    CANDIDATES: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    CHUNKS: tl.constexpr,  # noqa: N803
):
    """One program for each row and each part of CHUNKS * CHUNK tokens.

    Adds to the `sums` of this pass, which start at 0. Rows that have few candidates already are left alone.
    """
    tl.static_assert(CHUNK <= _MAX_CHUNK)
    row, part = tl.program_id(0), tl.program_id(1)
    by_count, by_mass, top, temperature, top_k, top_p = _filters(row, VOCAB, tops, temperatures, top_ks, top_ps)
    if by_count | by_mass:
        lower, upper, _, _, num_candidates, _, _ = _interval(
            sums, row, by_count, by_mass, top_k, top_p, VOCAB, PASS, PASSES, THRESHOLDS, CANDIDATES
        )
        if (num_candidates > CANDIDATES) | (PASS == 0):
            logits += row.to(tl.int64) * row_stride
            index = tl.arange(0, THRESHOLDS)
            counts, masses = tl.zeros([THRESHOLDS], tl.int64), tl.zeros([THRESHOLDS], tl.int64)
            for chunk in range(CHUNKS):
                tokens = (part * CHUNKS + chunk) * CHUNK + tl.arange(0, CHUNK)
                gaps = gaps_of(logits, tokens, VOCAB, top, temperature)
                bits = gaps.to(tl.int32, bitcast=True)
                weights = tl.where(tokens < VOCAB, _mass(gaps) + _ONE_TOKEN, 0)
                packed = tl.zeros([THRESHOLDS], tl.int64)
                for n in tl.static_range(THRESHOLDS):
                    threshold = _threshold(lower, upper, n, PASS, THRESHOLDS)
                    packed = tl.where(index == n, tl.sum(tl.where(bits <= threshold, weights, 0), axis=0), packed)
                counts += (packed >> _MASS_BITS) & _COUNTS
                masses += packed & _MASSES
            at = sums + (row * PASSES + PASS) * 2 * THRESHOLDS + index
            tl.atomic_add(at, counts, sem="relaxed")
            tl.atomic_add(at + THRESHOLDS, masses, sem="relaxed")


@triton.jit
def gather_kernel(
    logits,
    row_stride,
    VOCAB: tl.constexpr,  # noqa: N803
    tops,
    temperatures,
    top_ks,
    top_ps,
    sums,
    cursors,
    candidates,
    PASSES: tl.constexpr,  # noqa: N803
    THRESHOLDS: tl.constexpr,  # noqa: N803
    CANDIDATES: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    CHUNKS: tl.constexpr,  # noqa: N803
):
    """One program for each row and each part of CHUNKS * CHUNK tokens.

    cursors: [B], start at 0. candidates: [B, CANDIDATES]: logits, in no certain order.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    by_count, by_mass, top, temperature, top_k, top_p = _filters(row, VOCAB, tops, temperatures, top_ks, top_ps)
    if by_count | by_mass:
        _, upper, _, above, num_candidates, _, _ = _interval(
            sums, row, by_count, by_mass, top_k, top_p, VOCAB, PASSES, PASSES, THRESHOLDS, CANDIDATES
        )
        if num_candidates <= CANDIDATES:
            logits += row.to(tl.int64) * row_stride
            for chunk in range(CHUNKS):
                tokens = (part * CHUNKS + chunk) * CHUNK + tl.arange(0, CHUNK)
                bits = gaps_of(logits, tokens, VOCAB, top, temperature).to(tl.int32, bitcast=True)
                inside = (bits > above) & (bits <= upper) & (tokens < VOCAB)
                count = tl.sum(inside.to(tl.int32), axis=0)
                if count > 0:
                    start = tl.atomic_add(cursors + row, count.to(tl.int64), sem="relaxed")
                    slots = start + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                    values = tl.load(logits + tokens, mask=inside)
                    at = candidates + row.to(tl.int64) * CANDIDATES + slots
                    tl.store(at, values, mask=inside & (slots < CANDIDATES))


@triton.jit
def _within(
    logits,
    held_bits,
    held_masses,
    bound,
    VOCAB: tl.constexpr,  # noqa: N803
    top,
    temperature,
    COUNTS: tl.constexpr,  # noqa: N803
    HELD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The mass, or number if COUNTS, of tokens whose gaps have at most the bits `bound`: held ones or the row's."""
    if HELD:
        inside = held_bits <= bound
        total = inside.to(tl.int64) if COUNTS else tl.where(inside, held_masses, 0)
    else:
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, VOCAB, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            gaps = gaps_of(logits, tokens, VOCAB, top, temperature)
            inside = (gaps.to(tl.int32, bitcast=True) <= bound) & (tokens < VOCAB)
            total += inside.to(tl.int64) if COUNTS else tl.where(inside, _mass(gaps), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _reach(
    logits,
    held_bits,
    held_masses,
    lower,
    upper,
    target,
    VOCAB: tl.constexpr,  # noqa: N803
    top,
    temperature,
    COUNTS: tl.constexpr,  # noqa: N803
    HELD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The smallest bound in (lower, upper] within which the mass, or the number of tokens, reaches `target`."""
    while upper - lower > 1:
        middle = lower + (upper - lower) // 2
        sum_ = _within(logits, held_bits, held_masses, middle, VOCAB, top, temperature, COUNTS, HELD, BLOCK)
        lower = tl.where(sum_ < target, middle, lower)
        upper = tl.where(sum_ < target, upper, middle)
    return upper


@triton.jit
def _search(
    logits,
    held_bits,
    held_masses,
    lower,
    upper,
    target,
    by_count,
    by_mass,
    top_k,
    top_p,
    VOCAB: tl.constexpr,  # noqa: N803
    top,
    temperature,
    HELD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The bound of the last filter. That of the first filter lies in (lower, upper] and reaches `target`."""
    if by_count:
        upper = _reach(logits, held_bits, held_masses, lower, upper, target, VOCAB, top, temperature, True, HELD, BLOCK)
        if by_mass:
            mass = _within(logits, held_bits, held_masses, upper, VOCAB, top, temperature, False, HELD, BLOCK)
            # Top-k counts only some of the tokens that tie with its last one.
            extra = _within(logits, held_bits, held_masses, upper, VOCAB, top, temperature, True, HELD, BLOCK) - top_k
            target = _share(mass - extra * _mass(upper.to(tl.float32, bitcast=True)), top_p)
            lower = upper * 0 - 1
    if by_mass:
        upper = _reach(
            logits, held_bits, held_masses, lower, upper, target, VOCAB, top, temperature, False, HELD, BLOCK
        )
    return upper


@triton.jit
def bound_kernel(
    logits,
    row_stride,
    VOCAB: tl.constexpr,  # noqa: N803
    tops,
    temperatures,
    top_ks,
    top_ps,
    sums,
    candidates,
    bounds,
    PASSES: tl.constexpr,  # noqa: N803
    THRESHOLDS: tl.constexpr,  # noqa: N803
    CANDIDATES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row. bounds: [B], int32: the bits of the largest gap that top-k and then top-p keep."""
    row = tl.program_id(0)
    by_count, by_mass, top, temperature, top_k, top_p = _filters(row, VOCAB, tops, temperatures, top_ks, top_ps)
    bound = top_k * 0 + _KEEPS_ALL
    if by_count | by_mass:
        lower, upper, target, _, num_candidates, count, mass = _interval(
            sums, row, by_count, by_mass, top_k, top_p, VOCAB, PASSES, PASSES, THRESHOLDS, CANDIDATES
        )
        if num_candidates <= CANDIDATES:
            slots = tl.arange(0, CANDIDATES)
            gaps = gaps_of(candidates + row.to(tl.int64) * CANDIDATES, slots, num_candidates, top, temperature)
            bits = tl.where(slots < num_candidates, gaps.to(tl.int32, bitcast=True), _KEEPS_ALL)
            target -= tl.where(by_count, count, mass)
            bound = _search(
                logits, bits, _mass(gaps), lower, upper, target, by_count, by_mass, top_k, top_p,
                VOCAB, top, temperature, True, BLOCK,
            )  # fmt: skip
        else:
            logits += row.to(tl.int64) * row_stride
            bound = _search(
                logits, 0, 0, lower, upper, target, by_count, by_mass, top_k, top_p,
                VOCAB, top, temperature, False, BLOCK,
            )  # fmt: skip
    tl.store(bounds + row, bound)
