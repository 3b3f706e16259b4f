"""Steps of several requests with states in pages, and what the kernels must do with them, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybridkv.cache import Segment
from hybridkv.kernels.segments import SegmentTable, make_segment_table
from hybridkv.kernels.spans import PADDED, Span
from hybridkv.memory import Uploader

CPU = torch.device("cpu")
Advance = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(state, token's row) -> (state after it, output), in float64"""


class StateStep(NamedTuple):
    spans: list[Span]
    segments: list[list[Segment]]
    num_pages: int
    page: int
    """Which of the pages of a state."""
    persistent: bool = False
    """Its table lies in buffers that stay, with all padding in it, as on a GPU."""

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def table(self) -> SegmentTable:
        return make_segment_table(
            self.spans,
            self.segments,
            page=self.page,
            uploader=Uploader(torch.get_default_device(), persistent=self.persistent),
        )

    @property
    def read(self) -> set[int]:
        """Pages that hold something before the step."""
        return {parts[0].src[self.page] for parts in self.segments} - {PADDED}

    @property
    def written(self) -> set[int]:
        return {part.dst[self.page] for parts in self.segments for part in parts} - {PADDED}

    @property
    def is_padding(self) -> list[bool]:
        """Of each span."""
        return [parts[0].src[self.page] == PADDED for parts in self.segments]

    @property
    def padded_rows(self) -> list[int]:
        pairs = zip(self.spans, self.is_padding, strict=True)
        return [row for span, is_padding in pairs if is_padding for row in range(span.row, span.row + span.length)]

    @property
    def without_padding(self) -> StateStep:
        """The same requests, with the same pages."""
        spans, segments, row = [], [], 0
        for span, parts, is_padding in zip(self.spans, self.segments, self.is_padding, strict=True):
            if not is_padding:
                spans.append(span._replace(row=row))
                segments.append(parts)
                row += span.length
        return self._replace(spans=spans, segments=segments)

    def arena(self, *shape: int, dtype: Any = torch.float32, scale: float = 1.0) -> Tensor:
        """States in pages that lie apart: NaN wherever nothing may be read, the null page zero."""
        whole = torch.full((self.num_pages, 3, *shape), torch.nan, dtype=dtype)
        for page in sorted(self.read):
            whole[page, 1] = torch.randn(shape).to(dtype) * scale
        whole[0] = 0
        return whole


def step_of(
    lengths: Sequence[int],
    cuts: Sequence[Sequence[int]] | None = None,
    srcs: Sequence[str] | None = None,
    state_pages: int = 1,
    page: int = 0,
) -> StateStep:
    """Spans of these lengths, cut after so many tokens.

    Each begins with a "null", "own", "shared" or "fresh" state, or is "padded".
    """
    cuts = cuts or [[] for _ in lengths]
    srcs = srcs or ["own" for _ in lengths]
    free = iter(range(1, 10_000))

    def take() -> tuple[int, ...]:
        return tuple(next(free) for _ in range(state_pages))

    shared, null, padded = take(), (0,) * state_pages, (PADDED,) * state_pages
    spans: list[Span] = []
    segments: list[list[Segment]] = []
    row = 0
    for i, (length, cut, kind) in enumerate(zip(lengths, cuts, srcs, strict=True)):
        start = 0 if kind in ("null", "padded") else 10 + i
        spans.append(Span(row, start, start + length))
        src = {"null": null, "shared": shared, "padded": padded}.get(kind) or take()
        bounds = [0, *sorted({at for at in cut if 0 < at < length}), length]
        parts = []
        for begin, end in itertools.pairwise(bounds):
            dst = src if kind == "padded" or (kind == "own" and end == length and begin == 0) else take()
            parts.append(Segment(start + begin, start + end, src, dst))
            src = dst
        segments.append(parts)
        row += length
    return StateStep(spans, segments, next(free), page)


@st.composite
def state_steps(draw: st.DrawFn, max_length: int = 24) -> StateStep:
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, max_length)), min_size=1, max_size=5))
    cuts = [draw(st.lists(st.integers(1, max_length), max_size=3)) for _ in lengths]
    srcs = [draw(st.sampled_from(["null", "own", "shared", "fresh", "padded"])) for _ in lengths]
    state_pages = draw(st.integers(1, 3))
    return step_of(lengths, cuts, srcs, state_pages, draw(st.integers(0, state_pages - 1)))


def run_naively(step: StateStep, arena: Tensor, advance: Advance) -> tuple[Tensor, Tensor]:
    """-> (outputs [N, ...], arena after the step), float64"""
    arena = arena.double()
    outputs = []
    for span, parts, is_padding in zip(step.spans, step.segments, step.is_padding, strict=True):
        if is_padding:
            outputs += [torch.zeros_like(advance(arena[0, 1], span.row)[1])] * span.length
            continue
        state = arena[parts[0].src[step.page], 1].clone()
        row = span.row
        for part in parts:
            for _ in range(part.start, part.end):
                state, y = advance(state, row)
                outputs.append(y)
                row += 1
            arena[part.dst[step.page], 1] = state
    return torch.stack(outputs), arena


def check_step(
    step: StateStep, arena: Tensor, run: Callable[[Tensor, SegmentTable], Tensor], advance: Advance, tolerance: float
) -> None:
    """The outputs are right, so is every state written, and no other byte of the arena has changed."""
    expected, expected_arena = run_naively(step, arena, advance)
    before = arena.clone()
    actual = run(arena[:, 1], step.table)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    written = sorted(step.written)
    torch.testing.assert_close(arena[written, 1].double(), expected_arena[written, 1], rtol=tolerance, atol=tolerance)
    before[written, 1] = arena[written, 1]
    assert torch.equal(before.nan_to_num(nan=1e30), arena.nan_to_num(nan=1e30))
    assert not arena[0].any()
