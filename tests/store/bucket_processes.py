"""Processes that share one store in a bucket, for tests that kill them.

    python -m tests.store.bucket_processes PART URL NUMBER

Exits with 0 if all went well, and says on stderr what did not.
"""

from __future__ import annotations

import random
import sys

from hybridkv.store import MissingObject
from tests.store.buckets import opened
from tests.store.samples import load, name_of, rows_of, save

ROWS = (6000, 300_000)
SIZE = 4 << 20
STEPS = 60


def write(url: str, number: int) -> None:
    """Write objects until killed."""
    with opened(url) as store:
        print("begun", flush=True)  # noqa: T201 - the test waits for it
        for step in range(100_000):
            save(store, name_of(f"{number} {step}"), ROWS)


def share(url: str, number: int) -> None:
    """Write, read, touch, delete, evict and collect among others."""
    source = random.Random(number)
    with opened(url, SIZE) as store:
        for step in range(STEPS):
            name = name_of(source.randrange(40))
            if step % 20 == 13:
                store.collect()
            if step % 10 == 5:
                store.delete([name])
            if not save(store, name, ROWS, position=step):
                store.touch([name])
            try:
                assert load(store, name) == rows_of(name, ROWS)
            except MissingObject:
                continue
        stats = store.stats
        assert stats.corrupt == stats.faults == 0, stats
        assert stats.evicted > 0, stats


PARTS = {"write": write, "share": share}

if __name__ == "__main__":
    PARTS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
