"""The file store when processes are killed, disks are full, directories go and bytes rot."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.store import CorruptObject, Direct, FileStore, Guarded, Reader, StoreFault
from hybridkv.store.file.blobs import FileBlobs
from hybridkv.store.file.usage_file import UsageFile
from tests.patience import Stopwatch
from tests.store.processes import KILLS, PARTS
from tests.store.samples import NAMESPACE, ROWS, load, name_of, read_row, rows_of, save

NAME = name_of(1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "cache", 16 << 20) as store:
        yield store


def path_of(store: FileStore, number: int = 1) -> Path:
    blobs = store.blobs
    assert isinstance(blobs, FileBlobs)
    return Path(blobs.folder.path(name_of(number)))


def pending_of(store: FileStore) -> list[Path]:
    blobs = store.blobs
    assert isinstance(blobs, FileBlobs)
    return sorted(blobs.folder.pending.iterdir())


@pytest.mark.parametrize("part", PARTS)
def test_faults_of_processes(part: str, tmp_path: Path) -> None:
    """Each part says in tests/store/processes.py what it does."""
    command, root = [sys.executable, "-m", "tests.store.processes", part, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 + KILLS, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


@given(st.data())
def test_fault_of_any_bit_is_noticed_or_harmless(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory, FileStore(Path(directory), 1 << 20) as store:
        save(store, NAME)
        raw = bytearray(path_of(store).read_bytes())
        if data.draw(st.booleans()):
            bit = data.draw(st.integers(0, len(raw) * 8 - 1))
            raw[bit // 8] ^= 1 << bit % 8
        else:
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        path_of(store).write_bytes(raw)
        try:
            assert load(store, NAME) == rows_of(NAME)  # a bit between the rows
            assert len(raw) > sum(ROWS)
        except CorruptObject:
            assert store.lookup([NAME]) == [False]


@given(st.binary(max_size=9000))
def test_fault_of_a_file_full_of_anything(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory, FileStore(Path(directory), 1 << 20) as store:
        save(store, NAME)
        path_of(store).write_bytes(raw)
        with pytest.raises(CorruptObject):
            store.open(NAME)
        assert store.lookup([NAME]) == [False]


def test_fault_of_a_file_under_anothers_name(store: FileStore) -> None:
    save(store, name_of(1))
    save(store, name_of(2))
    shutil.copy(path_of(store, 2), path_of(store, 1))
    with pytest.raises(CorruptObject, match="another object"):
        store.open(NAME)
    assert store.lookup([name_of(1), name_of(2)]) == [False, True]


@pytest.mark.parametrize("direct", list(Direct))
def test_fault_of_a_file_cut_short_while_open(tmp_path: Path, direct: Direct) -> None:
    with FileStore(tmp_path, 16 << 20, direct) as store:
        save(store, NAME, [3 << 20])
        with store.open(NAME) as reader:
            os.truncate(path_of(store), 1 << 20)
            with pytest.raises(CorruptObject, match="ends after"):
                reader.read(0, [memoryview(bytearray(3 << 20))])
        assert store.stats.corrupt == 1


def test_fault_of_a_full_disk_leaves_nothing_and_passes(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StoreFault, match="No space left"):
            save(store, NAME)
    assert pending_of(store) == []
    assert store.stats.nbytes == 0
    assert save(store, NAME)


def test_fault_of_a_disk_that_fills_up_within_a_write(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, []

    def half(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [buffers[0][:1000]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        with pytest.raises(StoreFault, match="No space left"):
            save(store, NAME)
    assert len(calls) == 4
    assert pending_of(store) == []


def test_writes_that_come_back_short_go_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, some, at: write(fd, [some[0][:999]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, some, at, flags=0: read(fd, [some[0][:777]], at))
    save(store, NAME)
    assert load(store, NAME) == rows_of(NAME)


def test_fault_of_a_directory_that_became_a_file(store: FileStore, tmp_path: Path) -> None:
    save(store, NAME)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("mine")
    for call in (lambda: store.lookup([NAME]), lambda: store.open(NAME), lambda: save(store, name_of(2))):
        with pytest.raises(StoreFault, match="Not a directory"):
            call()
    guard = Guarded(store)
    assert guard.lookup([NAME]) == [False]
    assert not save(guard, NAME)
    guard.touch([NAME])
    guard.describe(NAMESPACE, {})
    assert (tmp_path / "cache").read_text() == "mine"


def test_fault_of_a_disk_that_cannot_be_read(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    save(store, NAME)
    with store.open(NAME) as reader, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(StoreFault, match="Input/output error"):
            reader.read(0, [memoryview(bytearray(ROWS[0]))])
    assert load(store, NAME) == rows_of(NAME)
    assert (store.stats.faults, store.stats.corrupt) == (1, 0)


@pytest.mark.parametrize("is_told", [False, True])
def test_fault_of_one_object_does_not_keep_others_from_being_evicted(
    is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest lies on a bad sector: it goes first, and nobody is told what it was."""
    real, gone = os.preadv, list[Reader]()
    with FileStore(tmp_path, 4 * 8192) as store:
        if is_told:
            store.on_evict(gone.append)
        for number in range(4):
            save(store, name_of(number), [4096])
        os.utime(path_of(store, 0), (1, 1))
        bad = str(path_of(store, 0))

        def broken(fd: int, *args: Any) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(bad):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, *args)

        monkeypatch.setattr(os, "preadv", broken)
        assert all(save(store, name_of(number), [4096]) for number in range(10, 13))
        assert store.lookup([name_of(0)]) == [False]
        for reader in gone:
            reader.close()


def test_fault_of_a_disk_that_hangs_keeps_no_store_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.store.file.usage_file._PATIENCE_S", 0.1)
    store, reached, release = FileStore(tmp_path, 1 << 20), Event(), Event()
    blobs = store.blobs
    assert isinstance(blobs, FileBlobs)

    def hang(_: int) -> None:
        reached.set()
        release.wait(20)

    monkeypatch.setattr(blobs._pending, "new", hang)
    thread = Thread(target=lambda: store.create(NAME, [4], value=1, position=0), daemon=True)
    thread.start()
    assert reached.wait(5)
    start = Stopwatch()
    store.close()
    assert start.seconds < 5
    release.set()


def test_pending_of_the_living_are_left_alone(store: FileStore, tmp_path: Path) -> None:
    writer = store.create(NAME, ROWS, value=1, position=0)
    assert writer is not None
    with FileStore(tmp_path / "cache", 16 << 20) as other, writer:
        assert other.collect().files == 0
        for row, data in enumerate(rows_of(NAME)):
            writer.write(row, [memoryview(data)])
        writer.commit()
        assert load(other, NAME) == rows_of(NAME)


def test_pending_of_the_dead_go_with_the_next_start_and_are_not_counted(tmp_path: Path) -> None:
    with FileStore(tmp_path, 16 << 20) as store:
        save(store, NAME)
        used = store.stats.nbytes
    leftover = tmp_path / "hybridkv-v1" / "drafts" / "1-2-3"
    leftover.write_bytes(bytes(50_000))
    (tmp_path / "hybridkv-v1" / "ledger").unlink()
    with FileStore(tmp_path, 16 << 20) as store:
        assert not leftover.exists()
        assert store.stats.nbytes == used
        leftover.write_bytes(bytes(50_000))
        assert store.collect() == (1, 50_000)


def test_fault_of_a_ledger_full_of_anything_is_counted_again(store: FileStore, tmp_path: Path) -> None:
    save(store, NAME)
    before = store.stats
    ledger = tmp_path / "cache" / "hybridkv-v1" / "ledger"
    for raw in (b"", b"\xff" * 24, b"x" * 1000):
        ledger.write_bytes(raw)
        assert (store.stats.objects, store.stats.nbytes) == (1, before.nbytes)


def test_fault_of_a_store_closed_under_a_writer(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 16 << 20)
    writer = store.create(NAME, [4], value=1, position=0)
    assert writer is not None
    writer.write(0, [memoryview(b"1234")])
    store.close()
    with pytest.raises(StoreFault, match="closed"):
        writer.commit()
    with FileStore(tmp_path, 16 << 20) as again:
        assert again.lookup([NAME]) == [False]
        assert pending_of(again) == []


def test_fault_of_the_ledger_leaves_no_draft_and_still_hands_on_what_was_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with FileStore(tmp_path, 4 * 8192) as store:
        gone: list[Reader] = []
        store.on_evict(gone.append)
        for number in range(4):
            save(store, name_of(number), [4096])
        with monkeypatch.context() as patch:
            patch.setattr(UsageFile, "_write", broken)
            with pytest.raises(StoreFault, match="Input/output error"):
                store.create(name_of(9), [4096], value=1, position=0)
        assert pending_of(store) == []
        assert len(gone) == 4 - store.stats.objects > 0
        for reader in gone:
            with reader:
                assert read_row(reader, 0) == rows_of(reader.header.name, [4096])[0]
        assert save(store, name_of(9), [4096])
