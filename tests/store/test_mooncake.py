"""The Mooncake store against a real master: conformance, round trips, large objects, and the command."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv.cli.main import run
from hybridkv.store import MissingObject, ObjectName, Reader, Store, StoreError, StoreFault, StoreInputError, open_store
from hybridkv.store.mooncake import writing
from hybridkv.store.mooncake.blobs import MooncakeBlobs, MooncakeStore
from hybridkv.store.mooncake.client import key_of
from hybridkv.store.urls import inspect_store
from tests.patience import Stopwatch
from tests.store.conformance import StoreConformance
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, load, name_of, read_row, rows_of, save
from tests.store.servers import mooncake
from tests.store.servers.mooncake import MooncakeServer

pytestmark = pytest.mark.skipif(mooncake.why_not() is not None, reason=str(mooncake.why_not()))


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    """Also for tests without a server, which may be the first of their process."""
    mooncake.make_importable()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: MooncakeServer) -> Iterator[Any]:
    """Mooncake's own client."""
    client = server.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def opened(server: MooncakeServer) -> Iterator[MooncakeBlobs]:
    """Closing a client takes a second: tests share one."""
    with inspect_store(server.url) as store:
        assert isinstance(store, MooncakeStore)
        assert isinstance(store.blobs, MooncakeBlobs)
        yield store.blobs


@pytest.fixture
def store(opened: MooncakeBlobs, plain: Any) -> MooncakeStore:
    """Empty, and with counters of its own."""
    plain.remove_all(True)
    plain.batch_remove([f"hybridkv-v1/about/{namespace}" for namespace in (NAMESPACE, OTHER_NAMESPACE)], True)
    return MooncakeStore(opened.renewed())


class TestMooncakeStore(StoreConformance):
    def test_touching_makes_objects_younger(self, store: Store) -> None:
        """Mooncake does not tell when an object was used: `used_at` is the time of the listing.

        A touch renews the object's lease, which decides what is evicted: `test_shrinking_evicts_the_oldest`.
        """
        save(store, name_of(1))
        store.touch([name_of(1), name_of(99)])
        assert [stored.name for stored in store.objects()] == [name_of(1)]

    @pytest.fixture(autouse=True)
    def _know_url(self, server: MooncakeServer) -> None:
        self.url = server.url

    def test_closing_twice_is_harmless(self, store: Store) -> None:
        """On a client of its own: other tests share one."""
        other = inspect_store(self.url)
        save(other, name_of(1))
        other.close()
        other.close()
        with pytest.raises(StoreError, match="closed"):
            other.lookup([name_of(1)])
        assert load(store, name_of(1)) == rows_of(name_of(1))


def raw(plain: Any, number: int) -> bytes:
    return bytes(plain.get(key_of(name_of(number))))


def rows_at_once(store: Store, names: list[ObjectName]) -> list[list[bytes]]:
    found = []
    for reader in store.open_all(names):
        assert isinstance(reader, Reader)
        with reader:
            found.append([read_row(reader, row) for row in range(len(reader.header.rows))])
    return found


def test_each_object_is_one_key(store: MooncakeStore, plain: Any) -> None:
    save(store, name_of(1, "window-1024"))
    assert plain.is_exist(f"hybridkv-v1/objects/{NAMESPACE}/window-1024/{name_of(1).key}") == 1


def test_bytes_between_rows_are_zero(store: MooncakeStore, plain: Any) -> None:
    """Transfer memory is used again: an object must not carry bytes of another."""
    save(store, name_of(1), [60_000])
    plain.remove(key_of(name_of(1)), True)
    save(store, name_of(2), [1, 1, 1])
    found = raw(plain, 2)
    assert not any(found[4097:8192])
    assert not any(found[8193:12_288])


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_lookup_is_one_round_trip(store: MooncakeStore, count: int) -> None:
    save(store, name_of(0))
    before = store.stats.round_trips
    assert sum(store.lookup([name_of(number) for number in range(count)])) == 1
    assert store.blobs.round_trips - before == 1


def test_small_objects_are_opened_and_read_in_one_round_trip(store: MooncakeStore) -> None:
    names = [name_of(number) for number in range(32)]
    for name in names:
        save(store, name)
    before = store.blobs.round_trips
    assert rows_at_once(store, names) == [rows_of(name) for name in names]
    assert store.blobs.round_trips - before == 1


def test_large_objects_are_opened_in_two_round_trips(store: MooncakeStore) -> None:
    names = [name_of(number, "state") for number in range(8)]
    for name in names:
        save(store, name, [100_000])
    rows_at_once(store, names)
    before = store.blobs.round_trips
    readers = store.open_all(names)
    assert store.blobs.round_trips - before == 2
    for name, reader in zip(names, readers, strict=True):
        assert isinstance(reader, Reader)
        assert read_row(reader, 0) == rows_of(name, [100_000])[0]
    assert store.blobs.round_trips - before == 2 + len(names)


def test_a_write_takes_three_round_trips(store: MooncakeStore) -> None:
    before = store.blobs.round_trips
    save(store, name_of(1), [5_000_000])
    assert store.blobs.round_trips - before == 3


def test_objects_of_all_sizes_are_opened_together(store: MooncakeStore) -> None:
    """A missing one, and more of them than are opened at once."""
    sizes = (1, 50_000, 60_000, 65_536, 70_000, 300_000)
    names = [name_of(number) for number in range(300)]
    rows = {name: [sizes[number % len(sizes)]] for number, name in enumerate(names)}
    for name in names:
        save(store, name, rows[name])
    store.delete([names[7], names[290]])
    found = store.open_all(names)
    assert [number for number, one in enumerate(found) if isinstance(one, MissingObject)] == [7, 290]
    for name, reader in zip(names, found, strict=True):
        if isinstance(reader, Reader):
            assert read_row(reader, 0) == rows_of(name, rows[name])[0]


def test_rows_larger_than_a_transfer_come_in_pieces(store: MooncakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PUT_BYTES", 3 << 20)
    rows = (1000, 18 << 20, 7 << 20)
    assert save(store, name_of(1), rows)
    assert load(store, name_of(1)) == rows_of(name_of(1), rows)


def test_two_stores_see_the_same_objects(store: MooncakeStore, server: MooncakeServer) -> None:
    with open_store(server.url) as other:
        writers = [one.create(name_of(1), [4], value=1, position=0) for one in (store, other)]
        won = []
        for number, writer in enumerate(writers):
            assert writer is not None
            with writer:
                writer.write(0, [memoryview(b"%d" % number * 4)])
                won.append(writer.commit())
        assert won == [True, False]
        assert load(other, name_of(1)) == [b"0000"]


def test_keys_of_others_are_left_alone(store: MooncakeStore, plain: Any) -> None:
    theirs = [
        "vllm/block",
        "hybridkv-v1/objects/readme",
        f"hybridkv-v1/objects/{NAMESPACE}/full/XY",
        "hybridkv-v1/about/x",
    ]
    for key in theirs:
        plain.put(key, b"theirs")
    save(store, name_of(1))
    assert store.stats.objects == 1
    assert store.descriptions() == {}
    assert store.shrink(0) == 1
    assert plain.batch_is_exist(theirs) == [1] * 4


def test_usage_counts_what_others_write_after_a_while(store: MooncakeStore, opened: MooncakeBlobs) -> None:
    assert store.stats.objects == 0
    save(store, name_of(1))
    assert store.stats.objects == 1
    save(MooncakeStore(opened.renewed()), name_of(2))
    assert store.stats.objects == 1
    store.delete([name_of(1)])
    assert store.stats.objects == 1
    assert [one.name for one in store.objects()] == [name_of(2)]


def ask(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert run(["store", *args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_command_looks_into_a_store(
    store: MooncakeStore, server: MooncakeServer, plain: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url, names = server.url, [name_of(1), name_of(2), name_of(3, "state")]
    for number, name in enumerate(names):
        save(store, name, position=256 * number, value=1.5)
    store.describe(NAMESPACE, {"model": "qwen3-next"})
    groups = ask(capsys, "stat", url)["namespaces"][NAMESPACE]["groups"]
    assert {group: counts["objects"] for group, counts in groups.items()} == {"full": 2, "state": 1}
    assert {(one["key"], one["position"], one["model"]) for one in ask(capsys, "ls", url)} == {
        (name.key, 256 * number, "qwen3-next") for number, name in enumerate(names)
    }
    damaged = bytearray(raw(plain, 2))
    damaged[-1] ^= 1
    plain.remove(key_of(names[1]), True)
    plain.put(key_of(names[1]), bytes(damaged))
    assert [one["name"] for one in ask(capsys, "verify", url, "--delete", code=1)["corrupt"]] == [str(names[1])]
    record = ask(capsys, "gc", url, "--older-than", "1s", "--size", "40000")
    assert (record["expired"], record["evicted"]) == (0, 1)
    assert record["nbytes"] <= 40_000


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("?size=1GiB", "no option 'size': Mooncake evicts by itself.*--global_segment_size.*--eviction_high_watermark"),
        ("?write=back", "no option 'write': Mooncake evicts by itself"),
        ("?buffer=1KiB", "a buffer of 1,024 bytes; give it 1MiB or more"),
        ("/path", "Mooncake has no paths"),
        ("?admin=host:x", "'host:x' is no HOST:PORT"),
        ("?timeout=soon", "timeout=soon is no time"),
    ],
)
def test_wrong_urls_are_refused(rest: str, words: str) -> None:
    with pytest.raises(StoreInputError, match=words):
        open_store(f"mooncake://127.0.0.1:1{rest}")


def test_a_master_that_is_not_there_is_named_at_once() -> None:
    began = Stopwatch()
    with pytest.raises(StoreFault, match=r"cannot connect to Mooncake's master at 127\.0\.0\.1:1: Connection refused"):
        open_store("mooncake://127.0.0.1:1")
    assert began.seconds < 2


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_server_that_is_no_master_is_a_fault(is_silent: bool) -> None:
    """The client itself would hang, with the interpreter's lock."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        if not is_silent:
            threading.Thread(target=answer, daemon=True).start()
        began = Stopwatch()
        with pytest.raises(StoreFault, match="no answer" if is_silent else "does not answer like one"):
            open_store(f"mooncake://127.0.0.1:{listener.getsockname()[1]}?timeout=500ms")
        assert began.seconds < 2
