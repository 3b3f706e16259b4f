"""Parts of the Mooncake store that need no server: bounded calls, transfer memory, the last count of objects."""

from __future__ import annotations

import random
import sys
import threading
import time
from itertools import pairwise

import pytest

from hybridkv.store import StoreError, StoreFault, StoreInputError
from hybridkv.store.blobs import Usage
from hybridkv.store.mooncake import opening
from hybridkv.store.mooncake.calls import Calls
from hybridkv.store.mooncake.client import Client
from hybridkv.store.mooncake.staging import Region, Staging
from hybridkv.store.mooncake.usage import RecentUsage
from hybridkv.store.urls import parse_url


def free(staging: Staging) -> list[tuple[int, int]]:
    return [part for half in staging._free.values() for part in half]


def test_a_call_returns_and_raises_as_it_is() -> None:
    calls = Calls("here", 1.0)
    assert calls.run("add", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        calls.run("divide", lambda: 1 // 0)
    assert (calls.made, calls.hung) == (2, 0)
    calls.close()
    with pytest.raises(StoreError, match="here: cannot add: the store is closed"):
        calls.run("add", lambda: 1)


def test_a_hung_call_is_abandoned_and_cleaned_up_later() -> None:
    calls, release, cleaned = Calls("here", 0.05), threading.Event(), threading.Event()
    with pytest.raises(StoreFault, match=r"here: cannot wait: no answer within 0\.05 s"):
        calls.run("wait", release.wait, late=cleaned.set)
    assert calls.hung == 1
    assert not cleaned.is_set()
    assert calls.run("add", lambda: 2) == 2, "others go on"
    release.set()
    assert cleaned.wait(5)
    calls.close()


def test_too_many_hung_calls_fail_at_once_until_they_return() -> None:
    calls, release = Calls("here", 0.01), threading.Event()
    for _ in range(16):
        with pytest.raises(StoreFault, match="no answer"):
            calls.run("wait", release.wait)
    with pytest.raises(StoreFault, match="16 earlier calls still hang"):
        calls.run("add", lambda: 1)
    release.set()
    deadline = time.monotonic() + 5
    while calls.hung:
        assert time.monotonic() < deadline
    assert calls.run("add", lambda: 1) == 1
    calls.close()


def test_idle_threads_are_few_and_end() -> None:
    before = threading.active_count()
    calls, barrier = Calls("here", 5.0), threading.Barrier(20)
    callers = [threading.Thread(target=calls.run, args=("wait", barrier.wait)) for _ in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    calls.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "threads are left"


def test_regions_never_overlap_and_all_come_back() -> None:
    source, staging = random.Random(3), Staging("here", 1 << 20)
    before, taken = free(staging), list[Region]()
    for _ in range(2000):
        if taken and source.random() < 0.5:
            taken.pop(source.randrange(len(taken))).release()
        elif (region := staging.take_for_write(source.randrange(1, 100_000))) is not None:
            assert len(region.view) == region.nbytes
            ends = sorted((one.start, one.start + one.nbytes) for one in [*taken, region])
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert region.start + region.nbytes <= 1 << 19, "writes stay in their half"
            taken.append(region)
    for region in taken:
        region.release()
    assert free(staging) == before


def test_a_read_waits_for_memory_but_not_forever() -> None:
    staging = Staging("here", 1 << 20)
    region = staging.take(400_000, 1.0)
    with pytest.raises(StoreFault, match="raise buffer="):
        staging.take(400_000, 0.05)
    threading.Timer(0.05, region.release).start()
    staging.take(400_000, 5.0).release()


def test_memory_of_an_abandoned_call_is_not_used_again_while_it_runs() -> None:
    staging, calls, release = Staging("here", 1 << 20), Calls("here", 0.05), threading.Event()
    before = free(staging)
    with pytest.raises(StoreFault, match="no answer"), staging.take(100, 1.0) as region:
        calls.run("wait", region.used_by(release.wait))
    assert free(staging) != before
    release.set()
    deadline = time.monotonic() + 5
    while free(staging) != before:
        assert time.monotonic() < deadline, "it never came back"
    with pytest.raises(StoreFault, match="given up"):
        region.used_by(lambda: None)()
    calls.close()


class Strange:
    """A client with answers that fit no question."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1] if len(keys) == 2 else [-600] * len(keys)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [-1] * len(keys)


def test_strange_answers_are_faults() -> None:
    client = Client(Strange(), Calls("here", 1.0), Staging("here", 1 << 20))  # type: ignore[arg-type]
    with pytest.raises(StoreFault, match="1 answers to 2 questions"):
        client.exist(["a", "b"])
    with pytest.raises(StoreFault, match="error code -600"):
        client.exist(["a"])
    with pytest.raises(StoreFault, match="error code -1"):
        client.remove(["a"], force=True)


def test_a_count_is_used_for_a_while() -> None:
    now, counts = [0.0], [Usage(3, 300), Usage(9, 900)]
    usage = RecentUsage(lambda: counts.pop(0), lambda: now[0])
    assert usage.get() == (3, 300)
    usage.add(50)
    assert usage.get() == (4, 350)
    now[0] = 11.0
    assert usage.get() == (9, 900)


def test_a_failed_count_is_not_tried_again_at_once() -> None:
    now, tried = [0.0], list[int]()

    def count() -> Usage:
        tried.append(1)
        raise StoreFault("gone")

    usage = RecentUsage(count, lambda: now[0])
    for _ in range(3):
        with pytest.raises(StoreFault, match="gone"):
            usage.get()
    assert len(tried) == 1
    now[0] = 11.0
    with pytest.raises(StoreFault, match="gone"):
        usage.get()
    assert len(tried) == 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    words = r"cannot be imported .*pip install 'hybridkv\[mooncake\]', and install Debian's libibverbs1"
    with pytest.raises(StoreInputError, match=words):
        opening._import(parse_url("mooncake://127.0.0.1"))
