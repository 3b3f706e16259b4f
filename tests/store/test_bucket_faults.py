"""Stores in object storage when objects rot, servers die, connections are cut, and answers are wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import obstore
import pytest

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault
from hybridkv.store import Guarded
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.bucket.faults import reason
from tests.patience import Stopwatch
from tests.store.bucket_processes import ROWS as LARGE_ROWS
from tests.store.bucket_processes import SIZE
from tests.store.buckets import blobs_of, new_prefix, opened
from tests.store.samples import NAMESPACE, load, name_of, read_row, rows_of, save
from tests.store.servers.proxy import Proxy
from tests.store.servers.s3 import CREDENTIALS, S3Server

NAME = name_of(1)
BIG = (10, 2 << 20)
TIMEOUT_S = 1.0
KILLS = int(os.environ.get("HYBRIDKV_BUCKET_KILLS", "4"))
"""So many writers are killed."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def store(s3: S3Server) -> Iterator[BlobStore]:
    with opened(s3.url(new_prefix())) as store:
        yield store


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", s3.port)) as proxy:
        yield proxy


@pytest.fixture
def far(s3: S3Server, proxy: Proxy) -> Iterator[BlobStore]:
    """A store behind a proxy, with NAME in it."""
    with opened(s3.url(new_prefix(), f"&timeout={TIMEOUT_S}s", endpoint=f"http://{proxy.host}")) as store:
        save(store, NAME, BIG)
        yield store
        proxy.silent = proxy.deaf = proxy.refuse = False
        proxy.answer = None


def raw_key(store: BlobStore) -> str:
    return blobs_of(store).keys.object(NAME)


# --- objects that are not what was written ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 9, 20, 90, 190, 4096, 4096 + 4999, -1])
def test_flipped_bits_are_noticed(store: BlobStore, s3: S3Server, place: int) -> None:
    save(store, NAME)
    raw = bytearray(obstore.get(s3.client(), raw_key(store)).bytes())
    raw[place] ^= 1
    obstore.put(s3.client(), raw_key(store), bytes(raw))
    with pytest.raises(StoreError):
        load(store, NAME)
    assert store.stats.faults == 0
    assert store.stats.corrupt + store.stats.unknown == 1
    assert store.lookup([NAME]) == [store.stats.unknown == 1]


@pytest.mark.parametrize("nbytes", [0, 1, 15, 100, 4095, 4096, 9000, -1])
def test_truncated_objects_are_noticed(store: BlobStore, s3: S3Server, nbytes: int) -> None:
    save(store, NAME)
    raw = bytes(obstore.get(s3.client(), raw_key(store)).bytes())
    obstore.put(s3.client(), raw_key(store), raw[:nbytes])
    with pytest.raises(CorruptObject):
        store.open(NAME)
    assert store.lookup([NAME]) == [False]
    assert store.stats.corrupt == 1


def test_an_object_that_goes_is_missing(store: BlobStore) -> None:
    save(store, NAME, BIG)
    with store.open(NAME) as reader:
        assert store.lookup([NAME]) == [True]
        store.delete([NAME])
        with pytest.raises(MissingObject):
            read_row(reader, 1)
        with pytest.raises(MissingObject):
            store.open(NAME)
    assert (store.stats.corrupt, store.stats.faults) == (0, 0)


def test_an_object_that_is_replaced_is_missing(store: BlobStore, s3: S3Server) -> None:
    """Rows of two objects are never mixed, even if both are right."""
    save(store, NAME, BIG)
    with store.open(NAME) as reader:
        raw = bytearray(obstore.get(s3.client(), raw_key(store)).bytes())
        raw[-1] ^= 1
        obstore.put(s3.client(), raw_key(store), bytes(raw))
        with pytest.raises(MissingObject):
            read_row(reader, 1)
    assert store.stats.corrupt == 0


# --- servers ----------------------------------------------------------------------------------------------------------


def test_a_forked_process_is_refused_and_does_not_hang(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name_of(number) for number in range(3)]
    assert store.lookup(names) == [False] * 3
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for some in (names, names[:1]):
        with pytest.raises(StoreFault, match="forked"):
            store.lookup(some)
    monkeypatch.undo()


def test_a_server_may_die_and_come_back(tmp_path: Path) -> None:
    with S3Server(tmp_path / "data") as server, opened(server.url("x", "&timeout=8s")) as store:
        save(store, NAME, BIG)
        reader = store.open(NAME)
        writer = store.create(name_of(2), [4], value=1, position=0)
        assert writer is not None
        writer.write(0, [memoryview(b"abcd")])
        begun, ended = threading.Event(), threading.Event()
        wrong: list[BaseException] = []

        def read_on() -> None:
            try:
                while not ended.is_set():
                    assert read_row(reader, 1) == rows_of(NAME, BIG)[1]
                    begun.set()
            except StoreFault:
                pass
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=read_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert begun.wait(10)
        server.kill()
        ended.wait(0.2)
        for call in (writer.commit, lambda: store.lookup([NAME]), lambda: read_row(reader, 1)):
            with pytest.raises(StoreFault, match="s3://hybridkv-tests/x"):
                call()
        (found,) = store.open_all([NAME])
        assert isinstance(found, StoreFault)
        ended.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert wrong == []
        server.start()
        assert read_row(reader, 1) == rows_of(NAME, BIG)[1]
        assert save(store, name_of(2), [4])
        assert store.lookup([NAME, name_of(2)]) == [True, True]


def test_a_dead_server_fails_large_lookups_at_once(far: BlobStore, proxy: Proxy) -> None:
    proxy.silent = True
    begun = Stopwatch()
    with pytest.raises(StoreFault, match="error sending request"):
        far.lookup([name_of(number) for number in range(2000)])
    found = far.open_all([name_of(number) for number in range(500)])
    assert all(isinstance(one, StoreFault) for one in found)
    assert begun.seconds < 4 * TIMEOUT_S + 2


def test_a_silent_server_times_out(far: BlobStore, proxy: Proxy) -> None:
    reader = far.open(NAME)
    proxy.silent = True
    writer_data = memoryview(bytes(10))
    calls = (
        lambda: far.lookup([NAME]),
        lambda: read_row(reader, 1),
        lambda: list(far.objects()),
        lambda: blobs_of(far).client.create("x", writer_data, "x"),
    )
    for call in calls:
        begun = Stopwatch()
        with pytest.raises(StoreFault, match="s3://hybridkv-tests/"):
            call()
        assert begun.seconds < 2 * TIMEOUT_S + 1
    proxy.silent = False
    proxy.cut()
    assert read_row(reader, 1) == rows_of(NAME, BIG)[1]


def test_a_server_that_reads_nothing_times_out(far: BlobStore, proxy: Proxy) -> None:
    proxy.deaf = True
    begun = Stopwatch()
    with pytest.raises(StoreFault):
        blobs_of(far).client.create("x", memoryview(bytes(16 << 20)), "x")
    assert begun.seconds < 3 * TIMEOUT_S + 1


def test_a_slow_server_times_out_in_the_middle(far: BlobStore, proxy: Proxy) -> None:
    with far.open(NAME) as reader:
        proxy.delay_s = 0.1  # for each of 32 chunks
        begun = Stopwatch()
        with pytest.raises(StoreFault):
            read_row(reader, 1)
        assert begun.seconds < 3 * TIMEOUT_S + 1


@pytest.mark.parametrize("passed", [0, 200, 5_000, 500_000, 1_500_000])
def test_connections_cut_in_the_middle_of_a_value(far: BlobStore, proxy: Proxy, passed: int) -> None:
    with far.open(NAME) as reader:
        proxy.cut()
        proxy.cut_after = passed
        try:
            assert read_row(reader, 1) == rows_of(NAME, BIG)[1]
            assert passed > BIG[1] / 2  # one more request has brought the rest
        except StoreFault:
            assert far.stats.faults == 1
        proxy.cut_after = None
        assert read_row(reader, 1) == rows_of(NAME, BIG)[1]
    assert far.stats.corrupt == 0


@pytest.mark.parametrize("passed", [0, 300, 100_000, 2_000_000])
def test_connections_cut_in_the_middle_of_a_write(far: BlobStore, proxy: Proxy, s3: S3Server, passed: int) -> None:
    writer = far.create(name_of(2), BIG, value=1, position=0)
    assert writer is not None
    for row, data in enumerate(rows_of(name_of(2), BIG)):
        writer.write(row, [memoryview(data)])
    proxy.cut()
    proxy.cut_requests_after = passed
    with pytest.raises(StoreFault):
        writer.commit()
    proxy.cut_requests_after = None
    assert far.lookup([name_of(2)]) == [False]
    assert far.stats.objects == 1
    assert save(far, name_of(2), BIG)
    assert load(far, name_of(2)) == rows_of(name_of(2), BIG)


def test_a_dead_pooled_connection_is_no_fault(far: BlobStore, proxy: Proxy) -> None:
    for _ in range(3):
        assert far.lookup([NAME]) == [True]
        proxy.cut()
        assert load(far, NAME) == rows_of(NAME, BIG)
        proxy.cut()
    assert far.stats.faults == 0


def test_a_guarded_store_is_skipped_and_comes_back(s3: S3Server, proxy: Proxy) -> None:
    url = s3.url(new_prefix(), "&timeout=1s", endpoint=f"http://{proxy.host}")
    now = 0.0
    with Guarded(opened(url), clock=lambda: now) as store:
        save(store, NAME)
        proxy.refuse = True
        proxy.cut()
        assert store.lookup([NAME]) == [False]
        assert not save(store, name_of(2))
        asked = proxy.connections
        assert store.lookup([NAME]) == [False]
        assert proxy.connections == asked
        proxy.refuse = False
        now += 2
        assert store.lookup([NAME]) == [True]
        assert load(store, NAME) == rows_of(NAME)


# --- answers ----------------------------------------------------------------------------------------------------------

HEAD = 'HTTP/1.1 {status}\r\nETag: "x"\r\nLast-Modified: Wed, 18 Nov 2026 02:21:59 GMT\r\nContent-Length: {length}\r\n'


def reply(status: str, body: bytes = b"", length: int | None = None, **headers: object) -> bytes:
    head = HEAD.format(status=status, length=len(body) if length is None else length)
    head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return head.encode() + b"\r\n" + body


ANSWERS = {
    "noise": b"\x00\xff" * 40,
    "full": reply("507 Insufficient Storage", b"<?xml?><Error><Code>Full</Code></Error>"),
    "slow down": reply("503 Slow Down", b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>"),
    "moved": reply("301 Moved Permanently", Location="http://127.0.0.1:1/"),
    "whole": reply("200 OK", bytes(100)),
    "other range": reply("206 Partial Content", bytes(100), Content_Range="bytes 5-104/200"),
    "no range": reply("206 Partial Content", bytes(100), Content_Range="bytes what"),
    "huge": reply("206 Partial Content", bytes(100), length=2**62, Content_Range=f"bytes 0-{2**62 - 1}/{2**62}"),
    "too many": reply("206 Partial Content", bytes(200_000), Content_Range="bytes 0-65535/100000000"),
    "too few": reply("206 Partial Content", bytes(100), Content_Range="bytes 0-65535/100000000"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_wrong_answers_are_faults(far: BlobStore, proxy: Proxy, kind: str) -> None:
    with far.open(NAME) as reader:
        proxy.answer = ANSWERS[kind]
        proxy.cut()
        calls = (lambda: far.open(NAME), lambda: read_row(reader, 1), lambda: list(far.objects()))
        for call in calls:
            with pytest.raises(StoreFault, match=r"^s3://hybridkv-tests/") as caught:
                call()
            assert len(str(caught.value)) < 600
            assert str(caught.value).isprintable()
        if kind not in ("whole", "other range", "no range", "huge", "too many", "too few"):
            with pytest.raises(StoreFault):
                far.lookup([NAME])
            with pytest.raises(StoreFault):
                far.describe(NAMESPACE, {"model": "mine"})
        proxy.answer = None
        proxy.cut()
        assert read_row(reader, 1) == rows_of(NAME, BIG)[1]
    assert far.stats.corrupt == 0


@pytest.mark.parametrize("nbytes", [0, 1000, BIG[1] - 1, 2 * BIG[1]])
def test_rows_of_a_wrong_length_are_faults(far: BlobStore, proxy: Proxy, nbytes: int) -> None:
    with far.open(NAME) as reader:
        end = reader.header.nbytes
        body = bytes(nbytes)
        proxy.answer = reply("206 Partial Content", body, ETag='"x"', Content_Range=f"bytes 65536-{end - 1}/{end}")
        proxy.cut()
        with pytest.raises(StoreFault, match="sent other bytes"):
            read_row(reader, 1)


def test_sizes_of_a_server_are_not_believed(far: BlobStore, proxy: Proxy) -> None:
    far.keeps_corrupt = True
    proxy.answer = reply("206 Partial Content", bytes(65536), Content_Range=f"bytes 0-65535/{2**62}")
    proxy.cut()
    with pytest.raises(CorruptObject):
        far.open(NAME)


def test_reasons_hold_no_signatures() -> None:
    text = (
        "Denied for path a/b: Error performing GET https://host:1/box/a?sv=1&sig=c2VjcmV0 in 1.2ms - "
        "Server returned non-2xx status code: 403 Forbidden: <?xml version='1.0'?><Error><Code>AuthFailed</Code>"
        "<StringToSign>c2VjcmV0</StringToSign></Error>\n\nDebug source:\nc2VjcmV0"
    )
    assert reason(OSError(text)) == (
        "Denied: Error performing GET https://host:1 - Server returned non-2xx status code: 403 Forbidden (AuthFailed)"
    )


# --- threads and processes --------------------------------------------------------------------------------------------


def test_no_thread_outlives_its_store(s3: S3Server) -> None:
    before = threading.active_count()
    for _ in range(5):
        with opened(s3.url(new_prefix())) as store:
            store.lookup([NAME])
    assert threading.active_count() <= before


def test_closing_ends_calls_of_other_threads(far: BlobStore, proxy: Proxy) -> None:
    proxy.silent = True
    raised: list[StoreError] = []

    def ask() -> None:
        try:
            far.lookup([NAME, name_of(2)])
        except StoreError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    far.close()
    thread.join(5)
    assert not thread.is_alive()
    assert len(raised) == 1


def spawn(part: str, url: str, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.bucket_processes", part, url, str(number)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_all(store: BlobStore) -> int:
    """All that is visible is whole. Returns the number of objects."""
    names = [stored.name for stored in store.objects()]
    for name in names:
        with suppress(MissingObject):
            assert load(store, name) == rows_of(name, LARGE_ROWS)
    assert store.stats.corrupt == 0
    return len(names)


def test_killed_writers_leave_nothing_incomplete(s3: S3Server) -> None:
    url, source = s3.url(new_prefix()), random.Random(1)
    for number in range(KILLS):
        writer = spawn("write", url, number)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        time.sleep(source.uniform(0.05, 0.3))
        writer.kill()
        writer.communicate()
    with opened(url) as store:
        assert check_all(store)
        assert store.collect().files == 0


def test_processes_share_a_store_while_it_evicts(s3: S3Server) -> None:
    url = s3.url(new_prefix())
    workers = [spawn("share", url, number) for number in range(2)]
    with opened(url) as store:
        most = 0
        while any(worker.poll() is None for worker in workers):
            most = max(most, sum(stored.nbytes for stored in store.objects()))
            check_all(store)
        for worker in workers:
            _, errors = worker.communicate()
            assert worker.returncode == 0, errors
        assert SIZE // 2 < most <= 2 * SIZE
        assert check_all(store)
