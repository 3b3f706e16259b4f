"""Objects of a load are opened together where that is cheaper, each is handed out once, and none stays open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridkv.store import MemoryStore, MissingObject, ObjectName, Reader, StoreError, StoreFault
from hybridkv.stream.openings import Openings
from tests.store.samples import name_of, save

NAMES = [name_of(number) for number in range(10)]


class Together(MemoryStore):
    """Opens four objects in one call, and keeps count of calls and of open readers."""

    opens_together = 4

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.calls: list[list[ObjectName]] = []
        self.readers: list[Reader] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def open_all(self, names: Sequence[ObjectName]) -> list[Reader | StoreError]:
        self.calls.append(list(names))
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        found = super().open_all(names)
        self.readers += [one for one in found if isinstance(one, Reader)]
        return found

    def num_open(self) -> int:
        return sum(not one._handle._closed for one in self.readers)  # type: ignore[attr-defined]


@pytest.fixture
def store() -> Together:
    store = Together()
    for name in NAMES:
        save(store, name)
    return store


def test_objects_are_opened_together_in_the_order_they_are_needed(store: Together) -> None:
    openings = Openings(store)
    openings.expect(NAMES)
    for name in NAMES:
        with openings.open(name) as reader:
            assert reader.header.name == name
    assert store.calls == [NAMES[:4], NAMES[4:8], NAMES[8:]]


def test_threads_wait_for_the_call_that_opens_theirs(store: Together) -> None:
    openings = Openings(store)
    openings.expect(NAMES)
    store.gate.clear()
    with ThreadPoolExecutor(10) as threads:
        found = threads.map(openings.open, NAMES)
        store.gate.set()
        assert [reader.header.name for reader in found] == NAMES
    assert sorted(name for call in store.calls for name in call) == sorted(NAMES)


def test_each_object_has_its_own_error(store: Together) -> None:
    store.delete(NAMES[1:2])
    openings = Openings(store)
    openings.expect(NAMES)
    openings.open(NAMES[0]).close()
    with pytest.raises(MissingObject, match=NAMES[1].key):
        openings.open(NAMES[1])
    openings.open(NAMES[2]).close()


def test_a_call_that_fails_fails_for_all_its_objects(store: Together) -> None:
    openings = Openings(store)
    openings.expect(NAMES)
    store.error = StoreFault("gone")
    for name in NAMES[:4]:
        with pytest.raises(StoreFault, match="gone"):
            openings.open(name)
    assert len(store.calls) == 1
    store.error = None
    openings.open(NAMES[4]).close()


def test_what_nobody_takes_is_closed(store: Together) -> None:
    openings = Openings(store)
    openings.expect(NAMES)
    first = openings.open(NAMES[0])
    openings.close()
    assert store.num_open() == 1
    first.close()
    assert store.num_open() == 0


def test_what_is_opened_after_the_end_is_closed_too(store: Together) -> None:
    openings = Openings(store)
    openings.expect(NAMES)
    store.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(openings.open, NAMES[0])
        while not store.calls:
            pass
        openings.close()
        store.gate.set()
        opening.result().close()
    assert store.num_open() == 0
