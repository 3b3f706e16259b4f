"""A following step leaves the same numbers on the device as a step that the host writes completely."""

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
from tests.devices import DEVICE, uses_device
from tests.engine.drive import Driver
from tests.engine.zoo import build

pytestmark = uses_device
SIZE, MOST_TOKENS = 6, 1200


class Pair:
    """Two buffers. One gets following steps, the other gets the same steps as complete ones."""

    def __init__(self, family: str, data: st.DataObject) -> None:
        self.driver = Driver(build(family))
        self.data = data
        self.one, self.other = (self.buffer(), self.buffer())

    def buffer(self) -> StepBuffer:
        keys = self.driver.runner._tables.state_keys
        return StepBuffer(self.driver.layout, keys, torch.device(DEVICE), max_rows=SIZE, max_tokens=MOST_TOKENS)

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

    def expect(self, rows: dict[int, Row]) -> None:
        """Write a complete step, with gaps."""
        filler = self.row(0)
        self.other.fill([rows.get(place, filler) for place in range(SIZE)], SIZE)
        self.other._put_padding(self.other._host_fields(SIZE), [place for place in range(SIZE) if place not in rows])
        self.other._copy(0, self.other._end())

    def check(self) -> None:
        """Both buffers hold the same step."""
        found: Any = self.one.views(SIZE)
        expected: Any = self.other.views(SIZE)
        for name in ("tokens", "positions", "shifts"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        is_row = expected.numbers.places != PADDED
        for name in ("left", "ends"):
            assert torch.equal(getattr(found.numbers, name)[is_row], getattr(expected.numbers, name)[is_row]), name
        for name, values in expected.draws.items():
            assert torch.equal(found.draws[name][is_row], values[is_row]), name
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


def random_ends(pair: Pair) -> tuple[int, ...]:
    return tuple(sorted({pair.number(500) for _ in range(pair.number(3))}))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_following_steps_are_as_complete_ones(family: str, data: st.DataObject) -> None:
    """By the host, which knows tokens and new pages, and by the device alone."""
    pair = Pair(family, data)
    rows: dict[int, Row] = {}
    for place in range(1 + pair.number(SIZE - 2)):
        rows[place] = pair.row(pair.number(200))._replace(ends=random_ends(pair), left=pair.number(3))
    pair.one.fill(list(rows.values()), SIZE)
    for _ in range(4):
        places = list(rows)
        if not places:
            break
        ends = [end for row in rows.values() for end in row.ends] or [7]
        tokens = [data.draw(st.one_of(st.integers(-1, 500), st.sampled_from(ends))) for _ in places]
        seeds = np.array([pair.number(2**64 - 1) for _ in places], np.uint64)
        by_device = bool(pair.number(1))
        grown: dict[int, StepTables] = {}
        changed: dict[int, Row | None] = {}
        for place, token, seed in zip(places, tokens, seeds.tolist(), strict=True):
            row = rows[place]
            tables, block = row.tables.following(), row.tables.block_tokens
            if tables.start // block != row.tables.start // block:
                fresh = pair.row(tables.start).tables  # the pages before stay the same
                tables = tables._replace(
                    tables={name: pages + fresh.tables[name][-1:] for name, pages in row.tables.tables.items()}
                )
                grown[place] = tables
            rows[place] = row._replace(token=token, tables=tables, left=row.left - 1, draw=row.draw._replace(seed=seed))
            has_ended = token < 0 or token in row.ends or row.left <= 0
            if (by_device and has_ended) or (not by_device and pair.number(3) == 0):
                del rows[place]
                changed[place] = None
            elif not by_device and pair.number(3) == 0:
                position = min(row.tables.end + pair.number(400), MOST_TOKENS - 1)
                changed[place] = rows[place] = pair.row(position)._replace(ends=random_ends(pair), left=2)
        if by_device:
            drawn = torch.full((SIZE,), 3, device=DEVICE)
            drawn[places] = torch.tensor(tokens, device=DEVICE)
            pair.one.advance(Moved(places, seeds, grown), drawn)
            pair.one.retire(list(changed))
        else:
            pair.one.follow(Moved(places, seeds, grown), tokens, changed)
        pair.expect(rows)
        pair.check()
