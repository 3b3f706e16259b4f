"""Copies between tiers that hang, fail in ways nobody foresaw, or are too much at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hybridkv.store import FileStore, MemoryStore, Reader, StoreFault, Tier, TieredStore, WritePolicy
from hybridkv.store.tiers.copy_queue import CopyQueue, CopyTask
from tests.patience import Stopwatch
from tests.store.faulty import Fault, FaultyStore, Kind
from tests.store.samples import ROWS, load, name_of, rows_of, save

NAMES = [name_of(number) for number in range(12)]
ONE = 8192


def seconds_of(call: Callable[[], Any]) -> float:
    start = Stopwatch()
    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return start.seconds


def test_a_copy_that_hangs_keeps_no_store_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    slow = Fault(Kind.SLOW_WRITE)
    above, below = FaultyStore(MemoryStore(1 << 20), [slow]), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)], patience_s=0.1)
    for name in NAMES:
        save(below, name)
        load(store, name)
    assert slow.reached.wait(5)
    assert seconds_of(store.close) < 5
    assert "hang: what has not been written by now is lost" in caplog.text
    slow.release.set()


def test_a_copy_down_that_hangs_is_waited_for_once() -> None:
    slow = Fault(Kind.SLOW_WRITE)
    above, below = MemoryStore(1 << 20), FaultyStore(MemoryStore(1 << 20), [slow])
    store = TieredStore([Tier(above, WritePolicy.BACK), Tier(below)], most_waiting_bytes=1, patience_s=0.2)
    for name in NAMES:
        save(store, name)
    assert seconds_of(store.close) < 5 * 0.2 + 1
    slow.release.set()


def test_copies_that_take_their_time_are_waited_for() -> None:
    """Patience is for each of them, not for all."""
    done: list[int] = []
    copies = CopyQueue(1)

    def run(number: int) -> None:
        time.sleep(0.1)
        done.append(number)

    for number in range(5):
        assert copies.hand_over(CopyTask(1, lambda number=number: run(number)), 2.0)  # type: ignore[misc]
    assert copies.close(2.0)
    assert done == list(range(5))
    assert not copies.offer(CopyTask(1, lambda: None))
    assert not copies.hand_over(CopyTask(1, lambda: None), 2.0)
    assert not copies.reserve(1)


@pytest.mark.parametrize("error", [KeyError, MemoryError, SystemExit])
def test_a_copy_that_fails_in_any_way_does_not_end_the_next(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: object, **__: object) -> None:
        raise error("injected")

    above, below = MemoryStore(1 << 20), MemoryStore(1 << 20)
    store = TieredStore([Tier(above), Tier(below)])
    save(below, NAMES[0])
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "hybridkv.store"):
        patch.setattr(above, "create", raises)
        assert load(store, NAMES[0]) == rows_of(NAMES[0])
        store.drain()
    assert "could not be copied between tiers" in caplog.text
    load(store, NAMES[0])
    store.drain()
    assert load(above, NAMES[0]) == rows_of(NAMES[0])
    assert (store.stats.promoted, above.stats.nbytes) == (1, above.stats.saved_bytes)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_fault_of_one_tier_while_beginning_leaves_it_out(bad: int) -> None:
    """Without guards: the other tier has the object, and no pending blob is left of it anywhere."""
    tiers = [FaultyStore(MemoryStore(1 << 20)) for _ in range(2)]
    tiers[bad].faults.append(Fault(Kind.FAIL_CREATE))
    store = TieredStore([Tier(tier) for tier in tiers])
    assert save(store, NAMES[0])
    assert load(tiers[1 - bad], NAMES[0]) == rows_of(NAMES[0])
    assert tiers[bad].stats.nbytes == 0


def test_what_nobody_foresaw_while_beginning_leaves_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> None:
        raise KeyError("injected")

    above, below = MemoryStore(1 << 20), MemoryStore(1 << 20)
    monkeypatch.setattr(below, "create", raises)
    with pytest.raises(KeyError):
        TieredStore([Tier(above), Tier(below)]).create(NAMES[0], ROWS, value=1, position=0)
    assert above.stats.nbytes == 0


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_no_more_is_evicted_at_once_than_can_be_taken(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 64th of a large store is more than may wait to be written elsewhere."""
    monkeypatch.setattr("hybridkv.store.eviction.MOST_TOLD_BYTES", 2 * ONE)
    gone: list[Reader] = []
    size = 64 * 8 * ONE
    with MemoryStore(size) if kind == "memory" else FileStore(tmp_path, size) as store:
        for number in range(64 * 8):
            save(store, name_of(number), [4096])
        save(store, name_of("one more"), [4096])
        assert store.stats.evicted == 1 + 8
        store.on_evict(gone.append)
        for number in range(8 + 1):
            save(store, name_of(f"more {number}"), [4096])
        assert len(gone) == 1 + 2
        for reader in gone:
            reader.close()


def fails(reader: Reader) -> None:
    with pytest.raises(StoreFault):
        reader.read(0, [memoryview(bytearray(ROWS[0]))])


def test_a_reader_closed_while_it_turns_to_the_next_tier_leaves_nothing_open() -> None:
    above, below = FaultyStore(MemoryStore(1 << 20)), FaultyStore(MemoryStore(1 << 20))
    store = TieredStore([Tier(above), Tier(below)])
    save(store, NAMES[0])
    reader = store.open(NAMES[0])
    slow = Fault(Kind.SLOW)
    above.faults += [slow, Fault(Kind.FAIL_READ)]
    thread = Thread(target=fails, args=(reader,))
    thread.start()
    assert slow.reached.wait(5)
    reader.close()
    slow.release.set()
    thread.join(5)
    assert below.stats.opened == 0
