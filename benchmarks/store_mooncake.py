"""The Mooncake store against Mooncake's plain client, in one run: one master, one process with memory, over TCP.

Each round writes and reads one object by both, in turn, and the order changes from round to round. The plain client has
registered buffers and moves a whole value with one call; the store copies bytes and checks them. Needs
`make setup-mooncake`.

    python benchmarks/store_mooncake.py [--quick]

Processes share the cores of the machine: read ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.store import ObjectName, Store
from hybridkv.store.mooncake.client import key_of
from hybridkv.store.urls import inspect_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.store.servers import mooncake

MIB = 1 << 20
SHAPES = ((16, 1), (16, 4), (64, 8), (64, 64))
"""MiB of an object and of each of its rows."""


def save(store: Store, name: ObjectName, view: memoryview, row: int) -> None:
    writer = store.create(name, [row] * (len(view) // row), value=1, position=0)
    assert writer is not None
    with writer:
        for number in range(len(view) // row):
            writer.write(number, [view[number * row : (number + 1) * row]])
        assert writer.commit()


def load(store: Store, name: ObjectName, view: memoryview, row: int, threads: ThreadPoolExecutor) -> None:
    with store.open(name) as reader:
        parts = [[view[start : start + row]] for start in range(0, len(view), row)]
        list(threads.map(reader.read, range(len(parts)), parts))


def measure(plain: Any, store: Store, view: memoryview, address: int, row: int, rounds: int) -> dict[str, float]:
    """Median GB/s, and ratios of medians."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(*calls: tuple[str, Callable[[], object]]) -> None:
        for what, call in calls:
            began = time.perf_counter()
            call()
            seconds[what].append(time.perf_counter() - began)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(4) as four:
        for number in range(rounds):
            key, name = f"plain-{number}", ObjectName("0" * 32, "full", sha256(f"{row} {number}".encode()).hexdigest())
            turn = 1 if number % 2 else -1
            writes = (
                ("plain write", partial(plain.put_from, key, address, len(view))),
                ("write", partial(save, store, name, view, row)),
            )
            reads = (
                ("plain read", partial(plain.get_into, key, address, len(view))),
                ("read", partial(load, store, name, view, row, one)),
                ("read by 4 threads", partial(load, store, name, view, row, four)),
            )
            timed(*writes[::turn])
            timed(*reads[::turn])
            plain.batch_remove([key, key_of(name)], True)
    medians = {what: statistics.median(found[2:]) for what, found in seconds.items()}
    speeds = {f"{what} GB/s": round(len(view) / median / 1e9, 2) for what, median in medians.items()}
    ratios = {
        f"{what} ratio": round(medians[f"plain {what.split()[0]}"] / median, 2)
        for what, median in medians.items()
        if not what.startswith("plain")
    }
    return speeds | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 8 if parser.parse_args().quick else 30
    if why := mooncake.why_not():
        sys.exit(why)
    mooncake.make_importable()
    data = np.frombuffer(np.random.default_rng(0).bytes(64 * MIB), np.uint8).copy()
    record = {}
    with tempfile.TemporaryDirectory() as folder, mooncake.MooncakeServer(Path(folder), "2 GB") as server:
        plain = server.client()
        plain.register_buffer(data.ctypes.data, data.nbytes)
        with inspect_store(server.url.replace("buffer=64MiB", "buffer=512MiB")) as store:
            for size, row in SHAPES:
                shape = f"{size} MiB in rows of {row}"
                view = data.data[: size * MIB]
                record[shape] = measure(plain, store, view, data.ctypes.data, row * MIB, rounds)
                print(shape, record[shape], flush=True)
        plain.close()
    print(json.dumps({"store_mooncake": record}))


if __name__ == "__main__":
    main()
