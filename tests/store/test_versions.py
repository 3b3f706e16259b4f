"""Two versions of hybridkv share a directory: each finds its own objects, and leaves those of the other alone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridkv.cli.main import run
from hybridkv.store import FileStore, ObjectName, UnknownFormat, open_store
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, load, name_of, rows_of, save
from tests.store.versions import LATER, later, plant, raw_bytes, written_by_hand

SIZE = 16 << 20
ONE = len(written_by_hand(name_of(0)))
OURS = [name_of(number) for number in range(8)]
THEIRS = {
    name: later(name, kind)
    for kind in LATER
    for name in (name_of(kind), name_of(kind, "state"), name_of(kind, "next", OTHER_NAMESPACE))
}
"""Objects of a later version: in groups of ours, and in one that only they have."""


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path, SIZE)
    for name, raw in THEIRS.items():
        plant(store, name, raw)
    return store


def path_of(store: FileStore, name: ObjectName) -> Path:
    path = Path(store.blobs.folder.path(name))  # type: ignore[attr-defined]
    assert path.is_file()
    return path


def set_age(store: FileStore, name: ObjectName, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path_of(store, name), (then, then))


def check_left_alone(store: FileStore, theirs: Mapping[ObjectName, bytes] = THEIRS) -> None:
    assert {name: raw_bytes(store, name) for name in theirs} == theirs


def test_all_that_one_version_does_leaves_the_other_alone(store: FileStore, tmp_path: Path) -> None:
    ages = {name: path_of(store, name).stat().st_mtime_ns for name in THEIRS}
    for name in OURS:
        assert save(store, name)
    assert store.lookup([*OURS, *THEIRS]) == [True] * (len(OURS) + len(THEIRS))
    for name in THEIRS:
        assert not save(store, name)
        for _ in range(2):
            with pytest.raises(UnknownFormat, match=name.key):
                store.open(name)
    assert {one.name for one in store.objects(headers=True)} == {*OURS, *THEIRS}
    store.describe(NAMESPACE, {"model": "m"})
    store.touch(OURS)
    store.delete(OURS[:1])
    store.collect()
    url = f"file://{tmp_path}"
    for command in (["verify", url, "--delete"], ["stat", url], ["ls", url], ["gc", url], ["gc", url, "--size", "1G"]):
        assert run(["store", *command]) == 0
    assert [load(store, name) for name in OURS[1:]] == [rows_of(name) for name in OURS[1:]]
    assert (store.stats.unknown, store.stats.corrupt, store.stats.faults) == (2 * len(THEIRS), 0, 0)
    check_left_alone(store)
    assert {name: path_of(store, name).stat().st_mtime_ns for name in THEIRS} == ages


def test_promotion_and_fallback_leave_the_other_version_alone(store: FileStore, tmp_path: Path) -> None:
    """The fast tier has objects of the other version; the slow one has ours under the same names."""
    with FileStore(tmp_path / "slow", SIZE) as slow:
        for name in THEIRS:
            assert save(slow, name)
    with open_store([f"file://{tmp_path}?size=16MiB&write=back", f"file://{tmp_path}/slow?size=16MiB"]) as tiers:
        assert [load(tiers, name) for name in THEIRS] == [rows_of(name) for name in THEIRS]
    check_left_alone(store)


def test_objects_of_this_version_are_as_version_one_wrote_them(store: FileStore) -> None:
    name = name_of("mine")
    save(store, name, value=2.5, position=512)
    assert raw_bytes(store, name) == written_by_hand(name, value=2.5, position=512)
    other = name_of("of another program")
    plant(store, other, written_by_hand(other, value=3.5, position=768))
    with store.open(other) as reader:
        assert (reader.header.value, reader.header.position) == (3.5, 768)
    assert load(store, other) == rows_of(other)


def test_a_full_store_evicts_both_versions_by_age(store: FileStore) -> None:
    for age, name in enumerate(THEIRS):
        set_age(store, name, 10_000 * 4**age)
    for name in OURS:
        save(store, name)
        set_age(store, name, 100)
    oldest_first = sorted(THEIRS, key=lambda name: path_of(store, name).stat().st_mtime)
    for count, name in enumerate(oldest_first, start=1):
        assert store.shrink(store.stats.nbytes - 1) == 1
        assert store.lookup(OURS) == [True] * len(OURS)
        assert store.lookup([name]) == [False]
        check_left_alone(store, {one: THEIRS[one] for one in oldest_first[count:]})


def test_younger_objects_of_the_other_version_outlive_ours(store: FileStore) -> None:
    for name in OURS:
        save(store, name)
        set_age(store, name, 10_000)
    assert store.shrink(store.stats.nbytes - len(OURS) * ONE) == len(OURS)
    assert store.lookup(OURS) == [False] * len(OURS)
    check_left_alone(store)


def test_a_store_full_of_the_other_version_takes_new_objects(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 8 * ONE)
    for number in range(8):
        plant(store, name_of(number), later(name_of(number), "fields"))
    for number in range(8, 16):
        assert save(store, name_of(number))
    assert store.stats.evicted >= 8
    assert load(store, name_of(15)) == rows_of(name_of(15))


def test_unknown_objects_are_named_in_the_log_and_do_not_fill_it(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    name = name_of("version")
    with caplog.at_level(logging.WARNING, "hybridkv.store"):
        for _ in range(9):
            with pytest.raises(UnknownFormat):
                store.open(name)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    for record, number in zip(caplog.records, (1, 2, 4, 8), strict=True):
        assert name.key in record.message
        assert f"so far: {number}" in record.message
