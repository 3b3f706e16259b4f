"""Tokens are written where the table says and nowhere else, and gathered exactly as far as they are visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.kernels.tokens import gather_tokens, write_tokens
from tests.kernels.arenas import LAYOUTS, Arena, Step, make_step, packed, random_contents, steps


@given(steps(), st.sampled_from(LAYOUTS), st.integers(1, 3))
def test_a_step_writes_its_own_slots_and_nothing_else(step: Step, layout: str, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    arena, expected = Arena(step, layout, heads, (4, 2)), Arena(step, layout, heads, (4, 2))
    for view, twin in ((arena.keys, expected.keys), (arena.values, expected.values)):
        contents = random_contents(step, heads, view.shape[-1], generator)
        write_tokens(view, step.table(), packed(step, contents))
        for index in step.real:
            for position in range(step.spans[index].start, step.spans[index].end):
                twin[step.slot(index, position)] = contents[index][position]
    torch.testing.assert_close(arena.buffer, expected.buffer, rtol=0, atol=0, equal_nan=True)


@given(steps(), st.sampled_from(LAYOUTS), st.integers(1, 3))
def test_gathered_are_exactly_the_visible_tokens_in_order(step: Step, layout: str, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    arena, table = Arena(step, layout, heads, (4, 2)), step.table()
    for view in (arena.keys, arena.values):
        contents = random_contents(step, heads, view.shape[-1], generator)
        arena.put_past(view, contents)
        write_tokens(view, table, packed(step, contents))
        visible = [contents[i][step.first_visible(step.spans[i].start) :] for i in step.real]
        assert table.num_visible == sum(len(x) for x in visible)
        assert table.visible_lengths == [len(x) for x in visible]
        torch.testing.assert_close(gather_tokens(view, table), torch.cat([contents[0][:0], *visible]), rtol=0, atol=0)


def test_what_is_kept_is_kept_in_the_arenas_dtype() -> None:
    step = make_step([(0, 9)])
    arena = Arena(step, "heads", 1, (4, 4), torch.bfloat16)
    values = torch.full((9, 1, 4), 1 + 2**-12)
    write_tokens(arena.keys, step.table(), values)
    gathered = gather_tokens(arena.keys, step.table())
    assert gathered.dtype == torch.bfloat16
    assert (gathered == 1).all()


def test_a_table_does_not_follow_its_lease() -> None:
    step = make_step([(3, 20), (7, 8)])
    table, fresh = step.table(), step.table()
    for pages in step.tables:
        pages[:] = type(pages)("i", [0] * len(pages))
    for name in ("pages", "offsets"):
        assert torch.equal(getattr(table, name), getattr(fresh, name))
    assert all(page.min() > 0 for page in table.visible_slots[:1])


@pytest.mark.parametrize("kind", [list, tuple])
def test_tables_may_be_any_sequence(kind: Any) -> None:
    step = make_step([(3, 20), (7, 8)], window=5)
    other = Step(step.block_tokens, step.window, None, step.spans, [kind(table) for table in step.tables], 0)
    assert torch.equal(step.table().pages, other.table().pages)
