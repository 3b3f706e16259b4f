"""A step that follows another leaves in the buffer what writing it anew would leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.cache import StepTables
from hybridkv.cache.arena.pages import make_pages
from hybridkv.cache.steps.step_tables import Segment
from hybridkv.engine.decoding.step_buffer import Moved, Row, StepBuffer
from hybridkv.engine.sampling.device_draw import GREEDY, Draw
from hybridkv.kernels.spans import PADDED
from tests.engine.drive import Driver
from tests.engine.zoo import build

SIZE, MOST_TOKENS = 6, 1200


class Pair:
    """One buffer that follows, and one that is always written anew."""

    def __init__(self, family: str, data: st.DataObject) -> None:
        self.driver = Driver(build(family))
        self.data = data
        self.one, self.other = (self.buffer(), self.buffer())
        self.rows: list[Row | None] = []

    def buffer(self) -> StepBuffer:
        keys = self.driver.runner._tables.state_keys
        return StepBuffer(self.driver.layout, keys, torch.device("cpu"), max_rows=SIZE, max_tokens=MOST_TOKENS)

    def number(self, most: int) -> int:
        return self.data.draw(st.integers(0, most))

    def row(self, position: int) -> Row:
        block, layout = self.driver.layout.block_tokens, self.driver.layout
        tables = {
            group.name: make_pages([self.number(9999) for _ in range(position // block + 1)])
            for group in layout.token_groups
        }
        segments = {}
        for group in layout.state_groups:
            count = max(key.page + 1 for key in self.driver.runner._tables.state_keys if key.group == group.name)
            src, dst = (tuple(self.number(9999) for _ in range(count)) for _ in range(2))
            segments[group.name] = [Segment(position, position + 1, src, dst)]
        draw = Draw(0.5, self.number(9), 0.75, self.number(2**64 - 1)) if self.number(1) else GREEDY
        return Row(self.number(500), StepTables(position, position + 1, block, tables, segments), draw)

    def check(self) -> None:
        """Both buffers hold the same step."""
        found: Any = self.one.views(SIZE)
        expected: Any = self.other.views(SIZE)
        for name in ("tokens", "positions", "shifts"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for name, values in expected.draws.items():
            assert torch.equal(found.draws[name], values), name
        for key, states in expected.tables.segments.items():
            assert torch.equal(found.tables.segments[key].src, states.src)
            assert torch.equal(found.tables.segments[key].dst, states.dst)
        for name in expected.tables.tokens:
            ours, theirs = found.tables.tokens[name], expected.tables.tokens[name]
            assert torch.equal(ours.positions, theirs.positions)
            assert [_pages(ours, row) for row in range(SIZE)] == [_pages(theirs, row) for row in range(SIZE)]


def _pages(table: Any, row: int) -> list[int]:
    """The pages that a kernel reads of a row."""
    position = int(table.positions[row])
    if position == PADDED:
        return []
    width, origin = table.shape.tolist()
    first = origin + row * width
    pages: list[int] = table.pages[first : first + position // table.block_tokens + 1].tolist()
    assert position // table.block_tokens < width
    return pages


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_following_is_writing_anew(family: str, data: st.DataObject) -> None:
    pair = Pair(family, data)
    rows: list[Row | None] = [pair.row(pair.number(200)) for _ in range(1 + pair.number(SIZE - 2))]
    pair.one.fill([row for row in rows if row is not None], SIZE)
    for _ in range(3):
        places = [place for place, row in enumerate(rows) if row is not None]
        if not places:
            break
        tokens, seeds = (
            [pair.number(500) for _ in places],
            np.array([pair.number(2**64 - 1) for _ in places], np.uint64),
        )
        changed: dict[int, Row | None] = {}
        for place, token, seed in zip(places, tokens, seeds.tolist(), strict=True):
            row = rows[place]
            assert row is not None
            kind = pair.number(3)
            if kind == 0:
                changed[place] = None
            elif kind == 1:
                changed[place] = pair.row(min(row.tables.end + pair.number(400), MOST_TOKENS - 1))
            follows = Row(token, row.tables.following(), row.draw._replace(seed=seed))
            if follows.tables.start // follows.tables.block_tokens != row.tables.start // follows.tables.block_tokens:
                changed.setdefault(place, pair.row(row.tables.end))  # it needs a page
            rows[place] = changed.get(place, follows)
        pair.one.follow(Moved(places, tokens, seeds), changed)
        anew = [row or pair.row(0) for row in rows]
        pair.other.fill(anew, SIZE)
        fields = pair.other._host_fields(SIZE)
        for place, row in enumerate(rows):
            if row is None:
                pair.other._put_padding(fields, slice(place, place + 1))
        pair.check()
