"""Stores on servers against the plain client of each server: GB/s, round trips, and the time to a first token.

Real servers are started on 127.0.0.1: a Valkey server (TCP and a Unix socket), an S3 server, a Mooncake master with its
memory where `make setup-mooncake` has put it. Both sides write and read the same values in turn, several times, with as
many threads; ratios are of medians. Our side also computes and checks a checksum of every byte, and keeps the index
that eviction needs. Each benchmark prints one JSON line last.

    make bench-remote ARGS="--quick"
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import engine_models
import numpy as np
from remote_peers import Peer
from remote_servers import SERVERS, Server

from hybridkv import Engine, SamplingParams
from hybridkv.store import ObjectName, Reader, Store, open_store

NAMESPACE = "0" * 32
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
_numbers = itertools.count()


class Case(NamedTuple):
    """Objects to move: each has `rows` rows.

    The plain client moves one value for each row; and again, one value for each object, whose rows it reads as ranges.
    """

    row_bytes: int
    rows: int
    objects: int

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.rows * self.objects

    def __str__(self) -> str:
        return f"{self.objects} x {self.rows} x {self.row_bytes >> 10} KiB"


class Bench:
    """One server, one case, both sides."""

    def __init__(self, store: Store, peer: Peer, case: Case, threads: int) -> None:
        self.store = store
        self.peer = peer
        self.case = case
        self.threads = threads
        self.whole = _pages(case.row_bytes * case.rows)
        self.whole[:] = np.random.default_rng(1).bytes(len(self.whole))
        self.value = self.whole[: case.row_bytes]
        self.buffers = [_pages(case.row_bytes) for _ in range(threads)]

    def seconds(self, work: Callable[[int, Any], None], items: Sequence[Any]) -> float:
        """Time in which all items are done, each thread taking every n-th."""

        def run(thread: int) -> None:
            for item in items[thread :: self.threads]:
                work(thread, item)

        with ThreadPoolExecutor(self.threads) as threads:
            began = time.perf_counter()
            list(threads.map(run, range(self.threads)))
            return time.perf_counter() - began

    def ours(self) -> tuple[list[float], dict[str, float]]:
        """Seconds of writing and reading, and round trips an object of each."""
        names = [_new_name() for _ in range(self.case.objects)]
        before = self.store.stats.round_trips
        wrote = self.seconds(self._write, names)
        between = self.store.stats.round_trips
        together = max(1, min(self.store.opens_together, len(names) // self.threads))
        batches = [names[start : start + together] for start in range(0, len(names), together)]
        read = self.seconds(self._read, batches)
        after = self.store.stats.round_trips
        self.store.delete(names)
        trips = {"write": (between - before) / len(names), "read": (after - between) / len(names)}
        return [wrote, read], {kind: round(count, 2) for kind, count in trips.items()}

    def ranges(self) -> float:
        """Seconds in which the plain client reads rows as ranges of one value for each object."""
        keys = [f"plain-{next(_numbers)}" for _ in range(self.case.objects)]
        for key in keys:
            self.peer.write(key, self.whole)
        jobs = [(key, row * self.case.row_bytes) for key in keys for row in range(self.case.rows)]
        return self.seconds(lambda thread, job: self.peer.read_range(job[0], job[1], self.buffers[thread]), jobs)

    def plain(self) -> list[float]:
        keys = [f"plain-{next(_numbers)}" for _ in range(self.case.objects * self.case.rows)]
        wrote = self.seconds(lambda _, key: self.peer.write(key, self.value), keys)
        read = self.seconds(lambda thread, key: self.peer.read(key, self.buffers[thread]), keys)
        return [wrote, read]

    def _write(self, thread: int, name: ObjectName) -> None:
        writer = self.store.create(name, [self.case.row_bytes] * self.case.rows, value=1.0, position=0)
        assert writer is not None, "no room"
        with writer:
            for row in range(self.case.rows):
                writer.write(row, [self.value])
            assert writer.commit()

    def _read(self, thread: int, names: Sequence[ObjectName]) -> None:
        for found in self.store.open_all(names):
            assert isinstance(found, Reader), found
            with found as reader:
                for row in range(self.case.rows):
                    reader.read(row, [self.buffers[thread]])


def _pages(nbytes: int) -> memoryview:
    """Memory in pages of its own: clients that register memory do so by pages."""
    return memoryview(mmap.mmap(-1, nbytes))


def _new_name() -> ObjectName:
    return ObjectName(NAMESPACE, "full", sha256(str(next(_numbers)).encode()).hexdigest())


def move(server: Server, url: str, case: Case, threads: int, repeats: int) -> dict[str, Any]:
    with open_store(url) as store:
        peer = server.peer(url, threads)
        bench = Bench(store, peer, case, threads)
        ours, plain, ranges = [], [], []
        for number in range(repeats + 1):
            one, other, third = bench.ours(), bench.plain(), bench.ranges()
            server.clear()
            if number:  # the first of each warms up
                ours.append(one)
                plain.append(other)
                ranges.append(third)
        peer.close()
    result: dict[str, Any] = {"server": server.name, "case": str(case), "threads": threads, "peer": peer.name}
    for number, kind in enumerate(("write", "read")):
        mine = statistics.median(one[0][number] for one in ours)
        theirs = statistics.median(one[number] for one in plain)
        result[kind] = {
            "gb_per_s": round(case.nbytes / mine / 1e9, 3),
            "peer_gb_per_s": round(case.nbytes / theirs / 1e9, 3),
            "ratio": round(theirs / mine, 2),
            "round_trips_an_object": ours[-1][1][kind],
        }
    result["read"]["peer_ranges_gb_per_s"] = round(case.nbytes / statistics.median(ranges) / 1e9, 3)
    result["read"]["ratio_to_ranges"] = round(result["read"]["gb_per_s"] / result["read"]["peer_ranges_gb_per_s"], 2)
    print(result, flush=True)
    return result


class Prompts:
    """The same beginning, and always another end."""

    def __init__(self, num_stored: int, vocab_size: int) -> None:
        self._random = np.random.default_rng(7)
        self._vocab_size = vocab_size
        self.stored = self._tokens(num_stored)

    def next(self) -> list[int]:
        return self.stored + self._tokens(32)

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocab_size, count)]


class FirstToken:
    """Time to the first token of a prompt whose beginning is stored."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self._options: dict[str, Any] = {"memory": "1GiB", "max_num_batched_tokens": 2048}
        self._directory = directory
        self._repeats = args.repeats
        self._prompts = Prompts(args.tokens, engine_models.SHAPES[args.model].vocab_size)

    def computed(self) -> float:
        with Engine(self._directory, **self._options) as engine:
            return self._median(engine)

    def loaded(self, url: str) -> dict[str, Any]:
        with Engine(self._directory, store=url, **self._options) as engine:
            engine.generate([[*self._prompts.stored, 0]], ONE_TOKEN, progress=False)
            engine.flush_store()
            self._one(engine)
            before = engine.stats()
            seconds = self._median(engine)
            after = engine.stats()
        assert before.stream is not None
        assert after.stream is not None
        loads = after.stream.found - before.stream.found
        return {
            "seconds": round(seconds, 4),
            "loaded_tokens": (after.stream.loaded_tokens - before.stream.loaded_tokens) // max(loads, 1),
            "loaded_mib": round((after.stream.loaded_bytes - before.stream.loaded_bytes) / max(loads, 1) / 2**20, 1),
            "failures": dict(after.stream.failures),
        }

    def _median(self, engine: Engine) -> float:
        return statistics.median(self._one(engine) for _ in range(self._repeats))

    def _one(self, engine: Engine) -> float:
        engine.reset_cache()
        engine.flush_store()
        return engine.generate([self._prompts.next()], ONE_TOKEN, progress=False)[0].metrics.ttft_s


@contextmanager
def started(names: Sequence[str]) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = []
        for name in names:
            why = SERVERS[name].why_not()
            if why is None:
                servers.append(stack.enter_context(SERVERS[name]()))
            else:
                print(f"{name} is left out: {why}", flush=True)
        yield servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128, help="Bytes of a case, in MiB.")
    parser.add_argument("--model", choices=list(engine_models.SHAPES), default="qwen3-next")
    parser.add_argument("--tokens", type=int, default=8192, help="Of the stored prompt.")
    parser.add_argument("--no-first-token", action="store_true", help="Only move bytes; load no model.")
    parser.add_argument("--quick", action="store_true", help="A tiny model, few bytes, few repeats.")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.mib, args.model, args.tokens = 2, 32, "qwen3-next-tiny", 2048
    report: dict[str, Any] = {
        "benchmark": "store_remote",
        "tokens": args.tokens,
        "model": args.model,
        "first_token": {},
    }
    with started(args.servers) as servers, tempfile.TemporaryDirectory() as directory:
        total = args.mib << 20
        report["moves"] = [
            move(server, url, Case(row, rows, total // row // rows), args.threads, args.repeats)
            for server in servers
            for url in server.urls
            for row, rows in ((1 << 20, 1), (1 << 20, 8))
        ]
        if not args.no_first_token:
            place = Path(directory) / args.model
            engine_models.build(args.model, place, "bfloat16", max_tokens=args.tokens + 64)
            first = FirstToken(place, args)
            times: dict[str, Any] = {"computed": {"seconds": round(first.computed(), 4)}}
            for server in servers:
                times[server.name] = first.loaded(server.urls[0])
                print(server.name, times[server.name], flush=True)
            report["first_token"] = times
    print(json.dumps(report))


if __name__ == "__main__":
    main()
