"""Processes that share one Valkey server, for tests that kill them. A program of its own: forking needs a quiet parent.

    python -m tests.store.valkey_processes PART URL

Exits with 0 if all went well, and says on stderr what did not.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial

from hybridkv.store import MissingObject
from hybridkv.store.urls import parse_url
from hybridkv.store.valkey.blobs import ValkeyStore
from hybridkv.store.valkey.opening import open_address
from tests.processes import fork
from tests.store.samples import load, name_of, rows_of, save

ROWS = (6000, 300_000)
SIZE = 4 << 20
KILLS = int(os.environ.get("HYBRIDKV_KILLS", "12"))
""" "kill-at-random" kills so many."""
STEPS = int(os.environ.get("HYBRIDKV_STEPS", "60"))


def opened(url: str) -> ValkeyStore:
    return open_address(parse_url(url), SIZE)


def check(url: str) -> int:
    """After anything: all that is visible is whole, and the counts are right. How many objects there are."""
    with opened(url) as store:
        store.collect()
        found = list(store.objects())
        for stored in found:
            assert load(store, stored.name) == rows_of(stored.name, ROWS), stored
        assert store.stats.corrupt == 0
        assert (store.stats.objects, store.stats.nbytes) == (len(found), sum(one.nbytes for one in found))
        return len(found)


def share(url: str) -> None:
    """Several processes write, read, touch, delete and evict; one watches the limit."""
    workers = [fork(partial(work_among_others, url, number)) for number in range(3)]
    most = 0
    with opened(url) as store:
        while workers:
            most = max(most, store.stats.nbytes)
            pid, status = os.waitpid(workers[0], os.WNOHANG)
            if pid:
                assert status == 0, "a worker failed"
                workers.pop(0)
            time.sleep(0.01)
        counted = (store.stats.objects, store.stats.nbytes)
        found = list(store.objects())
        assert counted == (len(found), sum(one.nbytes for one in found)), "the counts drift"
    pending = 6 * (sum(ROWS) + 3 * 4096)  # what others write within the time that a known usage counts
    assert SIZE // 2 < most <= SIZE + pending, f"{most} bytes where {SIZE} are allowed"
    assert check(url)


def work_among_others(url: str, number: int) -> None:
    source = random.Random(number)
    saved = 0
    with opened(url) as store:
        for step in range(STEPS):
            name = name_of(source.randrange(40))
            if step % 20 == 3:
                store.collect()
            if step % 10 == 5:
                store.delete([name])
            if save(store, name, ROWS, position=step):
                saved += 1
            else:
                store.touch([name])
            try:
                assert load(store, name) == rows_of(name, ROWS)
            except MissingObject:
                continue
        stats = store.stats
        assert stats.corrupt == stats.faults == 0
        assert saved


def write_some(url: str, seed: int, count: int) -> None:
    with opened(url) as store:
        for number in range(count):
            save(store, name_of(f"{seed} {number}"), ROWS)


def kill_at_random(url: str) -> None:
    """Kill one of two writers at any moment; the other goes on, and nothing that is visible is incomplete."""
    source = random.Random(1)
    for number in range(KILLS):
        victim = fork(partial(write_some, url, number, 1000))
        witness = fork(partial(write_some, url, number + 1000, 4))
        time.sleep(source.uniform(0, 0.1))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        assert os.waitpid(witness, 0)[1] == 0, "a writer suffered from another's end"
        with opened(url) as store:
            for stored in store.objects():
                try:
                    assert load(store, stored.name) == rows_of(stored.name, ROWS), stored
                except MissingObject:
                    continue
    assert check(url)


PARTS = {"share": share, "kill-at-random": kill_at_random}

if __name__ == "__main__":
    PARTS[sys.argv[1]](sys.argv[2])
