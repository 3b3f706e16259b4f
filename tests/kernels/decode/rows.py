"""Rows of decoding steps over small arenas, where all that must not be read is NaN, and attention spelled out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from hybridkv.kernels.decode.tables import DecodeTokens
from hybridkv.sight import EVERYTHING, Sight
from tests.devices import DEVICE, ON_GPU

FLOATS = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
"""The interpreter multiplies no bfloat16."""
ORDERS = list(permutations(range(3)))
"""Orders in which pages, tokens of a page and heads lie in an arena."""
PADDING = -1
TRAP = 1
"""A page that no table may lead to: it stays NaN. The null page stays NaN too."""


@dataclass(frozen=True)
class Rows:
    """Positions of the rows' tokens, and the pages of each: [blocks]."""

    positions: list[int]
    tables: list[list[int]]
    block_tokens: int
    sight: Sight
    num_pages: int

    def table(self, spare: int = 2) -> DecodeTokens:
        """Entries that no row may use lead to the trap. spare: such entries behind the longest row."""
        width = max(len(table) for table in self.tables) + spare
        flat = [page for table in self.tables for page in [*table, *[TRAP] * (width - len(table))]]
        return DecodeTokens(ints(self.positions), ints(flat), ints([width, 0]), self.block_tokens, self.sight)

    def seen(self, row: int) -> range:
        position = self.positions[row]
        return range(self.sight.first_visible(position), position + 1) if position != PADDING else range(0)

    def slots(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages, and offsets in them, of all that the row sees."""
        seen = torch.tensor(list(self.seen(row)), dtype=torch.int64)
        pages = torch.tensor(self.tables[row], dtype=torch.int64)[seen // self.block_tokens]
        return pages.to(DEVICE), (seen % self.block_tokens).to(DEVICE)


def ints(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def make_rows(positions: Sequence[int], block_tokens: int = 4, sight: Sight = EVERYTHING) -> Rows:
    """Pages are dealt at random."""
    lengths = [position // block_tokens + 1 if position != PADDING else 0 for position in positions]
    deck = (torch.randperm(sum(lengths)) + TRAP + 1).tolist()
    tables = []
    for position, length in zip(positions, lengths, strict=True):
        hidden = sight.first_visible(position) // block_tokens if length else 0
        tables.append([TRAP] * hidden + [deck.pop() for _ in range(length - hidden)])
    return Rows(list(positions), tables, block_tokens, sight, sum(lengths) + TRAP + 2)


def make_arena(
    rows: Rows, heads: int, dim: int, dtype: Any = torch.float32, order: Sequence[int] = (0, 1, 2), spare: int = 0
) -> torch.Tensor:
    """[P, T, H, D], in memory in this order, all NaN. spare: elements between vectors."""
    shape = [rows.num_pages, rows.block_tokens, heads]
    buffer = torch.full((*(shape[axis] for axis in order), dim + spare), math.nan, device=DEVICE).to(dtype)
    return buffer.permute(*(list(order).index(axis) for axis in range(3)), 3)[..., :dim]


def fill(rows: Rows, arena: torch.Tensor) -> list[torch.Tensor]:
    """Put random vectors where rows see them. Returns those by row, [seen, H, D], in float64, as the arena rounds."""
    contents = []
    for row in range(len(rows.positions)):
        vectors = torch.randn(len(rows.seen(row)), *arena.shape[2:], device=DEVICE).to(arena.dtype)
        pages, offsets = rows.slots(row)
        if len(pages):
            _bits(arena)[pages, offsets] = _bits(vectors)
        contents.append(vectors.double())
    return contents


def make_query(rows: Rows, heads: int, dim: int, dtype: Any = torch.float32) -> torch.Tensor:
    """[B, Hq, D], NaN for padding, and with strides of its own."""
    query = torch.randn(len(rows.positions), heads, dim + 8, device=DEVICE).to(dtype)[..., 8:]
    query[ints(rows.positions) == PADDING] = math.nan
    return query


def attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Row after row, in float64. keys, values: by row, [seen, H, D] -> [B, Hq, Dv]"""
    results = []
    for q, k, v in zip(query.double(), keys, values, strict=True):
        if not len(k):
            results.append(q.new_zeros(len(q), v.shape[-1]))
            continue
        folded = len(q) // k.shape[1]
        k, v = k.repeat_interleave(folded, 1), v.repeat_interleave(folded, 1)
        scores = torch.einsum("hd,lhd->hl", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        weights = torch.softmax(scores, 1)[:, : len(k)]
        results.append(torch.einsum("hl,lhd->hd", weights, v))
    return torch.stack(results)


def tolerance(dtype: Any) -> dict[str, float]:
    found = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}[dtype]
    return {"rtol": found, "atol": found}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Torch cannot index all kinds of fp8 on all devices."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
