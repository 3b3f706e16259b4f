"""Processes that use one Mooncake store, for tests of faults: one writes until it is killed, others share a full store.

python -m tests.store.mooncake_writer URL NUMBER
python -m tests.store.mooncake_writer URL share SEED
"""

from __future__ import annotations

import os
import random
import sys
import time

from hybridkv.store import MissingObject, ObjectName, Store
from hybridkv.store.urls import inspect_store
from tests.store.samples import load, name_of, rows_of, save

SECONDS = float(os.environ.get("HYBRIDKV_SHARE_SECONDS", "1"))
WRITER_ROWS = (100_000, 6_000_000)
_SHARED_ROWS = ((20_000,), (3_000_000, 9_000_000))


def writer_names(number: int) -> list[ObjectName]:
    return [name_of(f"killed {number} {one}") for one in range(8)]


def write(store: Store, number: int) -> None:
    while True:
        for name in writer_names(number):
            save(store, name, WRITER_ROWS)
        store.delete(writer_names(number))


def share(store: Store, seed: int) -> None:
    source, end = random.Random(seed), time.monotonic() + SECONDS
    saved = loaded = 0
    while time.monotonic() < end:
        number = source.randrange(40)
        name, rows = name_of(f"shared {number}"), _SHARED_ROWS[number % 2]
        saved += save(store, name, rows)
        try:
            assert load(store, name) == rows_of(name, rows), "wrong bytes"
            loaded += 1
        except MissingObject:
            pass
        if source.random() < 0.1:
            store.delete([name])
        if source.random() < 0.02:
            store.shrink(50 << 20)
    stats = store.stats
    assert (stats.corrupt, stats.faults) == (0, 0), stats
    assert saved, "nothing was written"
    assert loaded, "nothing was read"


if __name__ == "__main__":
    with inspect_store(sys.argv[1]) as opened:
        sys.stdout.write("open\n")
        sys.stdout.flush()
        if sys.argv[2] == "share":
            share(opened, int(sys.argv[3]))
        else:
            write(opened, int(sys.argv[2]))
