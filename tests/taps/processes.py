"""A process that writes samples, for tests that kill it. A program of its own: forking needs a quiet parent.

    python -m tests.taps.processes PART DIRECTORY

Exits with 0 if all went well, and says on stderr what did not.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from hybridkv import taps
from hybridkv.taps import TapFolder
from tests.processes import die_at_call, fork
from tests.taps.samples import fill, is_right

SAMPLES = 6
SHARD_BYTES = 15_000
KILLS = int(os.environ.get("HYBRIDKV_KILLS", "20"))
""" "kill-at-random" kills so many."""
CALLS = ("open", "pwritev", "rename", "unlink", "close", "fdatasync", "fsync")


def check(directory: Path) -> int:
    """At any moment: all that is visible is whole and right. How many samples there are."""
    if TapFolder(directory).manifest() is None:
        return 0
    found = list(taps.open(directory, partial=True))
    assert all(map(is_right, found)), "a sample is wrong"
    return len(found)


def kill_at_call(directory: Path) -> None:
    """Kill a writer before and after each call that changes files, through a whole run with shards."""
    total = 0
    for when in ("before", "after"):
        for number in range(1, 10_000):
            place = directory / f"{when}-{number}"
            status = os.waitpid(fork(partial(die_at, place, number, when)), 0)[1]
            before = check(place)
            if status == 0:
                assert before == SAMPLES
                break
            total += 1
            if number % 5 == 0:
                complete(place, before)
    assert total >= 60, f"only {total} places to die at"


def complete(place: Path, before: int) -> None:
    """A run that resumes keeps what is there, and leaves nothing else behind."""
    fill(place, SAMPLES, shard_bytes=SHARD_BYTES)
    assert check(place) == SAMPLES >= before
    files = {path.name for path in place.rglob("*") if path.is_file()}
    others = {name for name in files if not name.startswith("shard_")}
    assert others == {"manifest.json", ".lock"}, f"left behind: {others}"


def die_at(directory: Path, number: int, when: str) -> None:
    die_at_call(CALLS, number, when, partial(fill, directory, SAMPLES, shard_bytes=SHARD_BYTES))


def kill_at_random(directory: Path) -> None:
    """Kill a writer at any moment, again and again; each one resumes where the last one died. None loses a sample."""
    source, there = random.Random(1), 0
    for number in range(KILLS):
        pid = fork(partial(fill, directory, 600, shard_bytes=SHARD_BYTES if number % 2 else None))
        time.sleep(source.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = check(directory) if number % 10 == 9 or KILLS < 50 else there
        assert now >= there, "a sample was lost"
        there = now
    fill(directory, 600)
    assert check(directory) == 600


PARTS = {"kill-at-call": kill_at_call, "kill-at-random": kill_at_random}

if __name__ == "__main__":
    PARTS[sys.argv[1]](Path(sys.argv[2]))
