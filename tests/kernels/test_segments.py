"""Segments as index tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import Segment
from hybridkv.kernels.segments import make_segment_table
from hybridkv.kernels.spans import Span
from hybridkv.memory import Uploader
from tests.kernels.states import CPU, StateStep, state_steps, step_of


@given(step=state_steps(), chunk_tokens=st.sampled_from([8, 16]))
def test_every_token_of_a_longer_span_is_in_one_place_of_one_chunk(step: StateStep, chunk_tokens: int) -> None:
    table = step.table
    if not table.has_long:
        return
    schedule = table.schedule(chunk_tokens)
    longer = [
        span for span, padding in zip(step.spans, step.is_padding, strict=True) if span.length > 1 and not padding
    ]
    rows = [row for span in longer for row in range(span.row, span.row + span.length)]
    assert sorted(schedule.tokens.tolist()) == rows
    assert schedule.rows[schedule.mask.flatten()].tolist() == schedule.tokens.tolist()
    assert schedule.mask.flatten().nonzero().flatten().tolist() == schedule.places.tolist()


@given(step=state_steps(), chunk_tokens=st.sampled_from([8, 16]))
def test_what_is_taken_comes_back(step: StateStep, chunk_tokens: int) -> None:
    table = step.table
    if not table.has_long:
        return
    schedule = table.schedule(chunk_tokens)
    x, out = torch.arange(step.num_tokens), torch.full((step.num_tokens,), -1)
    for steps in schedule.blocks(1):
        first, last = steps[0].first, steps[-1].last
        schedule.put(schedule.take(x, first, last), out, first, last)
    assert sorted(out[out >= 0].tolist()) == sorted(schedule.tokens.tolist())
    assert torch.equal(out[out >= 0], x[out >= 0])


@given(step=state_steps())
def test_each_page_is_written_once(step: StateStep) -> None:
    table = step.table
    written = [] if table.ones is None else list(table.ones.dst.on_host)
    if table.has_long:
        for part in table.schedule(8).rounds:
            if part.write is not None:
                assert part.write.dst.on_device.tolist() == part.write.dst.on_host
                written += part.write.dst.on_host
    assert sorted(written) == sorted(step.written)


def test_chunks_are_no_longer_than_the_longest_segment_needs() -> None:
    assert step_of([3, 1, 5]).table.schedule(64).chunk_tokens == 8
    assert step_of([3, 30], cuts=[[], [18]]).table.schedule(64).chunk_tokens == 32
    assert step_of([500]).table.schedule(64).chunk_tokens == 64


def test_tables_are_made_once() -> None:
    table = step_of([5, 1]).table
    assert table.schedule(16) is table.schedule(16)
    assert table.edges(3) is table.edges(3)


@pytest.mark.parametrize("bounds", [[(4, 9)], [(3, 8)], [(3, 5), (6, 9)], [(3, 3), (3, 9)], []])
def test_segments_that_do_not_cover_their_span_are_refused(bounds: list[tuple[int, int]]) -> None:
    segments = [Segment(start, end, (0,), (1,)) for start, end in bounds]
    with pytest.raises(ValueError, match="3 to 9"):
        make_segment_table([Span(0, 3, 9)], [segments], uploader=Uploader(CPU))
