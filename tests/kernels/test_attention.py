"""Attention over pages equals attention spelled out, whatever is in the slots that no query sees."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.kernels import attention, cover, softmax
from hybridkv.kernels.attention import attend, attend_visible
from hybridkv.kernels.spans import Span
from hybridkv.kernels.tokens import gather_tokens, write_tokens
from hybridkv.sight import Sight
from tests.devices import needs_gpu
from tests.kernels.arenas import LAYOUTS, Arena, Step, make_step, packed, random_contents, reference, steps

SCALE = 0.3
heads_of = st.tuples(st.integers(1, 3), st.integers(1, 4))
"""KV heads, and query heads for each."""
extras = st.sampled_from([{}, {"sinks": True}, {"softcap": 2.0}, {"sinks": True, "softcap": 2.0}])
tiles = st.sampled_from([1, 3, 8, 512])
free_padding = st.sampled_from([0, 16, 256])
short = st.sampled_from([1, 3, 8])


class Problem:
    """A step with random queries and contents, and the answer."""

    def __init__(
        self,
        step: Step,
        layout: str = "heads",
        heads: tuple[int, int] = (2, 2),
        dims: tuple[int, int] = (8, 8),
        arena_dtype: Any = torch.float32,
        sinks: bool = False,
        softcap: float | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.arena = Arena(step, layout, heads[0], dims, arena_dtype)
        self.table = step.table()
        num_queries = heads[0] * heads[1]
        self.query = torch.full((step.num_tokens, num_queries, dims[0]), math.nan)
        self.query[step.real_rows] = torch.randn(len(step.real_rows), num_queries, dims[0], generator=generator)
        self.extras: dict[str, Any] = {
            "scale": SCALE,
            "sinks": torch.randn(num_queries, generator=generator) if sinks else None,
            "softcap": softcap,
        }
        contents: list[list[torch.Tensor]] = []
        for view, dim in ((self.arena.keys, dims[0]), (self.arena.values, dims[1])):
            contents.append([x.to(arena_dtype) for x in random_contents(step, heads[0], dim, generator)])
            self.arena.put_past(view, contents[-1])
            write_tokens(view, self.table, packed(step, contents[-1]))
        self.answer = reference(step, self.query, contents[0], contents[1], **self.extras)

    def attend(self, **changes: Any) -> torch.Tensor:
        return attend(self.query, self.arena.keys, self.arena.values, self.table, **{**self.extras, **changes})

    def attend_visible(self) -> torch.Tensor:
        key, value = (gather_tokens(view, self.table) for view in (self.arena.keys, self.arena.values))
        return attend_visible(self.query, key, value, self.table, **self.extras)

    def check(self, output: torch.Tensor, tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(output.double(), self.answer, rtol=tolerance, atol=tolerance)


@settings(max_examples=150)
@given(steps(), st.sampled_from(LAYOUTS), heads_of, extras, tiles, free_padding, short)
def test_pages_equal_the_reference_and_hidden_slots_do_not_matter(
    step: Step, layout: str, heads: tuple[int, int], extras: dict[str, Any], tile: int, padding: int, short: int
) -> None:
    with (
        patch.object(cover, "TILE_TOKENS_CPU", tile),
        patch.object(cover, "FREE_PADDING_TOKENS", padding),
        patch.object(cover, "SHORT_TOKENS", short),
    ):
        problem = Problem(step, layout, heads, **extras)
        problem.check(problem.attend())


@given(steps(), heads_of, st.sampled_from([(8, 8), (8, 4), (4, 8)]), extras, tiles, short)
def test_gathered_tokens_equal_the_reference(
    step: Step, heads: tuple[int, int], dims: tuple[int, int], extras: dict[str, Any], tile: int, short: int
) -> None:
    with patch.object(cover, "TILE_TOKENS_CPU", tile), patch.object(cover, "SHORT_TOKENS", short):
        problem = Problem(step, "tokens", heads, dims, **extras)
        problem.check(problem.attend_visible())
        problem.check(problem.attend())


@settings(max_examples=30)
@given(steps())
def test_attention_reads_only(step: Step) -> None:
    problem = Problem(step)
    before = problem.arena.buffer.clone()
    problem.attend()
    torch.testing.assert_close(problem.arena.buffer, before, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=30)
@given(steps(), extras)
def test_layers_share_a_table(step: Step, extras: dict[str, Any]) -> None:
    problem = Problem(step, **extras)
    first = problem.attend()
    assert torch.equal(problem.attend(), first)
    problem.check(problem.attend(sinks=None, softcap=None) if not extras else first)


@settings(max_examples=30)
@given(steps(), extras)
def test_lower_precision_stays_near_the_reference(step: Step, extras: dict[str, Any]) -> None:
    problem = Problem(step, arena_dtype=torch.bfloat16, **extras)
    problem.query = problem.query.bfloat16()
    output = problem.attend()
    assert output.dtype == torch.bfloat16
    problem.check(output, 0.06)


@settings(max_examples=30)
@given(steps())
def test_what_is_kept_narrower_is_widened_to_the_query(step: Step) -> None:
    problem = Problem(step, arena_dtype=torch.bfloat16)
    output = problem.attend()
    assert output.dtype == torch.float32
    problem.check(output)


@settings(max_examples=30)
@given(steps(), st.sampled_from([{"softcap": 2.0}, {"sinks": True, "softcap": 2.0}]))
def test_spelled_out_attention_in_few_rows_at_a_time(step: Step, extras: dict[str, Any]) -> None:
    with patch.object(softmax, "EXPLICIT_SCORES", 64):
        problem = Problem(step, **extras)
        problem.check(problem.attend())


@pytest.mark.parametrize("window", [None, 11])
def test_sinks_without_a_fused_kernel(window: int | None) -> None:
    problem = Problem(make_step([(0, 30), (9, 10), (5, 6), (40, 60)], window=window), sinks=True)
    with patch.object(attention, "is_fused", return_value=False), patch.object(softmax, "is_fused", return_value=False):
        problem.check(problem.attend())


@settings(max_examples=30)
@given(steps())
def test_queries_may_have_any_strides(step: Step) -> None:
    problem = Problem(step)
    problem.query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    problem.check(problem.attend())


@pytest.mark.parametrize("window", [None, 700])
def test_a_prompt_longer_than_a_tile(window: int | None) -> None:
    problem = Problem(make_step([(0, 1100), (600, 1200)], 16, window), heads=(1, 1), dims=(4, 4))
    problem.check(problem.attend())


def test_large_scores_do_not_overflow() -> None:
    problem = Problem(make_step([(0, 20), (30, 31), (8, 9)]), sinks=True)
    assert problem.attend(scale=500.0).isfinite().all()


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=64))
def test_decoding_is_batched_whatever_the_lengths(ends: list[int]) -> None:
    visibles = [cover.see(Span(row, end - 1, end), Sight(), 16) for row, end in enumerate(ends)]
    buckets = cover.fill_buckets(visibles, 16, None)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(ends)))
    assert len(buckets) <= 12
    seen = sum(visible.num_blocks for visible in visibles)
    gathered = sum(len(bucket) * max(visibles[index].num_blocks for index in bucket) for bucket in buckets)
    assert gathered <= seen * 4 / 3 + len(buckets) * cover.FREE_PADDING_TOKENS / 16


def test_buckets_fit_the_cache_unless_one_span_does_not() -> None:
    visibles = [cover.see(Span(row, end - 1, end), Sight(), 16) for row, end in enumerate([500] * 9 + [5000] * 2)]
    buckets = cover.fill_buckets(visibles, 16, 2048)
    assert sorted(map(len, buckets)) == [1, 1, 1, 4, 4]


def test_a_window_reads_only_its_own_pages() -> None:
    table = make_step([(4000, 4001), (3000, 3100)], 16, window=100).table()
    assert table.buckets[0].pages.numel() <= 100 // 16 + 2
    assert table.tiled_spans[0].pages.numel() <= 200 // 16 + 2


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_queries", [1, 2, 63, 64, 65, 66, 127, 128, 129, 193])
def test_masked_attention_on_a_gpu_is_right_for_any_number_of_queries(num_queries: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_queries)
    query, key, value = (torch.randn(2, 2, n, 24, generator=generator) for n in (num_queries, 200, 200))
    mask = torch.zeros(num_queries, 200).masked_fill_(torch.ones(num_queries, 200).triu(7).bool(), -math.inf)
    expected = (query.double() @ key.double().mT * 0.2 + mask.double()).softmax(-1) @ value.double()
    query, key, value, mask = (x.to("cuda", dtype) for x in (query, key, value, mask))
    found = softmax.dense_attention(query, key, value, mask, False, softmax.Extras(0.2, None, None))
    assert float((found.double().cpu() - expected).abs().max()) < (1e-5 if dtype == torch.float32 else 0.1)
