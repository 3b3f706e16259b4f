"""A store in a bucket against plain obstore on the same server: values of 8 MiB. The last line is JSON.

Both sides read and write in turn, several times; ratios are of medians. Plain obstore reads a value by one request and
leaves the bytes where they are. The store opens each object anew, copies its row into 16 buffers, and computes a
checksum. It also counts what a lookup of many names costs, with and without listings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import obstore

from hybridkv.store import ObjectName
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.bucket import lookup
from tests.store.buckets import blobs_of, opened
from tests.store.servers.s3 import CREDENTIALS, S3Server

VALUE_BYTES = 8 << 20
BUFFERS = 16
_numbers = itertools.count()


def name_of(number: int) -> ObjectName:
    return ObjectName("0" * 32, "full", sha256(str(number).encode()).hexdigest())


class Bench:
    def __init__(self, server: S3Server, values: int, threads: int) -> None:
        self.store, self.client = opened(server.url("bench")), server.client()
        self.values, self.threads = values, threads
        data = np.random.default_rng(0).integers(0, 256, VALUE_BYTES, np.uint8)
        step = VALUE_BYTES // BUFFERS
        self.data = data.data
        self.source = [data[at : at + step].data for at in range(0, VALUE_BYTES, step)]
        self.targets = [[memoryview(bytearray(step)) for _ in range(BUFFERS)] for _ in range(threads)]
        self.names = [self.store_write(0) for _ in range(values)]

    def store_write(self, _: int) -> ObjectName:
        name = name_of(next(_numbers))
        writer = self.store.create(name, [VALUE_BYTES], value=1.0, position=0)
        assert writer is not None
        with writer:
            writer.write(0, self.source)
            writer.commit()
        return name

    def plain_write(self, _: int) -> None:
        obstore.put(self.client, f"plain/{next(_numbers)}", self.data, mode="create", use_multipart=False)

    def store_read(self, number: int) -> None:
        with self.store.open(self.names[number]) as reader:
            reader.read(0, self.targets[number % self.threads])

    def plain_read(self, number: int) -> None:
        key = blobs_of(self.store).keys.object(self.names[number])
        found = obstore.get_range(self.client, key, start=4096, length=VALUE_BYTES)
        assert len(found) == VALUE_BYTES

    def rate(self, work: Callable[[int], object]) -> float:
        """GB/s of `values` calls, spread over the threads. A thread takes every `threads`-th value."""

        def run(thread: int) -> None:
            for number in range(thread, self.values, self.threads):
                work(number)

        with ThreadPoolExecutor(self.threads) as pool:
            start = time.perf_counter()
            list(pool.map(run, range(self.threads)))
            return self.values * VALUE_BYTES / 1e9 / (time.perf_counter() - start)

    def compare(self, rounds: int, **works: Callable[[int], object]) -> dict[str, float]:
        rates: dict[str, list[float]] = {side: [] for side in works}
        for number in range(rounds):
            for side in sorted(works, reverse=bool(number % 2)):
                rates[side].append(self.rate(works[side]))
        medians = {side: statistics.median(found) for side, found in rates.items()}
        return {**medians, "ratio": medians["store"] / medians["plain"]}


def lookups(store: BlobStore, names: int) -> dict[str, dict[str, float]]:
    """Seconds and requests of one lookup, with listings and with HEAD requests alone."""
    blobs, usual = blobs_of(store), lookup._NAMES_PER_LISTING
    results = {}
    for kind, threshold in (("listings", usual), ("heads", 1 << 60)):
        lookup._NAMES_PER_LISTING = threshold
        requests, start = blobs.requests, time.perf_counter()
        store.lookup([name_of(number) for number in range(names)])
        results[kind] = {"seconds": time.perf_counter() - start, "requests": blobs.requests - requests}
    lookup._NAMES_PER_LISTING = usual
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    os.environ.update(CREDENTIALS)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory, S3Server(Path(directory) / "data") as server:
        for threads in (1, 4):
            bench = Bench(server, 8 if quick else 16, threads)
            rounds = 3 if quick else 7
            read = bench.compare(rounds, store=bench.store_read, plain=bench.plain_read)
            write = bench.compare(rounds, store=bench.store_write, plain=bench.plain_write)
            results[f"{threads} threads"] = {"read": read, "write": write}
            for what, found in (("read", read), ("write", write)):
                print(f"{threads} threads, {what}: " + ", ".join(f"{side} {rate:.2f}" for side, rate in found.items()))
        results["lookup"] = lookups(bench.store, 1_000 if quick else 10_000)
        print(f"lookup: {results['lookup']}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
