"""Small arenas where all that must not be read is NaN, random packed steps over them, and attention spelled out."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from hybridkv.kernels.spans import PADDED, Span
from hybridkv.kernels.tokens import TokenTable, make_token_table
from hybridkv.memory import Uploader
from hybridkv.sight import Sight

NUM_LAYERS = 3
LAYER = 1
"""The one that is used; its neighbours must not be touched."""


@dataclass(frozen=True)
class Step:
    """A packed step of one token group."""

    block_tokens: int
    window: int | None
    chunk: int | None
    spans: list[Span]
    tables: list[array[int]]
    num_pages: int
    persistent: bool = False
    """Its table lies in buffers that stay, with all padding in it, as on a GPU."""

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    def first_visible(self, position: int) -> int:
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def slot(self, index: int, position: int) -> tuple[int, int]:
        return self.tables[index][position // self.block_tokens], position % self.block_tokens

    def is_padding(self, index: int) -> bool:
        return self.tables[index][-1] == PADDED

    @property
    def real(self) -> list[int]:
        """Spans that are no padding."""
        return [index for index in range(len(self.spans)) if not self.is_padding(index)]

    @property
    def real_rows(self) -> list[int]:
        return [row for i in self.real for row in range(self.spans[i].row, self.spans[i].row + self.spans[i].length)]

    @property
    def without_padding(self) -> Step:
        """The same requests, with the same pages."""
        spans, row = [], 0
        for index in self.real:
            spans.append(self.spans[index]._replace(row=row))
            row += spans[-1].length
        return replace(self, spans=spans, tables=[self.tables[index] for index in self.real])

    @property
    def sight(self) -> Sight:
        return Sight(self.window, self.chunk)

    def table(self) -> TokenTable:
        return make_token_table(
            self.spans,
            self.tables,
            block_tokens=self.block_tokens,
            uploader=Uploader(torch.get_default_device(), persistent=self.persistent),
            sight=self.sight,
        )


@st.composite
def steps(draw: Any, max_spans: int = 6) -> Step:
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    window, chunk = draw(
        st.one_of(
            st.just((None, None)),
            st.integers(1, 40).map(lambda n: (n, None)),
            st.integers(1, 40).map(lambda n: (None, n)),
        )
    )
    lengths = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 40))
    parts = draw(st.lists(st.tuples(st.integers(0, 70), lengths), min_size=1, max_size=max_spans))
    padded = draw(st.sets(st.integers(0, len(parts) - 1))) if draw(st.booleans()) else set()
    return make_step([(start, start + length) for start, length in parts], block_tokens, window, chunk, padded)


def make_step(
    ranges: list[tuple[int, int]],
    block_tokens: int = 4,
    window: int | None = None,
    chunk: int | None = None,
    padded: Collection[int] = (),
) -> Step:
    """Pages are dealt in turn; blocks that no query sees get the null page. Tables are longer than needed.

    The spans in `padded` are padding: they have no pages.
    """
    step = Step(block_tokens, window, chunk, [], [], 0)
    row = 0
    for start, end in ranges:
        step.spans.append(Span(row, start, end))
        row += end - start
        step.tables.append(array("i", [0] * (step.first_visible(start) // block_tokens)))
    for index in padded:
        step.tables[index] = array("i", [PADDED] * (ranges[index][1] // block_tokens + 2))
    page = 1
    for block in range(max(end for _, end in ranges) // block_tokens + 2):
        for span, table in zip(step.spans, step.tables, strict=True):
            if len(table) == block and block <= -(-span.end // block_tokens):
                table.append(page)
                page += 1
    return Step(block_tokens, window, chunk, step.spans, step.tables, page + 2)


class Arena:
    """Keys and values of a few layers in one buffer. All is NaN but the null page, until it is put there."""

    def __init__(self, step: Step, layout: str, heads: int, dims: tuple[int, int], dtype: Any = torch.float32) -> None:
        tokens, both = step.block_tokens, sum(dims)
        page = NUM_LAYERS * tokens * heads * both
        if layout == "heads":  # [head][layer][K or V][token]
            head, of_token = NUM_LAYERS * tokens * both, dims
            bases = (LAYER * tokens * both, LAYER * tokens * both + tokens * dims[0])
            strides = [(of_token[i], head) for i in range(2)]
        else:  # [token][layer][K or V][head]
            bases = (LAYER * heads * both, LAYER * heads * both + heads * dims[0])
            strides = [(NUM_LAYERS * heads * both, dims[i]) for i in range(2)]
        if layout == "padded":
            page += 7
        self.step = step
        self.buffer = torch.full((step.num_pages * page,), math.nan, dtype=dtype)
        self.buffer[:page] = 0
        self.keys, self.values = (
            self.buffer.as_strided((step.num_pages, tokens, heads, dim), (page, *pair, 1), base)
            for dim, pair, base in zip(dims, strides, bases, strict=True)
        )

    def put_past(self, view: torch.Tensor, contents: list[torch.Tensor]) -> None:
        """Tokens of earlier steps that this one sees. contents: by span, [end, H, D]."""
        for index in self.step.real:
            span = self.step.spans[index]
            for position in range(self.step.first_visible(span.start), span.start):
                view[self.step.slot(index, position)] = contents[index][position].to(view.dtype)


LAYOUTS = ["heads", "tokens", "padded"]
"""Heads outermost in a page; tokens outermost; the latter with pages that are no multiple of a token."""


def random_contents(step: Step, heads: int, dim: int, generator: torch.Generator) -> list[torch.Tensor]:
    """By span, a vector for each position up to its end. Padding is infinite: among NaN it would show."""
    contents = [torch.randn(span.end, heads, dim, generator=generator) for span in step.spans]
    for index in set(range(len(step.spans))) - set(step.real):
        contents[index].fill_(math.inf)
    return contents


def packed(step: Step, contents: list[torch.Tensor]) -> torch.Tensor:
    """What the step computes: the spans' own positions. [N, H, D]"""
    return torch.cat([x[span.start : span.end] for span, x in zip(step.spans, contents, strict=True)])


def reference(
    step: Step,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Query after query, head after head, in float64. Padding gives zero."""
    num_folded = query.shape[1] // keys[0].shape[1]
    rows = []
    for index, (span, key, value) in enumerate(zip(step.spans, keys, values, strict=True)):
        if step.is_padding(index):
            rows += [torch.zeros(query.shape[1], value.shape[-1], dtype=torch.float64)] * span.length
            continue
        for position in range(span.start, span.end):
            seen = slice(step.first_visible(position), position + 1)
            q = query[span.row + position - span.start].double()
            k, v = (x[seen].double().repeat_interleave(num_folded, 1) for x in (key, value))
            scores = torch.einsum("hd,lhd->hl", q, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp())
            rows.append(torch.einsum("hl,lhd->hd", weights / total[:, None], v))
    return torch.stack(rows)
