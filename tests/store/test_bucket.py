"""Stores in object storage: conformance, requests and round trips, keys, uses, eviction, credentials."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from hybridkv.errors import MissingObject, StoreError, StoreFault, StoreInputError
from hybridkv.store import ObjectName, Reader, Store, open_store
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import NO_LIMIT
from hybridkv.store.bucket import blobs as bucket_blobs
from hybridkv.store.bucket import opening
from hybridkv.store.bucket.aws_files import aws_settings
from hybridkv.store.bucket.usage import UsageEstimate
from tests.store.buckets import blobs_of, new_prefix, opened
from tests.store.conformance import StoreConformance
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, ROWS, load, name_of, read_row, rows_of, save
from tests.store.servers import azurite
from tests.store.servers import s3 as s3_server
from tests.store.servers.azurite import AzuriteServer
from tests.store.servers.s3 import S3Server

ONE = 8192
"""Bytes of an object with one row of 4096: the header takes as much."""


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    if not azurite.IS_INSTALLED:
        pytest.skip("Azurite is not there: make setup-azurite installs it, and needs npm")
    with AzuriteServer(tmp_path_factory.mktemp("az") / "data") as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {**s3_server.CREDENTIALS, **azurite.CREDENTIALS}.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def url(s3: S3Server) -> str:
    return s3.url(new_prefix())


@pytest.fixture
def bucket(url: str) -> Iterator[BlobStore]:
    with opened(url) as store:
        yield store


@pytest.mark.parametrize("size", [16 << 20, NO_LIMIT], ids=["limited", "unlimited"])
class TestS3Store(StoreConformance):
    @pytest.fixture
    def store(self, url: str, size: int) -> Iterator[Store]:
        with opened(url, size) as store:
            yield store


class TestAzureStore(StoreConformance):
    @pytest.fixture
    def store(self, az: AzuriteServer) -> Iterator[Store]:
        with opened(az.url(new_prefix()), 16 << 20) as store:
            yield store


def test_deleting_what_is_gone_is_no_error(s3: S3Server, az: AzuriteServer) -> None:
    """Azure reports keys that are missing, S3 does not."""
    for server in (s3, az):
        with opened(server.url(new_prefix())) as store:
            names = [name_of(number) for number in range(4)]
            save(store, names[1])
            save(store, names[3])
            keys = [blobs_of(store).keys.object(name) for name in names]
            blobs_of(store).client.delete(keys)
            assert store.lookup(names) == [False] * 4
            blobs_of(store).client.delete(keys)


# --- requests ---------------------------------------------------------------------------------------------------------


class Counted:
    """`with Counted(store) as used:` counts round trips and requests."""

    def __init__(self, store: BlobStore) -> None:
        self._blobs = blobs_of(store)

    def __enter__(self) -> Counted:
        self.round_trips, self.requests = -self._blobs.round_trips, -self._blobs.requests
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.round_trips += self._blobs.round_trips
        self.requests += self._blobs.requests


def test_a_lookup_is_one_round_trip_and_few_requests(bucket: BlobStore) -> None:
    names = [name_of(number) for number in range(10_000)]
    for name in names[:40]:
        save(bucket, name, [10])
    with Counted(bucket) as used:
        assert bucket.lookup(names[:1]) == [True]
    assert (used.round_trips, used.requests) == (1, 1)
    with Counted(bucket) as used:
        assert bucket.lookup(names) == [True] * 40 + [False] * 9960
    assert used.round_trips == 1
    assert used.requests <= 256
    assert bucket.stats.round_trips == blobs_of(bucket).round_trips


def test_names_of_few_directories_are_asked_one_by_one(bucket: BlobStore) -> None:
    names = [name_of(number, group) for number in range(50) for group in ("full", "state")]
    for name in names[::3]:
        save(bucket, name, [10])
    with Counted(bucket) as used:
        assert bucket.lookup(names) == [number % 3 == 0 for number in range(100)]
    assert (used.round_trips, used.requests) == (1, 100)


def test_directories_of_many_objects_are_listed_page_by_page(
    bucket: BlobStore, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.store.bucket.client.PAGE", 20)
    monkeypatch.setattr("hybridkv.store.bucket.lookup.PAGE", 20)
    names = [ObjectName(NAMESPACE, "full", f"00{number:062x}") for number in range(100)]
    client, keys = s3.client(), blobs_of(bucket).keys
    for name in names[::2]:
        obstore.put(client, keys.object(name), b"x")
    with Counted(bucket) as used:
        assert bucket.lookup(names) == [True, False] * 50
    assert (used.round_trips, used.requests) == (1, 3)
    with Counted(bucket) as used:  # the first page settles none of these but one: the others are asked one by one
        assert bucket.lookup([names[0], *names[50:70]]) == [True] + [True, False] * 10
    assert (used.round_trips, used.requests) == (1, 1 + 20)


def test_small_objects_come_with_one_round_trip(bucket: BlobStore) -> None:
    names = [name_of(number) for number in range(32)]
    for name in names:
        save(bucket, name)
    with Counted(bucket) as used:
        readers = [found for found in bucket.open_all(names) if isinstance(found, Reader)]
        rows = [[read_row(reader, row) for row in range(len(ROWS))] for reader in readers]
    assert rows == [rows_of(name) for name in names]
    assert (used.round_trips, used.requests) == (1, 32)


def test_errors_stand_in_the_places_of_objects_that_cannot_be_opened(bucket: BlobStore) -> None:
    save(bucket, name_of(1))
    found = bucket.open_all([name_of(2), name_of(1), name_of(3)])
    assert [type(one) for one in (found[0], found[2])] == [MissingObject, MissingObject]
    assert isinstance(found[1], Reader)
    assert bucket.open_all([]) == []


def test_large_rows_are_one_range_each(bucket: BlobStore) -> None:
    name, sizes = name_of(1), [300_000, 100_000, 5_000_000]
    with Counted(bucket) as used:
        save(bucket, name, sizes)
    assert (used.round_trips, used.requests) == (2, 2)
    with Counted(bucket) as used, bucket.open(name) as reader:
        assert read_row(reader, 2) == rows_of(name, sizes)[2]
        target = [memoryview(bytearray(size)) for size in (7, 299_000, 0, 993)]
        reader.read(0, target)  # its first bytes came with the header
    assert b"".join(target) == rows_of(name, sizes)[0]
    assert (used.round_trips, used.requests) == (3, 3)


def test_objects_too_large_for_one_request_are_dropped(
    bucket: BlobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bucket_blobs, "_MOST_PUT_BYTES", 1 << 20)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert not save(bucket, name_of(number), [2 << 20])
    assert bucket.stats.dropped == 3
    assert [record.message for record in caplog.records if "not kept" in record.message] == [caplog.records[0].message]


def test_gaps_between_rows_are_zeros(bucket: BlobStore, s3: S3Server) -> None:
    save(bucket, name_of(1), [10, 10])
    raw = bytes(obstore.get(s3.client(), blobs_of(bucket).keys.object(name_of(1))).bytes())
    assert len(raw) == 4096 * 2 + 10
    assert not any(raw[4096 + 10 : 4096 * 2])


# --- places -----------------------------------------------------------------------------------------------------------


def test_keys_are_those_of_the_documentation(s3: S3Server) -> None:
    prefix = new_prefix()
    with opened(s3.url(prefix)) as store:
        save(store, name_of(1, "window-1024"))
        store.describe(NAMESPACE, {"model": "mine"})
        store.touch([name_of(1)])
    keys = [meta["path"] for page in obstore.list(s3.client(), prefix) for meta in page]
    key, root = name_of(1).key, f"{prefix}/hybridkv-v1"
    assert keys[:2] == [f"{root}/about/{NAMESPACE}.json", f"{root}/objects/{NAMESPACE}/window-1024/{key[:2]}/{key}"]
    assert keys[2].startswith(f"{root}/used/")
    assert len(keys) == 3


def test_objects_of_others_are_left_alone(s3: S3Server) -> None:
    prefix, client = new_prefix(), s3.client()
    objects = f"{prefix}/hybridkv-v1/objects"
    key = name_of(1).key
    foreign = [
        f"{prefix}/notes.txt",
        f"{prefix}-other/hybridkv-v1/objects/{name_of(1).path}",
        f"{objects}/readme",
        f"{objects}/{NAMESPACE}/full/zz/{key}",
        f"{objects}/{NAMESPACE}/full/{key[:2]}/{key}/more",
        f"{prefix}/hybridkv-v1/used/readme",
        f"{prefix}/hybridkv-v1/about/readme.json",
    ]
    for place in foreign:
        obstore.put(client, place, b"mine")
    with opened(s3.url(prefix)) as store:
        save(store, name_of(2))
        assert [stored.name for stored in store.objects()] == [name_of(2)]
        assert store.descriptions() == {}
        assert store.shrink(0) == 1
        store.collect()
    assert all(bytes(obstore.get(client, place).bytes()) == b"mine" for place in foreign)


def test_several_prefixes_are_several_stores(s3: S3Server) -> None:
    with opened(s3.url(new_prefix())) as first, opened(s3.url("")) as second:
        save(first, name_of("one of several"))
        assert second.lookup([name_of("one of several")]) == [False]


def test_descriptions_that_are_none_are_left_out(s3: S3Server) -> None:
    prefix = new_prefix()
    for namespace, raw in ((NAMESPACE, b"["), (OTHER_NAMESPACE, b" " * 70_000), ("ab" * 16, b"")):
        obstore.put(s3.client(), f"{prefix}/hybridkv-v1/about/{namespace}.json", raw)
    with opened(s3.url(prefix)) as store:
        assert store.descriptions() == {}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://user@bucket/x", "has no valid name of a bucket"),
        ("s3://bucket:80/x", "has no valid name of a bucket"),
        ("s3://bucket/a b", "'a b' cannot be part of a prefix"),
        ("s3://bucket/a/../b", "cannot be part of a prefix"),
        ("s3://bucket/a?endpoint=host:9000", "endpoint=host:9000 is no address"),
        ("s3://bucket/a?endpoint=ftp://host", "is no address"),
        ("s3://bucket/a?endpoint=https://user:word@host", "is no address"),
        ("s3://bucket/a?timeout=soon", "timeout=soon is no time"),
        ("gs://bucket/a?region=x", "no option 'region'"),
    ],
)
def test_wrong_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(StoreInputError, match=words) as caught:
        open_store(url)
    assert "word@" not in str(caught.value)


def test_the_missing_package_is_named() -> None:
    program = "import sys; sys.modules['obstore'] = None; import hybridkv.store as s; s.open_store('s3://bucket/x')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "StoreInputError: 's3://bucket/x' needs the package obstore: pip install 'hybridkv[bucket]'" in done.stderr


def test_urls_open_stores_with_breakers(url: str) -> None:
    with open_store(f"{url}&size=16MiB&timeout=2s&region=us-east-1") as store:
        assert save(store, name_of(1))
        assert load(store, name_of(1)) == rows_of(name_of(1))


def test_plain_http_needs_an_endpoint_that_says_so(s3: S3Server) -> None:
    with opened(s3.url("x", endpoint=s3.endpoint.replace("http:", "https:"))) as store, pytest.raises(StoreFault):
        store.lookup([name_of(1)])


# --- credentials ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_of_s3_are_refused(variable: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url, keys = s3.url(new_prefix()), s3.make_user()
    for right, value in keys.items():
        monkeypatch.setenv(right, value)
    with opened(url) as store:
        assert save(store, name_of(1))
        assert load(store, name_of(1)) == rows_of(name_of(1))
    monkeypatch.setenv(variable, "wrong-word")
    with opened(url) as store:
        check_refused(store, ["wrong-word", *keys.values()])


def test_wrong_keys_of_azure_are_refused(az: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = az.url(new_prefix())
    with opened(url) as store:
        assert save(store, name_of(1))
    wrong = azurite.KEY[::-1].replace("=", "") + "="
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    with opened(url) as store:
        check_refused(store, [wrong, azurite.KEY])


def check_refused(store: BlobStore, secrets: list[str]) -> None:
    calls = (
        lambda: store.lookup([name_of(1)]),
        lambda: store.open(name_of(1)),
        lambda: list(store.objects()),
        lambda: store.describe(NAMESPACE, {"model": "mine"}),
    )
    for call in calls:
        with pytest.raises(StoreFault, match="Forbidden") as caught:
            call()
        assert not any(secret in str(caught.value) for secret in secrets)
    (found,) = store.open_all([name_of(1)])
    assert isinstance(found, StoreFault)
    assert store.stats.faults == 4  # a listing is an iterator: its faults are not counted


def test_keys_come_from_files_of_aws_too(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in s3_server.CREDENTIALS:
        monkeypatch.delenv(variable)
    file, config = tmp_path / "credentials", tmp_path / "config"
    keys = f"aws_access_key_id = {s3_server.ACCESS_KEY}\naws_secret_access_key = {s3_server.SECRET_KEY}\n"
    file.write_text(f"[default]\naws_access_key_id = nobody\n[mine]\n{keys}")
    config.write_text("[profile mine]\nregion = eu-west-9\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(variable, raising=False)
    assert aws_settings(None) == {"region": "us-east-1"}
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert aws_settings(None)["region"] == "eu-west-9"
    with opened(f"{url}&region=us-east-1") as store:
        assert save(store, name_of(1))
    file.write_text("[default\n")
    with pytest.raises(StoreInputError, match=f"{file} cannot be read"):
        opened(url)


def test_a_missing_bucket_is_a_fault(s3: S3Server) -> None:
    url = s3.url(new_prefix()).replace(s3_server.BUCKET, "no-such-bucket")
    with opened(url) as store:
        for call in (lambda: save(store, name_of(1)), lambda: store.open(name_of(1)), lambda: list(store.objects())):
            with pytest.raises(StoreFault, match="NoSuchBucket"):
                call()


# --- uses and eviction ------------------------------------------------------------------------------------------------


def used_at(store: Store, name: ObjectName) -> float:
    return {stored.name: stored.used_at for stored in store.objects()}[name]


def notes_of(store: BlobStore) -> list[str]:
    blobs = blobs_of(store)
    return [one.key for one in blobs.client.list(blobs.keys.used)]


def test_uses_are_seen_by_other_processes_after_close(url: str) -> None:
    with opened(url) as store, opened(url) as other:
        save(store, name_of(1))
        before = used_at(other, name_of(1))
        time.sleep(0.01)
        store.touch([name_of(1)])
        assert notes_of(other) == []
        store.close()
        assert used_at(other, name_of(1)) > before


def test_uses_are_written_once_a_minute(url: str) -> None:
    with opened(url) as store:
        notes, now = blobs_of(store).notes, time.time()
        notes._clock = lambda: now
        store.touch([name_of(1)])
        now += 50
        store.touch([name_of(2)])
        assert notes_of(store) == []
        now += 20
        store.touch([name_of(3)])
        assert len(notes_of(store)) == 1
        assert set(notes.read()) == {name_of(1), name_of(2), name_of(3)}


def test_many_uses_are_written_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.store.bucket.notes._MOST_LINES", 10)
    with opened(url) as store:
        store.touch([name_of(number) for number in range(25)])
        assert len(notes_of(store)) == 3


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_uses_of_a_wrong_clock_are_corrected(url: str, ahead: float) -> None:
    with opened(url) as store:
        save(store, name_of(1))
        notes = blobs_of(store).notes
        notes._clock = lambda: time.time() + ahead - 100  # used 100 s before the note is written
        notes._written_at = notes._clock()
        notes.add([name_of(1), name_of(2)])
        notes._clock = lambda: time.time() + ahead
        notes.flush()
        assert notes.read()[name_of(2)] == pytest.approx(time.time() - 100, abs=5)
        assert time.time() - 5 < used_at(store, name_of(1)) < time.time() + 5
        notes.merge(at_least=1)
        assert notes.read()[name_of(2)] == pytest.approx(time.time() - 100, abs=5)


def test_collect_merges_notes(url: str) -> None:
    with opened(url) as store:
        for number in range(3):
            save(store, name_of(number))
            store.touch([name_of(number), name_of(77)])
            blobs_of(store).notes.flush()
        before = {stored.name: stored.used_at for stored in store.objects()}
        assert len(notes_of(store)) == 3
        assert store.collect() == (0, 0)
        assert len(notes_of(store)) == 1
        assert {stored.name: stored.used_at for stored in store.objects()} == before
        assert name_of(77) not in blobs_of(store).notes.read()


def test_notes_of_anyone_do_no_harm(url: str, s3: S3Server) -> None:
    with opened(url) as store:
        save(store, name_of(1))
        used = blobs_of(store).keys.used
        lines = [str(name_of(1)), f"{name_of(1)} nan", f"{name_of(1)} 1e99", "a/b/c 5", f"{name_of(2)} 5 6", "", "\xff"]
        obstore.put(s3.client(), f"{used}/0000000000001-{'a' * 16}-m", "\n".join(lines).encode("latin-1"))
        obstore.put(s3.client(), f"{used}/9999999999999-{'a' * 16}-t", bytes(5 << 20))
        assert used_at(store, name_of(1)) < time.time() + 10
        store.collect()
        assert used_at(store, name_of(1)) < time.time() + 10


def test_uses_survive_a_failed_write(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url) as store:
        save(store, name_of(1))
        notes = blobs_of(store).notes
        store.touch([name_of(1)])
        with monkeypatch.context() as patched:
            patched.setattr(notes._client, "replace", failing)
            with pytest.raises(StoreFault):
                notes.flush()
        notes.flush()
        assert name_of(1) in notes.read()


def failing(*_: object) -> None:
    raise StoreFault("no")


def test_the_limit_is_kept_and_the_oldest_go(url: str) -> None:
    with opened(url, 10 * ONE) as store:
        for number in range(30):
            assert save(store, name_of(number), [4096], position=0)
            store.touch([name_of(0)])
            assert sum(stored.nbytes for stored in store.objects()) == store.stats.nbytes <= 10 * ONE
        assert store.stats.evicted >= 20
        assert store.lookup([name_of(0), name_of(29), name_of(1)]) == [True, True, False]
        assert not save(store, name_of(99), [11 * ONE])
        assert store.stats.dropped == 1


def test_objects_being_written_count(url: str) -> None:
    with opened(url, 2 * ONE) as store:
        writers = [store.create(name_of(number), [4096], value=1, position=0) for number in range(3)]
        assert [writer is not None for writer in writers] == [True, True, False]
        for writer in writers[:2]:
            assert writer is not None
            writer.abort()
        assert store.stats.nbytes == 0


def test_two_processes_share_a_limit(url: str) -> None:
    with opened(url, 8 * ONE) as one, opened(url, 8 * ONE) as other:
        for number in range(12):
            assert save(one, name_of(number), [4096], position=0)
            assert save(other, name_of(number + 100), [4096], position=0)
        assert sum(stored.nbytes for stored in one.objects()) <= 16 * ONE
        blobs_of(one).estimate = UsageEstimate()
        assert save(one, name_of(50), [4096])
        assert sum(stored.nbytes for stored in other.objects()) <= 8 * ONE


def test_values_count(url: str) -> None:
    with opened(url, 8 * ONE) as store:
        for number in range(8):
            group, value = ("full", 1.0) if number % 2 else ("state", 1e6)
            assert save(store, name_of(number, group), [4096], position=0, value=value)
        time.sleep(1.1)
        store.shrink(4 * ONE)
        assert {stored.name.group for stored in store.objects()} == {"state"}


def test_evicted_objects_are_passed_on_whole(url: str) -> None:
    sizes = [100_000, 5]
    with opened(url) as store:
        for number in range(3):
            save(store, name_of(number), sizes)
        kept: list[Reader] = []
        store.on_evict(kept.append)
        assert store.shrink(0) == 3
        assert {reader.header.name for reader in kept} == {name_of(number) for number in range(3)}
        for reader in kept:
            name = reader.header.name
            assert [read_row(reader, row) for row in range(2)] == rows_of(name, sizes)
            reader.close()


def test_usage_is_counted_again_after_some_minutes(url: str) -> None:
    now = 0.0
    with opened(url) as store, opened(url) as other:
        blobs_of(store).estimate = UsageEstimate(lambda: now)
        assert store.stats.objects == 0
        save(other, name_of(1))
        now += 200
        assert store.stats.objects == 0
        now += 200
        assert store.stats.objects == 1


def test_a_closed_store_says_so(url: str) -> None:
    store = opened(url)
    save(store, name_of(1))
    store.close()
    for call in (lambda: store.lookup([name_of(1)]), lambda: store.open(name_of(1)), lambda: list(store.objects())):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_opening_needs_no_server() -> None:
    assert opening.IS_INSTALLED
    for url in ("s3://bucket/prefix?endpoint=http://127.0.0.1:1", "az://box/prefix?endpoint=http://127.0.0.1:1/a"):
        with opened(url) as store, pytest.raises(StoreFault, match=url.split("?")[0]):
            store.lookup([name_of(1)])
