"""Room in arenas that are hardly large enough, and what a replay leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridkv.cache import Cache, CacheGroup, CacheLayout, NoRoom, Role, extend_some
from hybridkv.replay.seen import Seen
from tests.replay.traces import blocks, mooncake, run


def test_a_lease_that_is_alone_goes_back_where_its_resuming_takes_the_room() -> None:
    """The block it resumes inside of and its copy do not fit both."""
    layout = CacheLayout.of([CacheGroup("full", Role.FULL, 1)], block_tokens=4, num_slabs=3)
    cache = Cache(layout, run_operations=lambda operations: None)
    first = cache.begin([1] * 6)
    assert not isinstance(cache.extend(first, 6), NoRoom)
    cache.commit(first)
    cache.release(first)
    lease = cache.begin([1] * 7)
    assert lease.computed == 6
    assert isinstance(cache.extend(lease, 1), NoRoom)
    step = extend_some(cache, lease, 1)
    assert not isinstance(step, NoRoom)
    assert step.start < 6
    cache.commit(lease)
    cache.check_integrity()


@pytest.mark.parametrize("serial", [True, False])
def test_prompts_alone_leave_nothing_at_their_very_end(tmp_path: Path, serial: bool) -> None:
    trace = mooncake(tmp_path, [blocks([1, 2, 3], 40, 9)])
    assert run(trace, serial=serial, prompts_only=True).checkpoints_kept == 1
    assert run(trace, serial=serial, prompts_only=False).checkpoints_kept == 2


def test_the_last_whole_block_of_a_trace_can_be_continued(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1, 2], 100, size=64), blocks([1, 3, 4], 150, size=64)])
    assert run(trace, serial=True, prompts_only=True).hit_tokens == 64


def test_what_has_been_computed_once_stays_seen(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([1, 2, 3], 40), blocks([1, 2, 3], 36)])
    seen = Seen(trace.num_pieces)
    seen.add(trace[0], 40)
    seen.add(trace[1], 36)
    assert seen.length(trace[0]) == 40
