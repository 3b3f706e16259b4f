"""What every store does, whatever it is made of. Each store's tests inherit these and say how to make one."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridkv.store import CorruptObject, MissingObject, Reader, Store, StoreError, UnknownFormat
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, ROWS, load, name_of, read_row, rows_of, save
from tests.store.versions import LATER, later, plant, raw_bytes


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


class StoreConformance:
    """Subclasses have a fixture `store`: empty, with room for some megabytes."""

    copies = 1
    """How many stores keep each object."""

    def test_what_was_committed_comes_back(self, store: Store) -> None:
        name = name_of(1)
        assert save(store, name, value=2.5, position=512)
        with store.open(name) as reader:
            assert (reader.header.name, reader.header.value, reader.header.position) == (name, 2.5, 512)
            assert [row.nbytes for row in reader.header.rows] == list(ROWS)
            assert [read_row(reader, row) for row in range(len(ROWS))] == rows_of(name)

    def test_lookup_answers_each_name_in_order(self, store: Store) -> None:
        names = [name_of(number) for number in range(6)]
        for name in names[::2]:
            save(store, name)
        assert store.lookup(names) == [True, False] * 3
        assert store.lookup([]) == []
        assert (store.stats.hits, store.stats.misses) == (3, 3)

    def test_names_that_differ_in_one_part_are_different_objects(self, store: Store) -> None:
        names = [name_of(1), name_of(1, "state"), name_of(1, namespace=OTHER_NAMESPACE), name_of(2)]
        for name in names:
            assert save(store, name)
        assert [load(store, name) for name in names] == [rows_of(name) for name in names]

    def test_a_missing_object_has_an_error_of_its_own(self, store: Store) -> None:
        with pytest.raises(MissingObject, match=name_of(1).key):
            store.open(name_of(1))
        assert store.stats.faults == store.stats.corrupt == 0

    def test_many_objects_are_opened_in_one_call(self, store: Store) -> None:
        """Each answer stands in its place: a reader, or the error of an object that is missing or corrupt."""
        names = [name_of(number) for number in range(5)]
        for name in names[1:3]:
            save(store, name)
        plant(store, names[3], b"no object")
        found = store.open_all(names)
        kinds = (MissingObject, Reader, Reader, CorruptObject, MissingObject)
        assert [isinstance(one, kind) for one, kind in zip(found, kinds, strict=True)] == [True] * 5, found
        for name, one in zip(names[1:3], found[1:3], strict=True):
            assert isinstance(one, Reader)
            with one as reader:
                assert [read_row(reader, row) for row in range(len(ROWS))] == rows_of(name)
        assert store.open_all([]) == []
        assert store.stats.opened == 2
        assert store.stats.faults == 0

    def test_a_row_is_scattered_over_buffers(self, store: Store) -> None:
        save(store, name_of(1))
        target = views(1, 0, 4000, 999)
        with store.open(name_of(1)) as reader:
            reader.read(0, target)
        assert b"".join(target) == rows_of(name_of(1))[0]

    def test_a_row_is_gathered_from_buffers(self, store: Store) -> None:
        name = name_of(1)
        writer = store.create(name, ROWS, value=1, position=0)
        assert writer is not None
        with writer:
            for row, data in enumerate(rows_of(name)):
                writer.write(row, [memoryview(data)[start : start + 7] for start in range(0, len(data), 7)])
            writer.commit()
        assert load(store, name) == rows_of(name)

    def test_buffers_of_other_types_are_bytes_too(self, store: Store) -> None:
        name, target = name_of(1), memoryview(bytearray(4096))
        save(store, name)
        with store.open(name) as reader:
            reader.read(2, [target.cast("i")])
        assert bytes(target) == rows_of(name)[2]

    @pytest.mark.parametrize("sizes", [(4999,), (5001,), (5000, 1), ()])
    def test_buffers_must_have_the_length_of_the_row(self, store: Store, sizes: tuple[int, ...]) -> None:
        save(store, name_of(1))
        with store.open(name_of(1)) as reader, pytest.raises(StoreError, match="5,000"):
            reader.read(0, views(*sizes))
        writer = store.create(name_of(2), ROWS, value=1, position=0)
        assert writer is not None
        with writer, pytest.raises(StoreError, match="5,000"):
            writer.write(0, views(*sizes))

    @pytest.mark.parametrize("row", [-1, 4])
    def test_rows_that_do_not_exist_are_refused(self, store: Store, row: int) -> None:
        save(store, name_of(1))
        with store.open(name_of(1)) as reader, pytest.raises(StoreError, match=f"row {row}"):
            reader.read(row, views(10))
        writer = store.create(name_of(2), ROWS, value=1, position=0)
        assert writer is not None
        with writer, pytest.raises(StoreError, match=f"row {row}"):
            writer.write(row, views(10))

    @pytest.mark.parametrize("row_bytes", [(), (0,), (1, -1), (2**50,)])
    def test_lengths_that_no_object_has_are_refused(self, store: Store, row_bytes: tuple[int, ...]) -> None:
        with pytest.raises(StoreError, match=r"rows|bytes"):
            store.create(name_of(1), row_bytes, value=1, position=0)

    @pytest.mark.parametrize(("value", "position"), [(float("nan"), 0), (-1.0, 0), (1.0, -1)])
    def test_worth_is_a_number_from_zero_up(self, store: Store, value: float, position: int) -> None:
        with pytest.raises(StoreError, match="value"):
            store.create(name_of(1), ROWS, value=value, position=position)

    def test_nothing_is_visible_before_commit(self, store: Store) -> None:
        name = name_of(1)
        writer = store.create(name, ROWS, value=1, position=0)
        assert writer is not None
        with writer:
            for row, data in enumerate(rows_of(name)):
                assert store.lookup([name]) == [False]
                assert list(store.objects()) == []
                writer.write(row, [memoryview(data)])
            with pytest.raises(MissingObject):
                store.open(name)
            writer.commit()
        assert store.lookup([name]) == [True]

    def test_commit_needs_every_row(self, store: Store) -> None:
        writer = store.create(name_of(1), ROWS, value=1, position=0)
        assert writer is not None
        with writer:
            writer.write(0, views(5000))
            with pytest.raises(StoreError, match="rows"):
                writer.commit()
        assert store.lookup([name_of(1)]) == [False]
        assert store.stats.nbytes == 0

    def test_a_row_is_written_once(self, store: Store) -> None:
        writer = store.create(name_of(1), ROWS, value=1, position=0)
        assert writer is not None
        with writer:
            writer.write(1, views(1))
            with pytest.raises(StoreError, match="twice"):
                writer.write(1, views(1))

    def test_leaving_without_commit_leaves_nothing(self, store: Store) -> None:
        writer = store.create(name_of(1), ROWS, value=1, position=0)
        assert writer is not None
        with writer:
            writer.write(0, views(5000))
        assert store.lookup([name_of(1)]) == [False]
        assert (store.stats.objects, store.stats.nbytes) == (0, 0)
        with pytest.raises(StoreError, match="closed"):
            writer.write(1, views(1))

    def test_what_is_there_is_not_written_again(self, store: Store) -> None:
        assert save(store, name_of(1))
        assert store.create(name_of(1), ROWS, value=1, position=0) is None

    def test_the_first_commit_wins(self, store: Store) -> None:
        name = name_of(1)
        first, second = (store.create(name, [4], value=1, position=0) for _ in range(2))
        assert first is not None
        assert second is not None
        with first, second:
            second.write(0, [memoryview(b"2222")])
            first.write(0, [memoryview(b"1111")])
            second.commit()
            first.commit()
        assert load(store, name) == [b"2222"]
        assert (store.stats.objects, store.stats.saved) == (self.copies, 1)

    def test_many_threads_write_and_read_one_object(self, store: Store) -> None:
        name, sizes = name_of(1), [3000 + number for number in range(64)]
        writer = store.create(name, sizes, value=1, position=0)
        assert writer is not None
        data = rows_of(name, sizes)
        with ThreadPoolExecutor(8) as threads, writer:
            list(threads.map(lambda row: writer.write(row, [memoryview(data[row])]), range(64)))
            writer.commit()
            with store.open(name) as reader:
                assert list(threads.map(lambda row: read_row(reader, row), range(64))) == data

    def test_many_threads_commit_one_name(self, store: Store) -> None:
        barrier = threading.Barrier(8)

        def write(_: int) -> None:
            barrier.wait()
            save(store, name_of(1))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        assert load(store, name_of(1)) == rows_of(name_of(1))
        assert store.stats.objects == self.copies
        assert 1 <= store.stats.saved <= self.copies

    def test_a_reader_outlives_its_object(self, store: Store) -> None:
        name = name_of(1)
        save(store, name)
        with store.open(name) as reader:
            assert store.delete([name]) == 1
            with contextlib.suppress(MissingObject):
                assert read_row(reader, 3) == rows_of(name)[3]

    def test_a_closed_reader_reads_no_more(self, store: Store) -> None:
        save(store, name_of(1))
        reader = store.open(name_of(1))
        reader.close()
        reader.close()
        with pytest.raises(StoreError, match="closed"):
            read_row(reader, 0)

    def test_delete_counts_what_was_there(self, store: Store) -> None:
        names = [name_of(number) for number in range(4)]
        for name in names[:2]:
            save(store, name)
        assert store.delete(names) == 2
        assert store.lookup(names) == [False] * 4
        assert (store.stats.objects, store.stats.nbytes) == (0, 0)
        assert save(store, names[0])

    def test_objects_are_listed_by_namespace_and_group(self, store: Store) -> None:
        names = {name_of(1), name_of(2, "state"), name_of(3, namespace=OTHER_NAMESPACE)}
        for name in names:
            save(store, name, value=3.0, position=77)
        assert {stored.name for stored in store.objects()} == names
        assert [stored.name for stored in store.objects(OTHER_NAMESPACE)] == [name_of(3, namespace=OTHER_NAMESPACE)]
        assert [stored.name for stored in store.objects(NAMESPACE, "state")] == [name_of(2, "state")]
        assert [stored.name for stored in store.objects(group="state")] == [name_of(2, "state")]
        assert {(stored.value, stored.position) for stored in store.objects(headers=True)} == {(3.0, 77)}
        assert all(stored.nbytes > sum(ROWS) for stored in store.objects())
        assert sum(stored.nbytes for stored in store.objects()) * self.copies == store.stats.nbytes

    def test_touching_makes_objects_younger(self, store: Store) -> None:
        names = [name_of(number) for number in range(2)]
        for name in names:
            save(store, name)
        store.touch([names[0], name_of(99)])
        ages = {stored.name: stored.used_at for stored in store.objects()}
        assert ages[names[0]] > ages[names[1]]

    def test_namespaces_have_descriptions(self, store: Store) -> None:
        assert store.descriptions() == {}
        store.describe(NAMESPACE, {"model": "qwen3-next", "dtype": "bf16"})
        store.describe(NAMESPACE, {"model": "gemma-3"})
        store.describe(OTHER_NAMESPACE, {"model": "ü"})
        assert store.descriptions() == {NAMESPACE: {"model": "gemma-3"}, OTHER_NAMESPACE: {"model": "ü"}}

    def test_nothing_is_left_to_collect(self, store: Store) -> None:
        save(store, name_of(1))
        assert store.collect().files == 0
        assert load(store, name_of(1)) == rows_of(name_of(1))

    def test_shrinking_evicts_the_oldest(self, store: Store) -> None:
        names = [name_of(number) for number in range(4)]
        for name in names:
            save(store, name, position=0)
        store.touch(names[2:])
        half = store.stats.nbytes // 2
        assert store.shrink(half) == 2 * self.copies
        assert store.lookup(names) == [False, False, True, True]
        assert store.stats.nbytes <= half
        assert store.shrink(0) == 2 * self.copies

    def test_counters_add_up(self, store: Store) -> None:
        save(store, name_of(1))
        load(store, name_of(1))
        stats = store.stats
        assert (stats.objects, stats.saved, stats.opened) == (self.copies, 1, 1)
        assert stats.read_bytes == sum(ROWS)
        assert stats.saved_bytes * self.copies == stats.nbytes

    @pytest.mark.parametrize("kind", LATER)
    def test_objects_of_later_versions_are_refused_and_left_alone(self, store: Store, kind: str) -> None:
        name, raw = name_of(1), later(name_of(1), kind)
        plant(store, name, raw)
        save(store, name_of(2))
        for number in (1, 2):
            with pytest.raises(UnknownFormat, match=rf"{name.key}: its .* reads version 1.*; upgrade hybridkv"):
                store.open(name)
            assert store.stats.unknown == number * self.copies
        assert store.lookup([name]) == [True]
        assert store.create(name, ROWS, value=1, position=0) is None
        assert {stored.name for stored in store.objects(headers=True)} == {name, name_of(2)}
        assert store.collect().files == 0
        assert load(store, name_of(2)) == rows_of(name_of(2))
        assert raw_bytes(store, name) == raw
        assert (store.stats.corrupt, store.stats.faults, store.stats.opened) == (0, 0, 1)

    @pytest.mark.parametrize("kind", LATER)
    def test_objects_of_later_versions_can_be_removed(self, store: Store, kind: str) -> None:
        for number in (1, 2):
            plant(store, name_of(number), later(name_of(number), kind))
        assert store.delete([name_of(1)]) == 1
        assert store.shrink(0) == self.copies
        assert (store.stats.objects, store.stats.nbytes) == (0, 0)

    def test_closing_twice_is_harmless(self, store: Store) -> None:
        save(store, name_of(1))
        store.close()
        store.close()
