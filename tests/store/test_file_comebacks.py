"""A file store whose directory goes while it is in use, and what becomes of it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridkv.store import FileStore, Guarded, StoreFault, open_store
from hybridkv.store.file.blobs import FileBlobs
from tests.store.samples import NAMESPACE, load, name_of, rows_of, save
from tests.store.test_guard import Clock

NAMES = [name_of(number) for number in range(4)]
SIZE = 16 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "cache", SIZE) as store:
        yield store


def blobs_of(store: FileStore) -> FileBlobs:
    assert isinstance(store.blobs, FileBlobs)
    return store.blobs


def check_books(store: FileStore) -> None:
    counted = blobs_of(store).recount()
    assert blobs_of(store).usage() == (counted.objects, counted.nbytes)


LOSSES: dict[str, Callable[[Path], None]] = {
    "all": lambda path: shutil.rmtree(path),
    "root": lambda path: shutil.rmtree(path / "hybridkv-v1"),
    "ledger": lambda path: (path / "hybridkv-v1" / "ledger").unlink(),
    "objects": lambda path: shutil.rmtree(path / "hybridkv-v1" / "objects"),
    "drafts": lambda path: shutil.rmtree(path / "hybridkv-v1" / "drafts"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_deleted_is_made_again_after_a_rest(
    loss: str, store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    guard = Guarded(store, "test", clock)
    guard.describe(NAMESPACE, {"model": "m"})
    save(guard, NAMES[0])
    with caplog.at_level(logging.INFO, "hybridkv.store"):
        LOSSES[loss](tmp_path / "cache")
        try:
            assert not save(guard, NAMES[1])
        except StoreFault:
            assert loss == "objects"  # all else is noticed before anything is written
        assert not save(guard, NAMES[1])
        clock.now += 1
        assert save(guard, NAMES[1])
        assert save(guard, NAMES[2])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "back after 1 s" in caplog.records[1].message
    is_kept = loss in ("ledger", "drafts")
    assert guard.lookup(NAMES) == [is_kept, True, True, False]
    assert load(guard, NAMES[1]) == rows_of(NAMES[1])
    assert guard.descriptions() == {NAMESPACE: {"model": "m"}}
    check_books(store)


def test_a_directory_that_was_moved_away_is_found_again(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    guard = Guarded(store, "test", clock)
    blobs_of(store).folder._device += 1  # its disk was mounted there
    save(guard, NAMES[0])
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.INFO, "hybridkv.store"):
        assert guard.lookup(NAMES[:1]) == [False]
        for rest in (0, 1, 2, 4):
            clock.now += rest
            assert not save(guard, NAMES[1])
            assert not (tmp_path / "cache").exists()
        (tmp_path / "elsewhere").rename(tmp_path / "cache")
        clock.now += 8
        assert save(guard, NAMES[1])
    assert guard.lookup(NAMES) == [True, True, False, False]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    check_books(store)


def test_a_directory_whose_disk_has_gone_is_not_made_on_another(store: FileStore, tmp_path: Path) -> None:
    save(store, NAMES[0])
    blobs_of(store).folder._device += 1
    shutil.rmtree(tmp_path / "cache" / "hybridkv-v1")
    with pytest.raises(StoreFault, match=r"has gone$"):
        save(store, NAMES[1])
    for _ in range(2):
        with pytest.raises(StoreFault, match="and so has its disk"):
            save(store, NAMES[1])
    assert list((tmp_path / "cache").iterdir()) == []


def test_writers_of_a_directory_that_went_leave_nothing_in_the_next(store: FileStore, tmp_path: Path) -> None:
    writers = [store.create(name, [4], value=1, position=0) for name in NAMES[:2]]
    shutil.rmtree(tmp_path / "cache")
    for writer in writers:
        assert writer is not None
        writer.write(0, [memoryview(b"1234")])
        with pytest.raises(StoreFault):
            writer.commit()
    assert save(store, NAMES[2])
    assert [one.name for one in store.objects()] == [NAMES[2]]
    assert os.listdir(tmp_path / "cache" / "hybridkv-v1" / "drafts") == []
    check_books(store)


def test_two_who_share_a_directory_share_the_next_one(store: FileStore, tmp_path: Path) -> None:
    """A lock on the old usage file excludes no other process."""
    with FileStore(tmp_path / "cache", SIZE) as other:
        shutil.rmtree(tmp_path / "cache")
        for one in (store, other):
            with pytest.raises(StoreFault, match="has gone"):
                save(one, NAMES[0])
        assert save(store, NAMES[0])
        assert not save(other, NAMES[0])
        assert save(other, NAMES[1])
        assert load(store, NAMES[1]) == rows_of(NAMES[1])
        check_books(store)
        check_books(other)
        with blobs_of(store).usage_file.open():
            assert blobs_of(other).usage_file.glance() is None


def test_reading_goes_on_while_an_object_is_open(store: FileStore, tmp_path: Path) -> None:
    save(store, NAMES[0])
    before = store.stats
    with store.open(NAMES[0]) as reader:
        shutil.rmtree(tmp_path / "cache")
        buffer = bytearray(reader.header.rows[0].nbytes)
        reader.read(0, [memoryview(buffer)])
    assert bytes(buffer) == rows_of(NAMES[0])[0]
    assert store.stats.objects == before.objects == 1  # as last known
    assert not (tmp_path / "cache").exists()


def test_a_loss_is_told_whoever_noticed_it_first(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counters are asked for all the time, and a writer that gives up tells nobody."""
    guard = Guarded(store)
    writer = guard.create(NAMES[0], [4], value=1, position=0)
    assert writer is not None
    shutil.rmtree(tmp_path / "cache")
    writer.abort()
    assert guard.stats.nbytes == 0
    assert not save(guard, NAMES[1])
    assert "has gone; going on without it" in caplog.text


def test_coming_back_keeps_no_file_open(tmp_path: Path) -> None:
    with open_store([f"file://{tmp_path}/cache?size=16MiB"]) as store:
        assert isinstance(store, Guarded)
        files = store.store
        assert isinstance(files, FileStore)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(5):
            shutil.rmtree(tmp_path / "cache")
            with pytest.raises(StoreFault):
                save(files, name_of(number))
            assert save(files, name_of(number))
        assert len(os.listdir("/proc/self/fd")) == before
