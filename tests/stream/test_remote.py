"""Engines on real servers: two processes that share one store while it evicts, and servers that die under load.

Every logit of every engine is compared with the stock model's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from hybridkv.store import Store, inspect_store, open_store
from tests import warm
from tests.engine.zoo import prompt
from tests.store.servers.s3 import CREDENTIALS, S3Server
from tests.store.servers.valkey import ValkeyServer
from tests.stream.drive import StreamDriver, model_of
from tests.stream.remote_engine import random_prompt
from tests.stream.test_faults import SHARED

ROUNDS = int(os.environ.get("HYBRIDKV_ROUNDS", "12"))
SEED = int(os.environ.get("HYBRIDKV_REMOTE_SEED", "0")) or random.randrange(1 << 30)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield server


def run_engine(url: str, family: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stream.remote_engine", url, family, str(seed), str(ROUNDS)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return warm.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60 + 10 * ROUNDS)
    assert process.returncode == 0, f"seed {SEED}\n{err[-4000:]}"
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def check_whole(store: Store) -> int:
    """Number of objects, each of which can be read."""
    names = [one.name for one in store.objects()]
    for name in names:
        with store.open(name) as reader:
            for row, entry in enumerate(reader.header.rows):
                reader.read(row, [memoryview(bytearray(entry.nbytes))])
    return len(names)


def test_two_engines_share_a_server_that_is_too_small(valkey: ValkeyServer) -> None:
    """Nothing is lost that was not evicted, and nothing is there twice."""
    valkey.ask("FLUSHALL")
    engines = [run_engine(f"{valkey.url}?size=1500KiB&timeout=30s", "falcon_h1", SEED + number) for number in range(2)]
    first, second = (outcome(engine) for engine in engines)
    assert first["loaded"] + second["loaded"] > 0, SEED
    for found in (first, second):
        assert (found["corrupt"], found["faults"]) == (0, 0)
        assert set(found["failures"]) <= {"missing"}
    evicted = first["evicted"] + second["evicted"]
    assert evicted > 0
    with inspect_store(valkey.url) as store:
        assert check_whole(store) == first["saved"] + second["saved"] - evicted
        assert store.stats.nbytes <= 3 << 20


def test_two_engines_share_a_bucket(s3: S3Server) -> None:
    url = s3.url(f"shared-{SEED}", "&size=1500KiB&timeout=30s")
    first, second = (outcome(one) for one in [run_engine(url, "falcon_h1", SEED + number) for number in range(2)])
    assert first["loaded"] + second["loaded"] > 0, SEED
    for found in (first, second):
        assert (found["corrupt"], found["faults"]) == (0, 0)
        assert set(found["failures"]) <= {"missing"}
    with inspect_store(s3.url(f"shared-{SEED}")) as store:
        assert check_whole(store) >= first["saved"] + second["saved"] - first["evicted"] - second["evicted"]


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_a_server_that_dies_under_load_costs_time_and_no_token(
    kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = started(kind, tmp_path, monkeypatch)
    chance = random.Random(SEED)
    try:
        with open_store(url) as store:
            driver = StreamDriver(model_of(family), store, chance.choice(("async", "layerwise")))
            steps: list[Callable[[], Any]] = [server.kill, server.start, server.kill, server.start]
            for number in range(12):
                driver.add(str(number), random_prompt(chance) if number % 3 else SHARED + prompt(9, number))
                driver.step()
                if number % 3 == 1:
                    steps.pop(0)()
                driver.run()
                driver.cache.reset()
            driver.settle()
            driver.close()
    finally:
        server.stop()


def started(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ValkeyServer | S3Server, str]:
    if kind == "valkey":
        server = ValkeyServer().start()
        return server, server.url
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = S3Server(folder / "data").start()
    return bucket, bucket.url("dies")
