"""Stores on Valkey: conformance on one server and on a cluster, round trips, the index, the size limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.store import MissingObject, ObjectName, Reader, Store, StoreError, StoreInputError
from hybridkv.store.urls import parse_url
from hybridkv.store.valkey import blobs as valkey_blobs
from hybridkv.store.valkey.blobs import ValkeyBlobs, ValkeyStore
from hybridkv.store.valkey.keys import INDEX, LOCK, object_key, shard_of
from hybridkv.store.valkey.opening import open_address
from tests.store.conformance import StoreConformance
from tests.store.samples import NAMESPACE, load, name_of, read_row, rows_of, save
from tests.store.servers.valkey import ValkeyCluster, ValkeyServer
from tests.store.versions import written_by_hand

ONE = 8192
"""Bytes of an object with one row of 4096: the header takes as much."""


@pytest.fixture(scope="module")
def one_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def server(one_server: ValkeyServer) -> ValkeyServer:
    one_server.ask("FLUSHALL")
    return one_server


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: ValkeyCluster) -> ValkeyCluster:
    one_cluster.flush()
    return one_cluster


def opened(url: str, size: int = 16 << 20) -> ValkeyStore:
    return open_address(parse_url(url), size)


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[ValkeyStore]:
    with opened(server.url) as store:
        yield store


def blobs_of(store: ValkeyStore) -> ValkeyBlobs:
    assert isinstance(store.blobs, ValkeyBlobs)
    return store.blobs


def set_age(server: ValkeyServer, name: ObjectName, seconds: float) -> None:
    used = INDEX[shard_of(name)].used
    score = server.ask("ZSCORE", used, str(name))
    assert isinstance(score, bytes)
    server.ask("ZADD", used, str(float(score) - seconds), str(name))


def readers_of(found: list[Reader | StoreError]) -> list[Reader]:
    readers = [one for one in found if isinstance(one, Reader)]
    assert len(readers) == len(found), found
    return readers


@pytest.mark.parametrize("way", ["url", "unix_url"])
class TestValkeyStore(StoreConformance):
    @pytest.fixture
    def store(self, server: ValkeyServer, way: str) -> Iterator[Store]:
        with opened(server.url if way == "url" else server.unix_url) as store:
            yield store


class TestValkeyCluster(StoreConformance):
    @pytest.fixture
    def store(self, cluster: ValkeyCluster) -> Iterator[Store]:
        with opened(cluster.url) as store:
            assert blobs_of(store).servers.is_cluster
            yield store


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["server", "cluster"])
def either(request: pytest.FixtureRequest) -> Iterator[ValkeyStore]:
    """A store whose connections are open."""
    with opened(request.getfixturevalue(request.param).url) as store:
        store.lookup([name_of(number) for number in range(64)])
        yield store


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_lookup_is_one_round_trip(either: ValkeyStore, count: int) -> None:
    save(either, name_of(0))
    names = [name_of(number) for number in range(count)]
    before = either.blobs.round_trips
    assert either.lookup(names) == [True] + [False] * (count - 1)
    assert either.blobs.round_trips - before == 1


def test_small_objects_travel_together(either: ValkeyStore) -> None:
    names = [name_of(number) for number in range(32)]
    for name in names:
        save(either, name)
    before = either.blobs.round_trips
    for name, reader in zip(names, readers_of(either.open_all(names)), strict=True):
        with reader:
            assert [read_row(reader, row) for row in range(4)] == rows_of(name)
    assert either.blobs.round_trips - before == 1


def test_a_row_of_a_large_object_is_one_round_trip(either: ValkeyStore) -> None:
    save(either, name_of(1), [1 << 20, 100, 1 << 20])
    before = either.blobs.round_trips
    assert load(either, name_of(1)) == rows_of(name_of(1), [1 << 20, 100, 1 << 20])
    assert either.blobs.round_trips - before == 4


def test_a_write_is_two_round_trips(either: ValkeyStore) -> None:
    save(either, name_of(0))
    before = either.blobs.round_trips
    save(either, name_of(1))
    assert either.blobs.round_trips - before == 2
    either.touch([name_of(0), name_of(1)])
    assert either.blobs.round_trips - before == 3
    assert either.delete([name_of(number) for number in range(100)]) == 2
    assert either.blobs.round_trips - before == 4


def test_an_error_stands_in_the_place_of_what_is_missing(either: ValkeyStore) -> None:
    save(either, name_of(1))
    found = either.open_all([name_of(0), name_of(1)])
    assert isinstance(found[0], MissingObject)
    assert isinstance(found[1], Reader)
    assert either.open_all([]) == []


# --- addresses --------------------------------------------------------------------------------------------------------


def test_databases_are_apart(server: ValkeyServer) -> None:
    with opened(f"{server.url}/3") as third, opened(f"{server.unix_url}?db=3") as same, opened(server.url) as other:
        save(third, name_of(1))
        assert (same.lookup([name_of(1)]), other.lookup([name_of(1)])) == ([True], [False])


@pytest.mark.parametrize("database", ["x", "-1", "0/1", "1e3"])
def test_a_database_is_a_number(server: ValkeyServer, database: str) -> None:
    with pytest.raises(StoreInputError, match="is no database"):
        opened(f"{server.url}/{database}")


def test_a_database_that_does_not_exist_is_named(server: ValkeyServer) -> None:
    with pytest.raises(StoreInputError, match="has no database 99"):
        opened(f"{server.url}/99")


def test_a_store_without_room_is_refused(server: ValkeyServer) -> None:
    with pytest.raises(StoreInputError, match="size"):
        opened(server.url, 0)


# --- the index --------------------------------------------------------------------------------------------------------


def counted(store: ValkeyStore) -> tuple[int, int]:
    return store.stats.objects, store.stats.nbytes


def test_objects_outlive_the_process(server: ValkeyServer, store: ValkeyStore) -> None:
    save(store, name_of(1))
    store.close()
    with opened(server.url) as other:
        assert load(other, name_of(1)) == rows_of(name_of(1))
        assert other.stats.objects == 1


@pytest.mark.parametrize("repair", ["listing", "collect"])
def test_an_object_of_a_killed_writer_is_entered(server: ValkeyServer, store: ValkeyStore, repair: str) -> None:
    name = name_of(1)
    server.ask("SET", object_key(name), written_by_hand(name, value=2.5, position=512))
    assert counted(store) == (0, 0)
    if repair == "listing":
        assert [(one.name, one.value, one.position) for one in store.objects()] == [(name, 2.5, 512)]
    else:
        assert store.collect().files == 0
    assert counted(store) == (1, len(written_by_hand(name)))
    assert load(store, name) == rows_of(name)
    assert store.shrink(0) == 1
    assert counted(store) == (0, 0)


def test_entries_of_objects_that_the_server_evicted_go(server: ValkeyServer, store: ValkeyStore) -> None:
    for number in range(4):
        save(store, name_of(number))
    for number in range(3):
        server.ask("DEL", object_key(name_of(number)))
    assert store.lookup([name_of(number) for number in range(4)]) == [False] * 3 + [True]
    assert [one.name for one in store.objects()] == [name_of(3)]
    assert counted(store)[0] == 4
    store.collect()
    assert counted(store) == (1, sum(one.nbytes for one in store.objects()))
    assert save(store, name_of(0))
    assert counted(store)[0] == 2


def test_an_object_that_the_server_evicted_is_written_again(server: ValkeyServer, store: ValkeyStore) -> None:
    save(store, name_of(1))
    server.ask("DEL", object_key(name_of(1)))
    assert save(store, name_of(1), [10])
    assert counted(store) == (1, next(store.objects()).nbytes)


@pytest.mark.parametrize("part", ["meta", "used", "usage"])
def test_an_index_that_the_server_evicted_is_made_again(server: ValkeyServer, store: ValkeyStore, part: str) -> None:
    for number in range(8):
        save(store, name_of(number))
    before = counted(store)
    for shard in INDEX.values():
        server.ask("DEL", getattr(shard, part))
    store.collect()
    assert counted(store) == before
    assert store.shrink(0) == 8
    assert counted(store) == (0, 0)


def test_keys_of_others_are_left_alone(server: ValkeyServer, store: ValkeyStore) -> None:
    foreign = ["mine", "hybridkv-v1:{00}:o:nothing", f"hybridkv-v1:{{zz}}:o:{name_of(1)}"]
    for key in foreign:
        server.ask("SET", key, "x")
    save(store, name_of(1))
    assert [one.name for one in store.objects()] == [name_of(1)]
    store.collect()
    store.shrink(0)
    assert [server.ask("GET", key) for key in foreign] == [b"x"] * 3


def test_a_key_of_another_type_is_a_corrupt_object(server: ValkeyServer, store: ValkeyStore) -> None:
    for number, command in enumerate([("RPUSH", "x"), ("SET", "")]):
        name = name_of(number)
        server.ask(command[0], object_key(name), command[1])
        with pytest.raises(StoreError, match="0 bytes are no object"):
            store.open(name)
        assert store.lookup([name]) == [False]


def test_descriptions_are_untrusted(server: ValkeyServer, store: ValkeyStore) -> None:
    server.ask("HSET", "hybridkv-v1:about", NAMESPACE, "{", "x", "{}", "f" * 32, '{"model": "m", "other": 1}')
    assert store.descriptions() == {"f" * 32: {"model": "m"}}


# --- the size limit ---------------------------------------------------------------------------------------------------


def fill(server: ValkeyServer, store: Store, ages: list[float]) -> list[ObjectName]:
    names = [name_of(number) for number in range(len(ages))]
    for name, age in zip(names, ages, strict=True):
        assert save(store, name, [4096], position=0)
        set_age(server, name, age)
    return names


def test_its_size_is_never_exceeded_by_one_process(server: ValkeyServer) -> None:
    with opened(server.url, 10 * ONE) as store:
        for number in range(30):
            assert save(store, name_of(number), [4096])
            assert sum(stored.nbytes for stored in store.objects()) == store.stats.nbytes <= 10 * ONE
        assert store.stats.evicted >= 20


def test_objects_being_written_count(server: ValkeyServer) -> None:
    with opened(server.url, 2 * ONE) as store:
        writers = [store.create(name_of(number), [4096], value=1, position=0) for number in range(3)]
        assert [writer is not None for writer in writers] == [True, True, False]
        assert store.stats.dropped == 1
        for writer in writers[:2]:
            assert writer is not None
            writer.abort()


def test_the_oldest_go_first_and_touched_ones_stay(server: ValkeyServer) -> None:
    with opened(server.url, 8 * ONE) as store:
        names = fill(server, store, [10, 5000, 20, 9000, 30, 7000, 50, 60])
        store.touch([names[5]])
        save(store, name_of(98), [4096])  # two go for it: somewhat more than it needs
        assert store.lookup(names) == [True, False, True, False, True, True, True, True]


def test_valuable_objects_stay(server: ValkeyServer) -> None:
    with opened(server.url, 8 * ONE) as store:
        for number in range(8):
            name = name_of(number, "state" if number % 2 else "full")
            save(store, name, [4096], value=100.0 if number % 2 else 1.0)
            set_age(server, name, 1000)
    with opened(server.url, 8 * ONE) as store:
        for number in range(100, 104):
            save(store, name_of(number), [4096])
        assert store.lookup([name_of(number, "state") for number in (1, 3, 5, 7)]) == [True] * 4


def test_evicted_objects_are_handed_over_whole(server: ValkeyServer) -> None:
    with opened(server.url, 4 * ONE) as store:
        names = fill(server, store, [100.0, 90.0, 80.0, 70.0])
        told = {}

        def hook(reader: Reader) -> None:
            with reader:
                told[reader.header.name] = read_row(reader, 0)

        store.on_evict(hook)
        save(store, name_of(9), [4096])
        gone = [name for name, there in zip(names, store.lookup(names), strict=True) if not there]
        assert told == {name: rows_of(name, [4096])[0] for name in gone}
        assert gone[0] == names[0]


def test_shrinking_hands_over_piece_by_piece(
    server: ValkeyServer, store: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.store.valkey.room.MOST_TOLD_BYTES", 2 * ONE)
    names = fill(server, store, [100.0] * 7)
    told = []

    def hook(reader: Reader) -> None:
        with reader:
            told.append(reader.header.name)
            assert read_row(reader, 0) == rows_of(reader.header.name, [4096])[0]

    store.on_evict(hook)
    assert store.shrink(0) == 7
    assert sorted(told) == sorted(names)


def test_only_one_process_evicts(server: ValkeyServer) -> None:
    with opened(server.url, 4 * ONE) as store:
        names = fill(server, store, [100.0] * 4)
        server.ask("SET", LOCK, "another")
        assert not save(store, name_of(9), [4096])
        assert (store.stats.dropped, store.stats.evicted) == (1, 0)
        store.delete(names[:1])
        assert save(store, name_of(9), [4096])
        server.ask("DEL", LOCK)
        assert save(store, name_of(10), [4096])
        assert server.ask("EXISTS", LOCK) == 0


def test_objects_touched_since_they_were_chosen_are_kept(server: ValkeyServer, store: ValkeyStore) -> None:
    names = fill(server, store, [100.0, 100.0])
    index = blobs_of(store).index
    latest = {one.name: one.used_at for one in index.oldest(1, blobs_of(store).usage())}
    store.touch(names[:1])
    assert index.remove(names, latest) == 1
    assert store.lookup(names) == [True, False]


def test_a_cluster_has_one_limit(cluster: ValkeyCluster) -> None:
    with opened(cluster.url, 10 * ONE) as store:
        for number in range(30):
            assert save(store, name_of(number), [4096])
        assert sum(stored.nbytes for stored in store.objects()) == store.stats.nbytes <= 10 * ONE


def test_objects_larger_than_the_server_takes_are_dropped(
    store: ValkeyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(valkey_blobs, "MOST_VALUE_BYTES", 10_000)
    with caplog.at_level(logging.WARNING, "hybridkv.store"):
        for number in range(3):
            assert not save(store, name_of(number))
    assert [record.getMessage().count("10,000 at most") for record in caplog.records] == [1]
    assert store.stats.dropped == 3


def test_a_password_file_and_a_user_with_the_documented_rights_are_enough(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    text = (Path(__file__).parents[2] / "docs" / "stores" / "valkey.md").read_text()
    rights = text.partition("ACL SETUSER worker ")[2].partition("\n")[0].replace("PASSWORD", "s3cret").split()
    assert "~hybridkv-v1:*" in rights
    with ValkeyServer("--user", "worker", *rights, password="admin") as server:
        url = f"valkey://worker@127.0.0.1:{server.port}/0?password_file={tmp_path}/password"
        with opened(url, 4 * ONE) as store:
            fill(server, store, [100.0] * 4)
            assert save(store, name_of(9), [4096])
            store.touch([name_of(9)])
            store.describe(NAMESPACE, {"model": "mine"})
            store.collect()
            assert load(store, name_of(9)) == rows_of(name_of(9), [4096])
            assert (store.stats.objects, len(store.descriptions())) == (len(list(store.objects())), 1)
            assert store.delete([name_of(9)]) == 1
            assert store.shrink(0) > 0
