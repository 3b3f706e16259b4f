"""The file store: conformance, its place on disk, and what it keeps when it is full."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hybridkv.errors import HybridKVError
from hybridkv.store import Direct, FileStore, ObjectName, Store, StoreError, StoreFault, blobs
from tests.store.conformance import StoreConformance
from tests.store.samples import NAMESPACE, load, name_of, rows_of, save

ONE = 8192
"""Bytes of an object with one row of 4096: the header takes as much."""


@pytest.mark.parametrize("direct", list(Direct))
@pytest.mark.parametrize("sync", [False, True])
class TestFileStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, direct: Direct, sync: bool) -> Iterator[Store]:
        with FileStore(tmp_path / "cache", 16 << 20, direct, sync) as store:
            yield store


def path_of(directory: Path, name: ObjectName) -> Path:
    return directory / "hybridkv-v1" / "objects" / name.path


def set_age(directory: Path, name: ObjectName, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path_of(directory, name), (then, then))


def fill(directory: Path, store: Store, ages: Sequence[float]) -> list[ObjectName]:
    names = [name_of(number) for number in range(len(ages))]
    for name, age in zip(names, ages, strict=True):
        assert save(store, name, [4096], position=0)
        set_age(directory, name, age)
    return names


def test_objects_lie_below_a_directory_of_their_own(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        save(store, name_of(1, "window-1024"))
    key = name_of(1).key
    assert [path.name for path in tmp_path.iterdir()] == ["hybridkv-v1"]
    assert path_of(tmp_path, name_of(1, "window-1024")).is_file()
    assert (tmp_path / "hybridkv-v1" / "objects" / NAMESPACE / "window-1024" / key[:2] / key).is_file()


def test_only_its_owner_may_look_inside(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        save(store, name_of(1))
    assert (tmp_path / "hybridkv-v1").stat().st_mode & 0o077 == 0
    assert path_of(tmp_path, name_of(1)).stat().st_mode & 0o077 == 0


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 4 * ONE)
    fill(tmp_path, store, [60.0] * 4)
    objects = tmp_path / "hybridkv-v1" / "objects"
    foreign = [tmp_path / "notes.txt", objects / "readme", objects / NAMESPACE / "full" / "00", tmp_path / "drafts"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    link = objects / NAMESPACE / "full" / name_of(0).key[:2] / name_of(77).key
    link.symlink_to(tmp_path / "notes.txt")
    loops = [objects / ("e" * 32), objects / NAMESPACE / "loop", objects / NAMESPACE / "full" / "ff"]
    for loop in loops:
        loop.symlink_to(loop.name)
    for number in range(10, 20):
        save(store, name_of(number), [4096])
    store.shrink(0)
    store.collect()
    assert all(path.read_text() == "mine" for path in foreign)
    assert all(one.is_symlink() for one in (link, *loops))


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HybridKVError, match="is a file"):
            FileStore(path, 1 << 20)
    assert (tmp_path / "file").read_text() == "mine"


def put(kind: str, path: Path) -> None:
    """Something that is neither a file nor a directory of the store, in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.touch()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/nowhere/at all")


@pytest.mark.parametrize("kind", ["directory", "FIFO", "socket", "link to nothing"])
def test_a_ledger_that_is_no_file_is_named(kind: str, tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        ledger = tmp_path / "hybridkv-v1" / "ledger"
        put(kind, ledger)
        words = f"{ledger} is a {kind}: .* remove it, and the store counts again"
        for _ in range(2):
            for call in (lambda: store.delete([name_of(1)]), store.blobs.usage):
                with pytest.raises(StoreFault, match=words):
                    call()
        with pytest.raises(StoreFault, match=words):
            FileStore(tmp_path, 1 << 20)
        ledger.rmdir() if kind == "directory" else ledger.unlink()
        assert save(store, name_of(1))
        assert store.blobs.usage().objects == 1


@pytest.mark.parametrize("part", ["", "objects", "drafts", "about"])
@pytest.mark.parametrize("kind", ["file", "FIFO", "socket", "link to nothing"])
def test_a_directory_of_the_store_that_is_none_is_named(kind: str, part: str, tmp_path: Path) -> None:
    FileStore(tmp_path, 1 << 20).close()
    place = tmp_path / "hybridkv-v1" / part
    put(kind, place)
    with pytest.raises(StoreError, match=f"{place} is a {kind}: a store needs a directory there; remove it, or name"):
        FileStore(tmp_path, 1 << 20)


def test_faults_name_the_place_inside_the_store(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        about = tmp_path / "hybridkv-v1" / "about" / f"{NAMESPACE}.json"
        about.mkdir()
        with pytest.raises(StoreFault, match=rf"cannot describe .*: Is a directory \({about}\)"):
            store.describe(NAMESPACE, {"model": "mine"})
        objects = tmp_path / "hybridkv-v1" / "objects" / NAMESPACE
        objects.touch()
        with pytest.raises(StoreFault, match=rf"cannot look up objects: Not a directory \({objects}/.*\)"):
            store.lookup([name_of(1)])


def test_a_store_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HybridKVError, match="size"):
        FileStore(tmp_path, 0)


def test_objects_outlive_the_process(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        save(store, name_of(1))
        before = store.stats
    with FileStore(tmp_path, 1 << 20) as store:
        assert load(store, name_of(1)) == rows_of(name_of(1))
        assert (store.stats.objects, store.stats.nbytes) == (1, before.nbytes)


def test_its_size_is_never_exceeded(tmp_path: Path) -> None:
    with FileStore(tmp_path, 10 * ONE) as store:
        for number in range(30):
            assert save(store, name_of(number), [4096])
            assert sum(stored.nbytes for stored in store.objects()) == store.stats.nbytes <= 10 * ONE
        assert store.stats.evicted >= 20


def test_objects_being_written_count(tmp_path: Path) -> None:
    with FileStore(tmp_path, 2 * ONE) as store:
        writers = [store.create(name_of(number), [4096], value=1, position=0) for number in range(3)]
        assert [writer is not None for writer in writers] == [True, True, False]
        assert store.stats.dropped == 1
        for writer in writers[:2]:
            assert writer is not None
            writer.abort()


def test_a_smaller_limit_holds_from_the_next_object_on(tmp_path: Path) -> None:
    with FileStore(tmp_path, 10 * ONE) as store:
        fill(tmp_path, store, [60.0] * 10)
    with FileStore(tmp_path, 4 * ONE) as store:
        assert save(store, name_of(99), [4096])
        assert store.stats.nbytes <= 4 * ONE


def test_the_oldest_go_first(tmp_path: Path) -> None:
    with FileStore(tmp_path, 8 * ONE) as store:
        names = fill(tmp_path, store, [10, 5000, 20, 9000, 30, 40, 50, 60])
        save(store, name_of(98), [4096])  # two go for it: somewhat more than it needs
        assert store.lookup(names) == [True, False, True, False, True, True, True, True]


def test_recency_outlives_the_process(tmp_path: Path) -> None:
    with FileStore(tmp_path, 8 * ONE) as store:
        names = fill(tmp_path, store, [1000.0] * 8)
        store.touch(names[:6])
    with FileStore(tmp_path, 8 * ONE) as store:
        for number in (98, 99):
            save(store, name_of(number), [4096])
        assert store.lookup(names[:6]) == [True] * 6
        assert store.lookup(names[6:]).count(False) >= 1


def test_what_an_object_is_worth_outlives_the_process(tmp_path: Path) -> None:
    with FileStore(tmp_path, 8 * ONE) as store:
        for number in range(8):
            save(store, name_of(number, "state" if number % 2 else "full"), [4096], value=100.0 if number % 2 else 1.0)
            set_age(tmp_path, name_of(number, "state" if number % 2 else "full"), 1000)
    with FileStore(tmp_path, 8 * ONE) as store:
        for number in range(100, 104):
            save(store, name_of(number), [4096])
        assert store.lookup([name_of(number, "state") for number in (1, 3, 5, 7)]) == [True] * 4


def test_starting_reads_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        for number in range(20):
            save(store, name_of(number), [4096])
    monkeypatch.setattr(blobs, "read_header", lambda *_: pytest.fail("an object was read"))
    with FileStore(tmp_path, 1 << 20) as store:
        assert store.stats.objects == 20
        assert store.lookup([name_of(0)]) == [True]


def test_processes_share_the_books(tmp_path: Path) -> None:
    with FileStore(tmp_path, 4 * ONE) as one, FileStore(tmp_path, 4 * ONE) as two:
        for number in range(4):
            save(one if number % 2 else two, name_of(number), [4096])
        assert one.stats.objects == two.stats.objects == 4
        assert save(two, name_of(4), [4096])
        assert one.stats.nbytes <= 4 * ONE
