"""Stores on Valkey when servers die, connections break, answers are late or nonsense, and memory is full."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.store import CorruptObject, Guarded, MissingObject, StoreFault, StoreInputError, open_store
from hybridkv.store.urls import parse_url
from hybridkv.store.valkey.blobs import ValkeyBlobs, ValkeyStore
from hybridkv.store.valkey.exchange import Answer, Command
from hybridkv.store.valkey.index import Index
from hybridkv.store.valkey.keys import INDEX, LOCK, object_key, shard_of, slot_of
from hybridkv.store.valkey.opening import open_address
from hybridkv.store.valkey.resp import Connection
from hybridkv.store.valkey.wire import GarbledError, ServerError, encode
from tests.patience import Stopwatch
from tests.store.samples import load, name_of, read_row, rows_of, save
from tests.store.servers.proxy import Proxy
from tests.store.servers.valkey import ValkeyCluster, ValkeyServer, _cluster_port
from tests.store.valkey_processes import PARTS
from tests.store.versions import written_by_hand

NAME = name_of(1)
LARGE = [3 << 20, 100]


@pytest.fixture(scope="module")
def one_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def server(one_server: ValkeyServer) -> ValkeyServer:
    one_server.ask("FLUSHALL")
    return one_server


@pytest.fixture
def proxy(server: ValkeyServer) -> Iterator[Proxy]:
    with Proxy(server.place) as proxy:
        yield proxy


def opened(url: str, size: int = 64 << 20) -> ValkeyStore:
    return open_address(parse_url(url), size)


def through(proxy: Proxy, timeout: str = "5s") -> ValkeyStore:
    return opened(f"valkey://{proxy.host}?timeout={timeout}")


def blobs_of(store: ValkeyStore) -> ValkeyBlobs:
    assert isinstance(store.blobs, ValkeyBlobs)
    return store.blobs


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_fault_of_bytes_that_rot(server: ValkeyServer) -> None:
    with opened(server.url) as store:
        for change in ("flipped", "cut", "longer", "header"):
            raw = bytearray(written_by_hand(NAME))
            if change == "flipped":
                raw[-1] ^= 1
            elif change == "header":
                raw[60] ^= 1
            server.ask("SET", object_key(NAME), raw[:-1] if change == "cut" else raw + bytes(change == "longer"))
            with pytest.raises(CorruptObject):
                load(store, NAME)
            assert store.lookup([NAME]) == [False]
        assert store.stats.corrupt == 4


def test_fault_of_an_object_cut_short_while_open(server: ValkeyServer) -> None:
    with opened(server.url) as store:
        save(store, NAME, LARGE)
        with store.open(NAME) as reader:
            server.ask("SET", object_key(NAME), b"x" * (1 << 20))
            with pytest.raises(CorruptObject, match="ends after"):
                read_row(reader, 0)


def test_fault_of_an_object_that_goes_between_lookup_and_read(server: ValkeyServer) -> None:
    with opened(server.url) as store:
        save(store, NAME, LARGE)
        with store.open(NAME) as reader:
            assert store.delete([NAME]) == 1
            with pytest.raises(MissingObject, match="deleted"):
                read_row(reader, 0)
        assert store.stats.corrupt == store.stats.faults == 0


def test_fault_of_an_object_written_while_it_is_opened(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(server.url) as store, opened(server.url) as other:
        servers = blobs_of(store).servers
        real, calls = servers.run, []

        def run(commands: Sequence[Command], *, again: bool = True) -> list[Answer]:
            calls.append(len(commands))
            answers = real(commands, again=again)
            if len(calls) == 1:
                save(other, NAME)
            return answers

        monkeypatch.setattr(servers, "run", run)
        with pytest.raises(MissingObject):
            store.open(NAME)
        assert load(store, NAME) == rows_of(NAME)


# --- connections ------------------------------------------------------------------------------------------------------


def test_fault_of_a_server_that_is_killed_and_comes_back() -> None:
    with ValkeyServer() as server, opened(server.url) as store:
        save(store, NAME, LARGE)
        assert store.stats.objects == 1
        server.kill()
        for call in (lambda: store.lookup([NAME]), lambda: store.open(NAME), lambda: save(store, name_of(2))):
            with pytest.raises(StoreFault, match=f"127.0.0.1:{server.port}: Connection refused"):
                call()
        assert (store.stats.objects, store.stats.faults) == (1, 3)
        server.start()
        assert save(store, NAME)
        assert load(store, NAME) == rows_of(NAME)


def test_fault_of_a_server_that_is_killed_amid_reads_and_writes() -> None:
    """Threads read and write while the server dies twice: they get right rows or an error, and work again after it."""
    over, errors = threading.Event(), []

    def work(store: ValkeyStore, number: int) -> None:
        while not over.is_set():
            try:
                save(store, name_of(number), LARGE)
                if load(store, name_of(number)) != rows_of(name_of(number), LARGE):
                    errors.append("wrong rows")
                store.delete([name_of(number)])
            except (StoreFault, MissingObject):
                time.sleep(0.01)
            except Exception as error:
                errors.append(repr(error))
                return

    with ValkeyServer() as server, opened(server.url) as store:
        threads = [threading.Thread(target=work, args=(store, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(0.2)
            server.kill()
            time.sleep(0.05)
            server.start()
        time.sleep(0.2)
        over.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert store.stats.faults
        assert store.stats.corrupt == 0
        save(store, NAME)
        assert load(store, NAME) == rows_of(NAME)
        assert {one.name for one in store.objects()} >= {NAME}


def test_fault_of_an_idle_connection_is_not_noticed(proxy: Proxy) -> None:
    with through(proxy) as store:
        for _ in range(3):
            save(store, NAME)
            proxy.cut()
            assert store.lookup([NAME]) == [True]
            proxy.cut()
            assert store.delete([NAME]) == 1
        assert store.stats.faults == 0


def test_fault_of_a_connection_that_dies_as_it_is_used(proxy: Proxy) -> None:
    """What may be asked twice is asked again on a fresh connection, once; a write is not."""
    with through(proxy) as store:
        save(store, NAME, LARGE)
        for is_read in (False, True):
            proxy.cut_next, before = 1, store.blobs.round_trips
            assert load(store, NAME) == rows_of(NAME, LARGE) if is_read else store.lookup([NAME]) == [True]
            assert store.blobs.round_trips - before >= 3  # asked, logged in, asked again
        proxy.cut_next = 2
        with pytest.raises(StoreFault):
            store.lookup([NAME])
        pending = store.blobs.begin(name_of(2), 10, 1.0, 0)
        assert pending is not None
        proxy.cut_next = 1
        with pytest.raises(StoreFault):
            pending.publish()
        pending.discard()


@pytest.mark.parametrize("after", [1000, 200_000, 2_000_000])
def test_fault_of_a_connection_cut_inside_a_value(server: ValkeyServer, proxy: Proxy, after: int) -> None:
    with opened(server.url) as store:
        save(store, NAME, LARGE)
    with through(proxy) as store:
        proxy.cut_after = after
        with pytest.raises(StoreFault, match=rf"{proxy.host}: "):
            load(store, NAME)
        proxy.cut_after = None
        assert load(store, NAME) == rows_of(NAME, LARGE)
        assert store.stats.corrupt == 0


@pytest.mark.parametrize("after", [300, 100_000, 3_000_000])
def test_fault_of_a_connection_cut_inside_a_write(server: ValkeyServer, proxy: Proxy, after: int) -> None:
    with through(proxy) as store, opened(server.url) as witness:
        proxy.cut_requests_after = after
        with pytest.raises(StoreFault):
            save(store, NAME, LARGE)
        assert witness.lookup([NAME]) == [False]
        assert witness.stats.nbytes == 0
        proxy.cut_requests_after = None
        assert save(store, NAME, LARGE)
        assert load(witness, NAME) == rows_of(NAME, LARGE)


def test_fault_of_a_server_that_never_answers(proxy: Proxy) -> None:
    with through(proxy, "300ms") as store:
        save(store, NAME, LARGE)
        reader = store.open(NAME)
        proxy.silent = True
        for call in (lambda: store.lookup([NAME]), lambda: read_row(reader, 0), lambda: save(store, name_of(2), LARGE)):
            begin = Stopwatch()
            with pytest.raises(StoreFault, match=r"no answer within 0.3 s"):
                call()
            assert begin.seconds < 2
        proxy.silent = False
        assert load(store, NAME) == rows_of(NAME, LARGE)


def test_gauges_do_not_wait_for_a_server_each_time(proxy: Proxy) -> None:
    with through(proxy, "300ms") as store:
        save(store, NAME)
        before = store.stats
        proxy.silent = True
        begin = Stopwatch()
        for _ in range(20):
            assert store.stats.nbytes == before.nbytes
        assert begin.seconds < 2
        proxy.silent = False
        assert save(store, name_of(2))  # asks for the usage, too
        assert store.stats.objects == 2


def test_fault_of_a_server_that_takes_nothing(server: ValkeyServer, proxy: Proxy) -> None:
    with through(proxy, "300ms") as store:
        pending = store.blobs.begin(NAME, 64 << 20, 1.0, 0)
        assert pending is not None
        proxy.deaf = True
        begin = Stopwatch()
        with pytest.raises(StoreFault, match="no answer"):
            pending.publish()
        assert begin.seconds < 8
        pending.discard()
        proxy.deaf = False
        assert store.stats.nbytes == 0


def test_fault_of_answers_that_trickle(server: ValkeyServer, proxy: Proxy) -> None:
    """Each piece comes in time, and all of them together do not."""
    with opened(server.url) as store:
        save(store, NAME, [8 << 20])
    with through(proxy, "300ms") as store, store.open(NAME) as reader:
        proxy.delay_s = 0.1
        begin = Stopwatch()
        with pytest.raises(StoreFault, match="no answer"):
            read_row(reader, 0)
        assert begin.seconds < 3


def test_slow_answers_are_fine(proxy: Proxy) -> None:
    proxy.delay_s = 0.02
    with through(proxy) as store:
        save(store, NAME)
        assert load(store, NAME) == rows_of(NAME)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff",
        b"$99999999999999\r\n",
        b"$-5\r\n",
        b"*999999999\r\n",
        b"*1\r\n" * 50,
        b":12x\r\n",
        b"+OK\r\n",
        b"$3\r\nabcdef\r\n",
        b"%1\r\n+a\r\n+b\r\n",
    ],
)
def test_fault_of_garbage(server: ValkeyServer, proxy: Proxy, answer: bytes) -> None:
    """Nothing that a server says is taken for a row, and the next connection works."""
    with opened(server.url) as store:
        save(store, NAME, LARGE)
    with through(proxy, "100ms") as store:
        reader = store.open(NAME)
        proxy.answer = answer * 2
        with pytest.raises((StoreFault, MissingObject)):
            read_row(reader, 0)
        with pytest.raises((StoreFault, MissingObject)):
            store.open(NAME)
        with suppress(StoreFault):
            assert store.lookup([NAME]) == [False]
        proxy.answer = None
        proxy.cut()
        assert store.lookup([NAME]) == [True]
        assert load(store, NAME) == rows_of(NAME, LARGE)


def test_fault_of_refused_connections(server: ValkeyServer, proxy: Proxy) -> None:
    proxy.refuse = True
    with pytest.raises(StoreFault, match=proxy.host):
        through(proxy)
    with pytest.raises(StoreFault, match=r"/no/such: No such file"):
        opened("valkey+unix:///no/such")
    with pytest.raises(StoreFault, match=r"nowhere.invalid:6379"):
        opened("valkey://nowhere.invalid")


def test_no_connection_is_left_open(server: ValkeyServer, proxy: Proxy) -> None:
    threads = threading.active_count()
    with through(proxy, "100ms") as store:
        for number in range(20):
            save(store, name_of(number))
        assert proxy.connections == 1
        proxy.silent = True
        for _ in range(3):
            with pytest.raises(StoreFault):
                store.lookup([NAME])
        proxy.silent = False
        proxy.cut()
    end = time.monotonic() + 5
    while proxy.open_connections or threading.active_count() > threads:
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(StoreFault, match="closed"):
        store.lookup([NAME])


def test_a_guarded_store_goes_on_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.store.breaker._FIRST_REST_S", 0.05)
    with ValkeyServer() as server, open_store(f"{server.url}?size=1GiB") as store:
        assert isinstance(store, Guarded)
        save(store, NAME)
        server.kill()
        assert store.lookup([NAME]) == [False]
        assert not save(store, name_of(2))
        server.start()
        end = time.monotonic() + 5
        while not save(store, name_of(2)):
            assert time.monotonic() < end
            time.sleep(0.02)
        while store.lookup([name_of(2)]) == [False]:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert load(store, name_of(2)) == rows_of(name_of(2))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_fault_of_full_memory() -> None:
    """Writes fail, reads and deletions go on, and the counts stay right."""
    with ValkeyServer("--maxmemory", "24mb") as server, opened(server.url) as store:
        saved = 0
        with suppress(StoreFault):
            while saved < 20:
                save(store, name_of(saved), LARGE)
                saved += 1
        assert 2 < saved < 20
        with pytest.raises(StoreFault, match="OOM command not allowed"):
            save(store, name_of(saved), LARGE)
        assert load(store, name_of(0)) == rows_of(name_of(0), LARGE)
        assert store.stats.objects == saved == len(list(store.objects()))
        server.ask("CONFIG", "SET", "maxmemory", "4mb")
        assert store.delete([name_of(0)]) == 1
        assert store.stats.objects == saved - 1
        assert store.shrink(0) == saved - 1
        assert (store.stats.objects, store.stats.nbytes) == (0, 0)


def test_a_server_that_evicts_on_its_own() -> None:
    options = ("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-random")
    names = [name_of(number) for number in range(40)]
    with ValkeyServer(*options) as server, opened(server.url, 1 << 60) as store:
        for name in names:
            save(store, name, LARGE)
        there = [name for name, found in zip(names, store.lookup(names), strict=True) if found]
        assert 0 < len(there) < 12
        for name in there:
            assert load(store, name) == rows_of(name, LARGE)
        assert {one.name for one in store.objects()} == set(there)
        server.ask("CONFIG", "SET", "maxmemory", "0")
        store.collect()
        assert store.stats.objects == len(there)


# --- credentials and TLS ----------------------------------------------------------------------------------------------


def test_fault_of_a_wrong_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ValkeyServer(password="right-one") as server:
        with pytest.raises(StoreInputError, match=r"refuses the default user.*HYBRIDKV_VALKEY_PASSWORD"):
            opened(server.url)
        monkeypatch.setenv("HYBRIDKV_VALKEY_PASSWORD", "wrong-one")
        with pytest.raises(StoreInputError, match="WRONGPASS") as caught:
            opened(server.url)
        assert "wrong-one" not in str(caught.value)
        with pytest.raises(StoreInputError, match="refuses user 'bob'"):
            opened(f"valkey://bob@127.0.0.1:{server.port}")
        monkeypatch.setenv("HYBRIDKV_VALKEY_PASSWORD", "right-one")
        with opened(server.url) as store:
            assert "right-one" not in repr(vars(blobs_of(store).servers))
            assert save(store, NAME)
            assert load(store, NAME) == rows_of(NAME)
            server.ask("CONFIG", "SET", "requirepass", "changed")
            server.password = "changed"
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(StoreFault, match="refuses the default user"):
                store.lookup([NAME])


def test_a_server_that_quotes_what_it_is_sent_does_not_show_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDKV_VALKEY_PASSWORD", "right-one")
    with ValkeyServer("--rename-command", "HELLO", "") as server:
        with pytest.raises(StoreInputError, match=r"needs Redis 6\.2") as caught:
            opened(server.url)
        assert "right-one" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "kind"),
    [("valkey://host:0", StoreInputError), ("valkey://a..b", StoreFault), ("valkey://[::]:1", StoreFault)],
)
def test_fault_of_a_host_that_cannot_be(url: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        opened(url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_tls_checks_the_authority_and_the_name(server: ValkeyServer, certificate: Path) -> None:
    """The proxy speaks TLS: not every build of the server does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert", certificate / "key")
    with Proxy(server.place, tls=context) as proxy:
        ours = f"?ca_file={certificate}/cert&timeout=1s"
        with opened(f"valkeys://localhost:{proxy.port}{ours}") as store:
            save(store, NAME, LARGE)
            assert load(store, NAME) == rows_of(NAME, LARGE)
            names = [name_of(number) for number in range(3000)]
            assert sum(store.lookup(names)) == 1
            proxy.cut()
            assert store.lookup([NAME]) == [True]
            proxy.silent = True
            with pytest.raises(StoreFault, match="no answer within 1 s"):
                store.lookup([NAME])
            proxy.silent = False
        for url in (f"rediss://127.0.0.1:{proxy.port}{ours}", f"valkeys://localhost:{proxy.port}"):
            with pytest.raises(StoreFault, match=r"TLS: .*CERTIFICATE.VERIFY.FAILED"):
                opened(url)
        with pytest.raises(StoreInputError, match="ca_file=/no/such cannot be read"):
            opened(f"valkeys://localhost:{proxy.port}?ca_file=/no/such")
    with pytest.raises(StoreFault):
        opened(f"valkeys://127.0.0.1:{server.port}?timeout=500ms&ca_file={certificate}/cert")


def test_fault_while_evicting_does_not_hold_up_threads_one_after_another(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(f"{server.url}?timeout=300ms", 1 << 20)
    for number in range(10):
        assert save(store, name_of(number), [100_000])
    lock, begun = Index.lock, threading.Event()

    def locked(index: Index) -> str | None:
        if not begun.is_set():
            begun.set()
            time.sleep(0.5)  # the others begin to wait
            os.kill(server.process_id, signal.SIGSTOP)
        return lock(index)

    monkeypatch.setattr(Index, "lock", locked)
    with ThreadPoolExecutor(12) as threads:
        begun_at = Stopwatch()
        tries = [threads.submit(save, store, name_of(number), [900_000]) for number in range(100, 112)]
        assert all(isinstance(one.exception(), StoreFault) for one in tries)
    assert begun_at.seconds < 2.5
    os.kill(server.process_id, signal.SIGCONT)
    monkeypatch.undo()
    assert _evicts_again(store)
    store.close()


def _evicts_again(store: ValkeyStore) -> bool:
    """The lock of the thread that failed may lie on the server for half a minute."""
    blobs_of(store).servers.run([Command(encode("DEL", LOCK), slot_of(LOCK))])
    return save(store, name_of(200), [900_000])


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_a_server_of_a_cluster_that_hangs_does_not_make_the_others_late() -> None:
    names = [name_of(number) for number in range(60)]
    with ValkeyCluster() as cluster, opened(cluster.url) as writer:
        for name in names:
            assert save(writer, name)
        for number, server in enumerate(cluster.servers):
            with opened(f"{cluster.servers[number - 1].url}?timeout=400ms") as store:
                pid = server.process_id
                os.kill(pid, signal.SIGSTOP)
                try:
                    nodes = {name: _node(writer, server) for name in names}
                    there = [
                        blobs_of(writer).servers._node(INDEX[shard_of(name)].slot) is not nodes[name] for name in names
                    ]
                    assert store.lookup(names) == there
                finally:
                    os.kill(pid, signal.SIGCONT)


def test_a_cluster_without_slots_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.store.valkey.servers._REFRESH_S", 0.0)
    with ValkeyServer("--cluster-enabled", "yes", port=_cluster_port()) as server, opened(server.url) as store:
        with pytest.raises(StoreFault, match="no server has slot"):
            store.lookup([NAME])
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with suppress(StoreFault):
                assert store.lookup([NAME]) == [False]
                break
            time.sleep(0.1)
        assert store.lookup([NAME]) == [False]


def test_faults_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots move while they are in use; then a server dies and comes back."""
    monkeypatch.setattr("hybridkv.store.breaker._FIRST_REST_S", 0.1)
    names = [name_of(number) for number in range(60)]
    with ValkeyCluster() as cluster, opened(cluster.url) as store:
        servers = blobs_of(store).servers
        for name in names[:40]:
            assert save(store, name)

        slot = INDEX[shard_of(names[0])].slot
        owner = next(number for number, one in enumerate(cluster.servers) if _holds(one, slot))
        other = (owner + 1) % 3
        source, target = cluster.servers[owner], cluster.servers[other]
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.node_id(owner))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.node_id(other))
        assert store.lookup(names[:40]) == [True] * 40
        keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert isinstance(keys, list)
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        assert load(store, names[0]) == rows_of(names[0])  # ASK
        assert store.lookup(names[:40]) == [True] * 40
        assert store.delete(names[:1]) == 1
        assert save(store, names[0])
        for one in (target, source):
            one.ask("CLUSTER", "SETSLOT", slot, "NODE", cluster.node_id(other))
        assert load(store, names[0]) == rows_of(names[0])  # MOVED
        before = store.blobs.round_trips
        assert load(store, names[0]) == rows_of(names[0])
        assert store.blobs.round_trips - before == 1
        assert store.stats.objects == 40

        victim = cluster.servers[other]
        lost = [name for name in names[:40] if servers._node(INDEX[shard_of(name)].slot) is _node(store, victim)]
        kept = [name for name in names[:40] if name not in lost]
        assert lost
        assert kept
        victim.kill()
        for _ in range(3):
            assert store.lookup(names[:40]) == [name in kept for name in names[:40]]
            assert [load(store, name) for name in kept] == [rows_of(name) for name in kept]
            assert all(isinstance(one, MissingObject) for one in store.open_all(lost))
        assert store.create(lost[0], [10], value=1, position=0) is None
        store.touch(names[:40])
        assert store.delete(kept[:1] + lost[:1]) == 1
        assert store.stats.objects == 39  # what the dead server had counts until it is back
        assert store.stats.faults == 0
        victim.start()
        end = time.monotonic() + 15
        while not save(store, lost[0]):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert load(store, lost[0]) == rows_of(lost[0])

        for one in cluster.servers:
            one.kill()
        with pytest.raises(StoreFault):
            store.lookup(names[:40])


def _holds(server: ValkeyServer, slot: int) -> bool:
    try:
        server.ask("CLUSTER", "COUNTKEYSINSLOT", slot)
        server.ask("EXISTS", next(f"x{{{tag}}}" for tag, one in INDEX.items() if one.slot == slot))
    except ServerError:
        return False
    return True


def _node(store: ValkeyStore, server: ValkeyServer) -> object:
    return next(one for one in blobs_of(store).servers.nodes() if one.pool.place.port == server.port)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_faults_of_processes(part: str, server: ValkeyServer) -> None:
    """Each part says in tests/store/valkey_processes.py what it does."""
    command, root = [sys.executable, "-m", "tests.store.valkey_processes", part, server.url], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


# --- the protocol -----------------------------------------------------------------------------------------------------


def feed(data: bytes, cuts: list[int]) -> Connection:
    """A connection on which these bytes come in several pieces, and then the end."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, 5.0)
    connection.start(0)

    def send() -> None:
        with theirs, suppress(BrokenPipeError):
            begin = 0
            for end in [*sorted(cuts), len(data)]:
                theirs.sendall(data[begin:end])
                begin = max(begin, end)
                time.sleep(0.0005 * bool(cuts))

    threading.Thread(target=send, daemon=True).start()
    return connection


@given(st.data())
def test_strings_come_back_however_they_are_cut(data: st.DataObject) -> None:
    body = data.draw(st.binary(min_size=1, max_size=300))
    short = data.draw(st.binary(max_size=len(body) - 1))
    raw = b"*2\r\n:7\r\n$-1\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n-ERR no\r\n" % (len(body), body, len(short), short)
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=4))
    connection = feed(raw, cuts)
    try:
        assert connection.reply(1000) == [7, None]
        split = data.draw(st.integers(0, len(body)))
        target = memoryview(bytearray(len(body)))
        assert connection.reply_into([target[:split], target[split:]], len(body)) == len(body)
        assert target == body
        assert connection.reply_into([target], len(body)) == len(short)
        assert target[: len(short)] == short
        assert isinstance(connection.reply_into([target], len(body)), ServerError)
    finally:
        connection.close()


@given(st.binary(max_size=60), st.integers(0, 2))
def test_fault_of_any_bytes_is_noticed(raw: bytes, kind: int) -> None:
    connection = feed(raw, [])
    try:
        for _ in range(10):
            if kind == 0:
                connection.reply(1000)
            elif kind == 1:
                connection.reply_into([memoryview(bytearray(8))], 8)
            else:
                connection.flags(3, 1000)
        raise AssertionError("the end was not noticed")
    except (GarbledError, ConnectionResetError):
        pass
    finally:
        connection.close()


@pytest.mark.parametrize("raw", [b"$10\r\nabcdefgh\r\n\r\n", b"$-1\r\n", b":8\r\n", b"*1\r\n$8\r\nabcdefgh\r\n"])
def test_fault_of_another_answer_than_a_string_that_fits(raw: bytes) -> None:
    connection = feed(raw, [])
    with pytest.raises(GarbledError, match="is no string of at most 8 bytes"):
        connection.reply_into([memoryview(bytearray(8))], 8)
    connection.close()
