"""Processes that use one directory, for tests that kill them. A program of its own: forking needs a quiet parent.

    python -m tests.store.processes PART DIRECTORY

Exits with 0 if all went well, and says on stderr what did not.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hybridkv.store import FileStore, MissingObject, StoreFault
from hybridkv.store.file.blobs import FileBlobs
from tests.processes import die_at_call, fork
from tests.store.samples import load, name_of, rows_of, save

ROWS = (6000, 300_000)
SIZE = 4 << 20
KILLS = int(os.environ.get("HYBRIDKV_KILLS", "60"))
""" "kill-at-random" kills so many."""
CALLS = ("open", "ftruncate", "pwritev", "pwrite", "rename", "unlink", "mkdir", "close", "fdatasync")


def check(directory: Path) -> int:
    """After anything: all that is visible is whole, nothing else survives, the counts are right. How many there are."""
    with FileStore(directory, SIZE) as store:
        blobs = store.blobs
        assert isinstance(blobs, FileBlobs)
        counted = blobs.recount()
        assert blobs.usage() == (counted.objects, counted.nbytes), "the counts are wrong"
        count = 0
        for stored in store.objects():
            assert load(store, stored.name) == rows_of(stored.name, ROWS), stored
            count += 1
        assert store.stats.corrupt == 0
        assert os.listdir(directory / "hybridkv-v1" / "drafts") == []
        return count


def write_some(directory: Path, seed: int, count: int, sync: bool = False) -> None:
    with FileStore(directory, SIZE, sync=sync) as store:
        for number in range(count):
            save(store, name_of(f"{seed} {number}"), ROWS)


def kill_at_call(directory: Path) -> None:
    """Kill a writer before and after each call that changes files, through the whole life of two objects."""
    total = survivors = 0
    for when in ("before", "after"):
        for number in range(1, 1000):
            pid = fork(partial(die_at, directory, number, when))
            if os.waitpid(pid, 0)[1] == 0:
                break
            total += 1
            survivors = check(directory)
    assert total >= 60, f"only {total} places to die at"
    assert survivors


def die_at(directory: Path, number: int, when: str) -> None:
    die_at_call(CALLS, number, when, partial(write_some, directory, number * 2 + (when == "after"), 2, sync=True))


def kill_at_random(directory: Path) -> None:
    """Kill one of two writers at any moment; the other's drafts must not suffer."""
    source = random.Random(1)
    for number in range(KILLS):
        victim = fork(partial(write_some, directory, number, 1000))
        witness = fork(partial(write_some, directory, number + 1000, 6))
        time.sleep(source.uniform(0, 0.03))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        assert os.waitpid(witness, 0)[1] == 0, "a writer suffered from another's end"
        if number % 10 == 9:
            assert check(directory)
    assert check(directory)


def share(directory: Path) -> None:
    """Several processes write, read, touch, delete and evict; one watches the limit."""
    workers = [fork(partial(work_among_others, directory, number)) for number in range(4)]
    most = 0
    with FileStore(directory, SIZE) as store:
        blobs = store.blobs
        assert isinstance(blobs, FileBlobs)
        while workers:
            with blobs.usage_file.open() as counts:
                counted = blobs.recount()
            assert counted == counts, "the counts are wrong"
            most = max(most, counted.nbytes)
            pid, status = os.waitpid(workers[0], os.WNOHANG)
            if pid:
                assert status == 0, "a worker failed"
                workers.pop(0)
            time.sleep(0.005)
    assert most <= SIZE, f"{most} bytes where {SIZE} are allowed"
    assert most > SIZE // 2, "they never came near the limit"
    assert check(directory)


def work_among_others(directory: Path, number: int) -> None:
    source = random.Random(number)
    with FileStore(directory, SIZE) as store:
        for step in range(150):
            name = name_of(source.randrange(40))
            if step % 10 == 3:
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
        assert stats.corrupt == stats.faults == 0
        assert stats.evicted > 0


def delete_under(directory: Path) -> None:
    """The directory is deleted again and again while several processes work in it: they go on in the next one."""
    opened, tell = os.pipe()
    workers = [fork(partial(work_on_sand, directory, number, tell)) for number in range(3)]
    os.close(tell)
    for _ in workers:
        assert os.read(opened, 1), "a worker could not open the store"
    while workers:
        time.sleep(0.02)
        shutil.rmtree(directory, ignore_errors=True)
        pid, status = os.waitpid(workers[0], os.WNOHANG)
        if pid:
            assert status == 0, "a worker failed"
            workers.pop(0)
    write_some(directory, 1, 3)
    with FileStore(directory, SIZE) as store:
        store.collect()
    assert check(directory) >= 3


def work_on_sand(directory: Path, number: int, tell: int) -> None:
    """Write one byte to `tell` once the store is open: a directory that disappears before is an error of `open`."""
    source = random.Random(number)
    faults = saved = 0
    with FileStore(directory, SIZE) as store:
        os.write(tell, b".")
        num_files = len(os.listdir("/proc/self/fd"))
        for _ in range(300):
            name = name_of(source.randrange(40))
            try:
                saved += save(store, name, ROWS)
                assert load(store, name) == rows_of(name, ROWS)
            except StoreFault:
                faults += 1
            except MissingObject:
                continue
        assert store.stats.corrupt == 0
        assert faults, "it was never deleted under it"
        assert saved > 10, "it never came back"
        assert len(os.listdir("/proc/self/fd")) <= num_files, "files are left open"


def file_size_limit(directory: Path) -> None:
    """Files may not grow: every write fails, reading goes on."""
    with FileStore(directory, SIZE) as store:
        save(store, name_of(1), ROWS)
        before = store.stats.nbytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(StoreFault, match="File too large"):
            save(store, name_of(2), ROWS)
        assert store.stats.nbytes == before
        assert store.lookup([name_of(1), name_of(2)]) == [True, False]
    assert check(directory) == 1


PARTS = {
    "kill-at-call": kill_at_call,
    "kill-at-random": kill_at_random,
    "share": share,
    "delete-under": delete_under,
    "file-size-limit": file_size_limit,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](Path(sys.argv[2]))
