"""Prefetch: what a waiting request will load moves up before it is needed, within bounds, and is not read twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hybridkv.store import MemoryStore, Tier, TieredStore
from hybridkv.store.tiers.prefetch import Prefetcher
from tests.patience import Stopwatch
from tests.store.faulty import Fault, FaultyStore, Kind
from tests.store.samples import load, name_of, rows_of, save

NAMES = [name_of(number) for number in range(12)]
ONE = 41_000
"""Bytes of one object, rounded up."""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.001)


def stored(*, upper: int = 1 << 24, faults: list[Fault] | None = None) -> tuple[MemoryStore, FaultyStore, TieredStore]:
    above, below = MemoryStore(upper), FaultyStore(MemoryStore(1 << 24), faults or [])
    for name in NAMES:
        save(below, name)
    return above, below, TieredStore([Tier(above), Tier(below)])


def test_objects_move_up_before_they_are_opened() -> None:
    above, below, store = stored()
    assert store.can_prefetch
    store.prefetch(NAMES[:4])
    until(lambda: store.stats.prefetched == 4)
    assert above.lookup(NAMES) == [True] * 4 + [False] * 8
    below.delete(NAMES)
    assert load(store, NAMES[0]) == rows_of(NAMES[0])
    assert store.stats.promoted == 0
    store.close()


def test_what_is_there_or_nowhere_is_not_copied() -> None:
    _, below, store = stored()
    load(store, NAMES[0])
    store.drain()
    opened = below.stats.opened
    store.prefetch([NAMES[0], name_of(99)])
    store.prefetch([NAMES[1]])
    until(lambda: store.stats.prefetched == 1)
    assert below.stats.opened == opened + 1
    store.close()


def test_what_a_request_opens_first_is_left_to_it() -> None:
    slow = Fault(Kind.SLOW, times=4)
    _, below, store = stored(faults=[slow])
    store.prefetch(NAMES)
    until(lambda: slow.struck == 4)
    readers = store.open_all(NAMES[4:])
    slow.release.set()
    until(lambda: store.stats.prefetched == 4)
    assert below.stats.opened == len(NAMES)
    for reader in readers:
        reader.close()  # type: ignore[union-attr]
    store.close()


def test_it_takes_a_part_of_the_fastest_tier_only() -> None:
    above, _, store = stored(upper=16 * ONE)
    store.prefetch(NAMES)
    until(lambda: store.stats.prefetched == 4 and not store._prefetcher._wanted)
    assert sum(above.lookup(NAMES)) == 4
    opened = [name for name, there in zip(NAMES, above.lookup(NAMES), strict=True) if there]
    load(store, opened[0])
    store.prefetch([name for name in NAMES if name not in opened])
    until(lambda: store.stats.prefetched == 5)
    store.close()


def test_what_nobody_opened_counts_no_more_after_a_while() -> None:
    now = [0.0]
    above, below, _ = stored(upper=4 * ONE)
    copied: list[int] = []
    prefetcher = Prefetcher([above, below], lambda: copied.append(1), clock=lambda: now[0])
    prefetcher.want(NAMES[:3])
    until(lambda: not prefetcher._wanted and len(copied) == 1)
    now[0] = 61.0
    prefetcher.want([NAMES[5]])
    until(lambda: len(copied) == 2)
    prefetcher.close(5.0)


@pytest.mark.parametrize("kind", [Kind.FLIP_ROW, Kind.FAIL_READ, Kind.FAIL_OPEN, Kind.SHORT_ROW])
def test_an_object_that_cannot_be_read_is_not_kept(kind: Kind) -> None:
    fault = Fault(kind, times=1)
    above, _, store = stored(faults=[fault])
    store.prefetch(NAMES[:3])
    until(lambda: store.stats.prefetched == 2)
    assert sum(above.lookup(NAMES)) == 2
    assert fault.struck == 1
    store.close()


def test_closing_does_not_wait_for_a_copy_that_hangs() -> None:
    slow = Fault(Kind.SLOW)
    above, below, _ = stored(faults=[slow])
    store = TieredStore([Tier(above), Tier(below)], patience_s=0.1)
    store.prefetch(NAMES)
    assert slow.reached.wait(20)
    began = Stopwatch()
    store.close()
    assert began.seconds < 10
    slow.release.set()


def test_a_single_store_has_nothing_to_prefetch() -> None:
    store = MemoryStore(1 << 24)
    assert not store.can_prefetch
    store.prefetch(NAMES)
    assert not TieredStore([Tier(store)]).can_prefetch
