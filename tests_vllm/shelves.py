"""Directories that engines store into: when they have been written to the end, and whether all in them is whole."""

from __future__ import annotations

import time
from pathlib import Path

from engines import Engine

from hybridkv.store import inspect_store

QUIET_S = 0.3
PATIENCE_S = 60.0


def forget(engine: Engine, directory: Path) -> None:
    """From now on only the store knows what the engine has computed."""
    engine.reset()
    wait_until_quiet(directory)


def wait_until_quiet(directory: Path) -> None:
    """Writing is asynchronous: wait until no file is new, and none is being written."""
    deadline = time.monotonic() + PATIENCE_S
    seen, since = listing(directory), time.monotonic()
    while time.monotonic() - since < QUIET_S or any("drafts" in name for name in seen):
        assert time.monotonic() < deadline, "the store does not come to rest"
        time.sleep(0.02)
        now = listing(directory)
        if now != seen:
            seen, since = now, time.monotonic()


def listing(directory: Path) -> dict[str, int]:
    """Files and their sizes."""
    found = {}
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                found[str(path.relative_to(directory))] = path.stat().st_size
        except FileNotFoundError:  # it was renamed or deleted meanwhile
            continue
    return found


def verify(directory: Path) -> int:
    """Read everything, with all checks. Returns how many objects there are."""
    count = 0
    with inspect_store(f"file://{directory}") as store:
        store.collect()
        for stored in store.objects():
            with store.open(stored.name) as reader:
                for number, row in enumerate(reader.header.rows):
                    reader.read(number, [memoryview(bytearray(row.nbytes))])
            count += 1
        assert store.stats.corrupt == store.stats.faults == 0
    assert not any("drafts" in name for name in listing(directory))
    return count
