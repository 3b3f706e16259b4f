"""The Mooncake store when its processes die, stop or fill up, and when bytes are not those that were written."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridkv.store import CorruptObject, MissingObject, Store, StoreError, StoreFault
from hybridkv.store.mooncake.admin import Admin
from hybridkv.store.mooncake.blobs import MooncakeBlobs, MooncakeStore
from hybridkv.store.mooncake.client import key_of
from hybridkv.store.urls import inspect_store
from tests.patience import Stopwatch
from tests.store.mooncake_writer import SECONDS, WRITER_ROWS, writer_names
from tests.store.samples import ROWS, load, name_of, read_row, rows_of, save
from tests.store.servers import mooncake
from tests.store.servers.mooncake import MooncakeServer

pytestmark = pytest.mark.skipif(mooncake.why_not() is not None, reason=str(mooncake.why_not()))

NAME = name_of(1)
LARGE = (100_000, 3_000_000)
TIMEOUT_S = 1.0
KILLS = int(os.environ.get("HYBRIDKV_KILLS", "2"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    mooncake.make_importable()
    options = ("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2", "--client_ttl=2")
    with MooncakeServer(tmp_path_factory.mktemp("mooncake"), "128 MB", options=options) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: MooncakeServer) -> Iterator[Any]:
    client = server.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def opened(server: MooncakeServer) -> Iterator[MooncakeBlobs]:
    with inspect_store(f"{server.url}&timeout={TIMEOUT_S:g}s") as store:
        assert isinstance(store, MooncakeStore)
        assert isinstance(store.blobs, MooncakeBlobs)
        yield store.blobs


@pytest.fixture
def store(opened: MooncakeBlobs, plain: Any) -> MooncakeStore:
    plain.remove_all(True)
    return MooncakeStore(opened.renewed())


def kill(process: subprocess.Popen[bytes] | None) -> None:
    assert process is not None
    process.kill()
    process.wait()


@contextmanager
def stopped(process: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """The process keeps its connections and answers nothing."""
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        while not all(is_stopped(thread) for thread in Path(f"/proc/{process.pid}/task").iterdir()):
            time.sleep(0.001)
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def is_stopped(thread: Path) -> bool:
    """A thread of a stopped process may still run for a moment. `thread`: its folder in /proc."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def works_again(store: Store, number: int) -> None:
    """The store was not opened again."""
    deadline = time.monotonic() + 20
    while True:
        try:
            save(store, name_of(number), LARGE)
            assert load(store, name_of(number)) == rows_of(name_of(number), LARGE)
            return
        except StoreError:
            assert time.monotonic() < deadline, "it never came back"
            time.sleep(0.1)


def fails_in_time(call: Callable[[], object]) -> None:
    began = Stopwatch()
    with pytest.raises(StoreFault, match=r"mooncake://127\.0\.0\.1"):
        call()
    assert began.seconds < 2 * TIMEOUT_S + 1


def fail_in_time(*calls: Callable[[], object]) -> None:
    """All of these, at the same time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(fails_in_time, calls))


def free_bytes(opened: MooncakeBlobs) -> int:
    """Free transfer memory, once abandoned calls have returned."""
    client = opened._client
    deadline = time.monotonic() + 10
    while client.calls.hung and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.calls.hung == 0
    return sum(length for half in client.staging._free.values() for _, length in half)


def test_faults_of_a_killed_master_end_when_it_comes_back(server: MooncakeServer, store: MooncakeStore) -> None:
    save(store, NAME, LARGE)
    reader = store.open(NAME)
    kill(server.master)
    try:
        fail_in_time(
            lambda: store.lookup([NAME]),
            lambda: store.open(NAME),
            lambda: read_row(reader, 1),
            lambda: store.create(name_of(2), ROWS, value=1, position=0),
            lambda: store.delete([NAME]),
            lambda: store.describe(NAME.namespace, {"model": "mine"}),
            store.descriptions,
        )
        assert store.stats.faults >= 6
    finally:
        server.start_master()
    works_again(store, 3)
    assert store.lookup([NAME]) == [False], "the master has forgotten it"


def test_faults_of_a_killed_memory_end_when_it_comes_back(server: MooncakeServer, store: MooncakeStore) -> None:
    save(store, NAME, LARGE)
    reader = store.open(NAME)
    kill(server.holder)
    try:
        with pytest.raises(StoreFault, match="the process that holds the memory may be gone"):
            read_row(reader, 1)
        fails_in_time(lambda: save(store, name_of(2), LARGE))
    finally:
        server.start_holder()
    works_again(store, 3)
    deadline = time.monotonic() + 10
    while store.lookup([NAME, name_of(2)]) != [False, False]:
        assert time.monotonic() < deadline, "objects of a dead process are still listed"
        time.sleep(0.1)
    assert store.stats.corrupt == 0


def test_faults_of_a_silent_master_take_no_longer_than_the_timeout(
    server: MooncakeServer, store: MooncakeStore, opened: MooncakeBlobs
) -> None:
    save(store, NAME, LARGE)
    reader, before = store.open(NAME), free_bytes(opened)
    writer = store.create(name_of(2), [5], value=1, position=0)
    assert writer is not None
    writer.write(0, [memoryview(b"12345")])
    with stopped(server.master):
        fail_in_time(
            lambda: store.lookup([NAME]),
            lambda: store.open(NAME),
            lambda: read_row(reader, 1),
            writer.commit,
            store.blobs.usage,
        )
    works_again(store, 3)
    assert free_bytes(opened) == before
    assert load(store, NAME) == rows_of(NAME, LARGE)
    with suppress(MissingObject):
        assert load(store, name_of(2)) == [b"12345"]


def test_faults_of_a_silent_memory_take_no_longer_than_the_timeout(
    server: MooncakeServer, store: MooncakeStore, opened: MooncakeBlobs
) -> None:
    save(store, NAME, LARGE)
    reader, before, row = store.open(NAME), free_bytes(opened), memoryview(bytearray(LARGE[1]))
    with stopped(server.holder):
        fails_in_time(lambda: reader.read(1, [row]))
        row[:] = bytes(LARGE[1])
        fails_in_time(lambda: save(store, name_of(2), LARGE))
        assert store.lookup([name_of(2)]) == [False], "the master still answers"
    assert free_bytes(opened) == before
    assert not any(row), "an abandoned read wrote into its caller's memory"
    works_again(store, 2)
    with suppress(MissingObject):  # the master may have given it up
        assert load(store, NAME) == rows_of(NAME, LARGE)


def test_fault_of_many_hung_calls_is_told_at_once(
    server: MooncakeServer, store: MooncakeStore, opened: MooncakeBlobs
) -> None:
    def lookup(_: int) -> None:
        with suppress(StoreFault):
            store.lookup([NAME])

    with stopped(server.master), ThreadPoolExecutor(20) as threads:
        list(threads.map(lookup, range(20)))
        assert opened._client.calls.hung >= 16
        began = Stopwatch()
        with pytest.raises(StoreFault, match="earlier calls still hang"):
            store.lookup([NAME])
        assert began.seconds < TIMEOUT_S / 2
    assert free_bytes(opened) > 0
    works_again(store, 3)
    time.sleep(0.1)
    assert sum(thread.name == "hybridkv-mooncake" for thread in threading.enumerate()) <= 8


@pytest.mark.parametrize("rows", [ROWS, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("place", [3, -1])
def test_fault_of_a_flipped_byte_is_noticed(
    store: MooncakeStore, plain: Any, rows: tuple[int, ...], place: int
) -> None:
    save(store, NAME, rows)
    raw = bytearray(plain.get(key_of(NAME)))
    raw[place] ^= 1
    plain.remove(key_of(NAME), True)
    plain.put(key_of(NAME), bytes(raw))
    with pytest.raises(CorruptObject):
        load(store, NAME)
    assert store.stats.corrupt == 1
    assert store.lookup([NAME]) == [False]
    assert save(store, NAME, rows)
    assert load(store, NAME) == rows_of(NAME, rows)


@pytest.mark.parametrize("rows", [ROWS, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kept", [1, 100, 5000, -1])
def test_fault_of_a_cut_object_is_noticed(store: MooncakeStore, plain: Any, rows: tuple[int, ...], kept: int) -> None:
    save(store, NAME, rows)
    raw = plain.get(key_of(NAME))
    plain.remove(key_of(NAME), True)
    plain.put(key_of(NAME), raw[:kept])
    with pytest.raises(CorruptObject):
        store.open(NAME)
    assert store.lookup([NAME]) == [False]


def test_fault_of_an_object_that_goes_away_before_it_is_read(store: MooncakeStore, plain: Any) -> None:
    save(store, NAME, LARGE)
    reader = store.open(NAME)
    plain.remove(key_of(NAME), True)
    with pytest.raises(MissingObject):
        read_row(reader, 1)
    assert (store.stats.corrupt, store.stats.faults) == (0, 0)


def test_fault_of_an_object_that_is_shorter_when_it_is_read(store: MooncakeStore, plain: Any) -> None:
    """Ranges beyond the end are refused by the client: no short row is taken for a whole one."""
    save(store, NAME, LARGE)
    reader = store.open(NAME)
    plain.remove(key_of(NAME), True)
    plain.put(key_of(NAME), b"short")
    with pytest.raises(MissingObject):
        read_row(reader, 1)
    assert (store.stats.corrupt, store.stats.faults) == (0, 0)


def test_an_object_deleted_and_overwritten_while_it_is_read_is_missing_not_corrupt(
    store: MooncakeStore, plain: Any, monkeypatch: pytest.MonkeyPatch, opened: MooncakeBlobs
) -> None:
    """What a transfer sees if another object gets the memory: other bytes, and the name is gone."""
    save(store, NAME, LARGE)
    reader = store.open(NAME)
    raw = opened._client._raw

    class Overwritten:
        def get_into_ranges(self, addresses: list[int], *rest: Any) -> Any:
            found = raw.get_into_ranges(addresses, *rest)
            ctypes.memset(addresses[0], 7, 1000)
            plain.remove(key_of(NAME), True)
            return found

    monkeypatch.setattr(opened._client, "_raw", Overwritten())
    monkeypatch.setattr(Overwritten, "__getattr__", lambda _, name: getattr(raw, name), raising=False)
    with pytest.raises(MissingObject):
        read_row(reader, 1)
    assert store.stats.corrupt == 0


def test_a_full_store_evicts_and_drops_but_does_not_fail(server: MooncakeServer, store: MooncakeStore) -> None:
    """128 MB of memory: the master evicts what is not there any more."""
    rows, count = (8 << 20,), 24
    for number in range(count):
        save(store, name_of(number), rows)
    stats = store.stats
    assert (stats.faults, stats.corrupt) == (0, 0)
    assert stats.saved + stats.dropped == count
    assert stats.dropped <= 2, "a write that finds no room waits for the eviction"
    assert stats.saved > 15, "it did not evict"
    there = store.lookup([name_of(number) for number in range(count)])
    assert 1 <= sum(there) <= 16
    assert load(store, name_of(there.index(True))) == rows_of(name_of(there.index(True)), rows)


def test_an_object_larger_than_the_memory_is_dropped(store: MooncakeStore) -> None:
    assert not save(store, NAME, (40 << 20,)), "half of the buffer is 32 MiB"
    assert store.stats.dropped == 1


def test_a_killed_writer_leaves_nothing_visible(server: MooncakeServer, store: MooncakeStore, tmp_path: Path) -> None:
    """Processes are killed at random times while they write. Every object is whole or missing, and can be written."""
    source = random.Random(5)
    for number in range(KILLS):
        command = [sys.executable, "-m", "tests.store.mooncake_writer", server.url, str(number)]
        writer = subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | mooncake.environment(mooncake.PACKAGE)
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        time.sleep(source.random() * 0.2)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        for name in writer_names(number):
            with suppress(MissingObject):
                assert load(store, name) == rows_of(name, WRITER_ROWS)
        store.delete(writer_names(number))
    assert (store.stats.corrupt, store.stats.faults) == (0, 0)
    deadline = time.monotonic() + 20
    for name in writer_names(KILLS - 1):
        while not store.lookup([name])[0]:
            save(store, name, WRITER_ROWS)
            assert time.monotonic() < deadline, "a dead writer still blocks its name"


def test_processes_share_a_full_store(server: MooncakeServer, store: MooncakeStore) -> None:
    """Two processes write, read and remove the same objects while the master evicts: bytes are right or missing."""
    command = [sys.executable, "-m", "tests.store.mooncake_writer", server.url, "share"]
    environment = os.environ | mooncake.environment(mooncake.PACKAGE)
    workers = [subprocess.Popen([*command, str(seed)], cwd=ROOT, env=environment) for seed in (1, 2)]
    try:
        assert [worker.wait(60 + SECONDS) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


class Garbage(BaseHTTPRequestHandler):
    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("answer", [b"", b"\xff\x00", b"[1]", b"{}", b'{"data": 3}', b"hybridkv-v1/objects/../x\n"])
def test_garbage_of_the_http_endpoint_is_no_crash(opened: MooncakeBlobs, answer: bytes) -> None:
    with HTTPServer(("127.0.0.1", 0), type("Answer", (Garbage,), {"answer": answer})) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        admin = Admin("127.0.0.1", http.server_address[1], opened._client.calls)
        try:
            assert not any(one.startswith("/") for one in admin.keys("hybridkv-v1/about/"))
            with pytest.raises(StoreFault, match="none of a Mooncake master"):
                list(admin.sizes(["one"]))
        finally:
            http.shutdown()
            thread.join()


def test_an_http_endpoint_that_is_not_there_is_named(opened: MooncakeBlobs) -> None:
    admin = Admin("127.0.0.1", 1, opened._client.calls)
    with pytest.raises(StoreFault, match=r"http://127.0.0.1:1, the master's HTTP endpoint.*refused; admin=HOST:PORT"):
        admin.keys("")
