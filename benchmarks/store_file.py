"""The file store against bare threads with preadv and pwritev on the same files. The last line is JSON.

Both sides move the same rows from and to the same scattered buffers, in turn, several times; ratios are of medians. The
store also computes a checksum of every byte, and opens each object anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hybridkv.store import Direct, FileStore, ObjectName
from hybridkv.store.objects import Header

OBJECT_BYTES = 32 << 20
BUFFERS = 16
"""In a row: one a block, where an object has 256 tokens."""
NAMESPACE = "0" * 32
_numbers = itertools.count()


class Job(NamedTuple):
    name: ObjectName
    header: Header
    row: int


class Bench:
    """One store with objects of equal rows, and one set of buffers a thread."""

    def __init__(self, directory: Path, row_bytes: int, objects: int, threads: int, direct: Direct) -> None:
        self.row_bytes = row_bytes
        self.threads = threads
        self.store = FileStore(directory, 1 << 50, direct)
        self.sizes = [row_bytes] * (OBJECT_BYTES // row_bytes)
        self.root = directory / "hybridkv-v1" / "objects"
        self.buffers = [_scattered(row_bytes) for _ in range(threads)]
        self.names = [self.write_object(0) for _ in range(objects)]
        os.sync()

    @property
    def nbytes(self) -> int:
        return len(self.names) * OBJECT_BYTES

    def write_object(self, thread: int) -> ObjectName:
        name = ObjectName(NAMESPACE, "full", sha256(str(next(_numbers)).encode()).hexdigest())
        writer = self.store.create(name, self.sizes, value=1.0, position=0)
        assert writer is not None
        with writer:
            for row in range(len(self.sizes)):
                writer.write(row, self.buffers[thread])
            writer.commit()
        return name

    def read_object(self, thread: int, name: ObjectName) -> None:
        with self.store.open(name) as reader:
            for row in range(len(self.sizes)):
                reader.read(row, self.buffers[thread])

    def raw_read(self, thread: int, name: ObjectName) -> None:
        fd = os.open(self.root / name.path, os.O_RDONLY)
        for row in range(len(self.sizes)):
            found = os.preadv(fd, self.buffers[thread], 4096 + row * self.row_bytes)
            assert found == self.row_bytes
        os.close(fd)

    def raw_write(self, thread: int) -> Path:
        path = self.root / f"raw-{next(_numbers)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for row in range(len(self.sizes)):
            os.pwritev(fd, self.buffers[thread], 4096 + row * self.row_bytes)
        os.close(fd)
        return path

    def drop_cache(self) -> None:
        for name in self.names:
            fd = os.open(self.root / name.path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def seconds(self, work: Callable[[int, ObjectName], object]) -> float:
        """All objects, spread over the threads."""

        def run(thread: int) -> None:
            for name in self.names[thread :: self.threads]:
                work(thread, name)

        with ThreadPoolExecutor(self.threads) as pool:
            start = time.perf_counter()
            list(pool.map(run, range(self.threads)))
            return time.perf_counter() - start


def _scattered(row_bytes: int) -> list[memoryview]:
    """A row in pieces, as pages of an arena: aligned to 64 bytes and no more."""
    arena = np.random.default_rng(0).integers(0, 256, 2 * row_bytes + 64, np.uint8)
    start = 64 - arena.ctypes.data % 64
    step = row_bytes // BUFFERS
    return [arena[start + 2 * at : start + 2 * at + step].data for at in range(0, row_bytes, step)]


def compare_reads(bench: Bench, rounds: int, cold: bool) -> dict[str, float]:
    times: dict[str, list[float]] = {"raw": [], "store": []}
    works = {"raw": bench.raw_read, "store": bench.read_object}
    for number in range(rounds):
        for side in sorted(works, reverse=bool(number % 2)):
            if cold:
                bench.drop_cache()
            times[side].append(bench.seconds(works[side]))
    return _result(bench, times)


def compare_writes(bench: Bench, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"raw": [], "store": []}
    for number in range(rounds):
        for side in sorted(times, reverse=bool(number % 2)):
            os.sync()
            made: list[Path] = []

            def work(thread: int, _: ObjectName, side: str = side, made: list[Path] = made) -> None:
                made.append(bench.raw_write(thread) if side == "raw" else bench.root / bench.write_object(thread).path)

            times[side].append(bench.seconds(work))
            for path in made:
                path.unlink()
    return _result(bench, times)


def _result(bench: Bench, times: dict[str, Sequence[float]] | dict[str, list[float]]) -> dict[str, float]:
    raw, store = (bench.nbytes / statistics.median(times[side]) / 2**30 for side in ("raw", "store"))
    return {"raw_gib_s": round(raw, 2), "store_gib_s": round(store, 2), "ratio": round(store / raw, 3)}


def measure(directory: Path, objects: int, rounds: int, direct: Direct) -> dict[str, dict[str, float]]:
    results = {}
    for row_bytes, threads in itertools.product((4 << 20, 256 << 10), (1, 8)):
        bench = Bench(directory / f"{row_bytes}-{threads}", row_bytes, objects, threads, direct)
        parts = {
            "warm read": partial(compare_reads, bench, rounds, False),
            "cold read": partial(compare_reads, bench, rounds, True),
            "write": partial(compare_writes, bench, rounds),
        }
        bench.seconds(bench.raw_read)
        for part, compare in parts.items():
            label = f"{part}, rows of {row_bytes >> 10} KiB, {threads} threads"
            results[label] = compare()
            found = results[label]
            print(f"{label:44} {found['store_gib_s']:6.2f} GiB/s, {found['ratio']:.2f} of {found['raw_gib_s']:.2f}")
        bench.store.shrink(0)
        bench.store.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to put files; default: the temporary directory")
    parser.add_argument("--direct", choices=[choice.value for choice in Direct], default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer objects and rounds")
    args = parser.parse_args()
    objects, rounds = (8, 3) if args.quick else (24, 7)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        results = measure(Path(directory), objects, rounds, Direct(args.direct))
    worst = min(found["ratio"] for label, found in results.items() if " read," in label)
    print(json.dumps({"benchmark": "store_file", "direct": args.direct, "worst_read_ratio": worst, "results": results}))


if __name__ == "__main__":
    main()
