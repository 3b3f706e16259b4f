"""Rows and layers: what is requested, waited for, taken out and made visible, and when.

An observer that is told of layers after the streams are looks at the store at every layer of a step.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridkv.cache import Role
from hybridkv.store import ObjectName
from hybridkv.store.blob_store import BlobStore
from hybridkv.workers import Workers
from tests.engine.drive import GREEDY
from tests.engine.zoo import prompt
from tests.store.faulty import Fault, FaultyBlob, Kind
from tests.stream.drive import StreamDriver, filled, model_of, plain_store
from tests.stream.faults import GarbageBlob, GarbageBlobs, GarbageStore, copy_of
from tests.stream.test_faults import MIXED, STORED, rows_in_order

BRIEF = replace(GREEDY, max_tokens=1)


class Diary(GarbageStore):
    """Notes which rows were read and written, in order."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__(store)
        self._faulty = DiaryBlobs(store.blobs, self.faults)
        self.blobs = self._faulty
        self.read = self._faulty.read
        self.written: list[tuple[ObjectName, int]] = []

    def create(self, name: ObjectName, *args: Any, **options: Any) -> Any:
        writer = super().create(name, *args, **options)
        if writer is not None:
            write = writer.write

            def noted(row: int, buffers: Sequence[memoryview]) -> None:
                write(row, buffers)
                self.written.append((name, row))

            writer.write = noted  # type: ignore[method-assign]
        return writer


class DiaryBlobs(GarbageBlobs):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[tuple[str, int]] = []

    def open(self, name: ObjectName) -> GarbageBlob:
        blob = super().open(name)
        assert isinstance(blob, GarbageBlob)
        return DiaryBlob(self, name, blob._blob)


class DiaryBlob(GarbageBlob):
    def __init__(self, blobs: DiaryBlobs, name: ObjectName, blob: FaultyBlob) -> None:
        super().__init__(blobs, name, blob)
        self._read = blobs.read

    def read_at(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> int:
        found = super().read_at(offset, buffers, nbytes)
        if offset in self._blob._offsets:
            self._read.append((self._name.group, self._blob._offsets.index(offset)))
        return found


class Watch:
    """Calls back before and after each layer, inside the wait and after the dump of the streams."""

    def __init__(self, driver: StreamDriver) -> None:
        self.before: Callable[[int], None] = lambda layer: None
        self.after: Callable[[int], None] = lambda layer: None
        driver.runner.observe(self)

    def before_layer(self, layer: int, frame: Any) -> None:
        self.before(layer)

    def after_layer(self, layer: int, frame: Any, hidden: Any) -> None:
        self.after(layer)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def first_layers(driver: StreamDriver) -> dict[tuple[str, int], int]:
    return {(g.name, c.first): c.row.first_layer for g in driver.streamer.catalogue.groups for c in g.chunks}


@pytest.mark.parametrize("family", MIXED)
def test_rows_are_requested_in_layer_order_and_what_gates_comes_first(family: str) -> None:
    store = Diary(copy_of(filled(family, STORED)))
    driver = StreamDriver(model_of(family), store)
    driver.streamer.mover._readers.close(5)
    driver.streamer.mover._readers = Workers(1, "test")
    driver.add("a", prompt(90, 1) + prompt(9, 2), BRIEF)
    driver.run()
    asked = list(dict.fromkeys(store.read))
    assert asked == rows_in_order(driver)
    layers = first_layers(driver)
    gates = [Role.STATE, Role.LOCAL, Role.FULL]
    roles = {group.name: gates.index(group.role) for group in driver.streamer.catalogue.groups}
    needed = [(layers[row], roles[row[0]]) for row in store.read]
    assert needed == sorted(needed), "a later layer's row, or full attention, before what is needed first"
    driver.close()


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_rows_after_one_that_failed_are_not_read(family: str) -> None:
    store = Diary(copy_of(filled(family, STORED)))
    driver = StreamDriver(model_of(family), store)
    driver.streamer.mover._readers.close(5)
    driver.streamer.mover._readers = Workers(1, "test")
    store.faults.append(Fault(Kind.FAIL_READ, *rows_in_order(driver)[0]))
    driver.add("a", prompt(90, 1) + prompt(9, 2), BRIEF)
    driver.run()
    assert driver.stats.failures == {"fault": 1}
    assert store.read == []
    driver.close()


@pytest.mark.parametrize("family", MIXED)
def test_a_layer_waits_for_its_rows_and_for_no_later_ones(family: str) -> None:
    """Each row in turn comes only after the layer before its own has run: whoever waited for it earlier would hang."""
    driver = StreamDriver(model_of(family), plain_store())
    for row in rows_in_order(driver):
        check_waits(family, row, first_layers(driver)[row])
    driver.close()


def check_waits(family: str, row: tuple[str, int], needed_at: int) -> None:
    store = Diary(copy_of(filled(family, STORED)))
    driver = StreamDriver(model_of(family), store, "layerwise", streamer_options={"load_timeout_s": 10.0})
    fault = Fault(Kind.SLOW, *row)
    store.faults.append(fault)
    watch = Watch(driver)
    begun: list[int] = []

    def before(layer: int) -> None:
        begun.append(layer)
        assert (row in store.read) == (layer >= needed_at), f"layer {layer} began without {row}, or waited for it"

    def release_soon(layer: int) -> None:
        if layer == needed_at - 1:  # so late that a layer which does not wait has begun
            threading.Timer(0.02, fault.release.set).start()

    watch.before, watch.after = before, release_soon
    if needed_at == 0:
        threading.Timer(0.1, fault.release.set).start()
    driver.add("a", prompt(90, 1) + prompt(9, 2), BRIEF)
    driver.run()
    assert begun == list(range(len(begun)))
    assert driver.stats.loads == {"layerwise": 1}
    assert driver.results["a"].cached_tokens == 80
    driver.close()


@pytest.mark.parametrize("family", MIXED)
def test_rows_are_dumped_once_after_their_last_layer_while_others_compute(family: str) -> None:
    store = Diary(plain_store())
    driver = StreamDriver(model_of(family), store)
    last = {(g.name, c.first): c.row.last_layer for g in driver.streamer.catalogue.groups for c in g.chunks}
    watch = Watch(driver)
    seen: list[int] = []

    def before(layer: int) -> None:
        early = [row for name, row in store.written if last[name.group, row] >= layer]
        assert not early, f"written before layer {layer} ran"

    def after(layer: int) -> None:
        seen.append(layer)
        due = {row for row, at in last.items() if at < layer}
        assert soon(lambda: due <= {(name.group, row) for name, row in store.written}), f"not written by layer {layer}"
        assert not any(store.store.objects()), "visible while its step runs"

    watch.before, watch.after = before, after
    commit = driver.cache.commit

    def committed(*args: Any, **options: Any) -> int:
        assert not any(store.store.objects()), "visible before its step is committed"
        return commit(*args, **options)

    driver.cache.commit = committed  # type: ignore[method-assign]
    driver.add("a", prompt(90, 1), BRIEF)
    while not driver.core.steps:
        driver.step()
    driver.drain()
    assert seen
    assert any(store.store.objects())
    assert set(Counter(store.written).values()) == {1}
    driver.run()
    driver.close()


@pytest.mark.parametrize("family", MIXED)
def test_a_step_that_fails_dumps_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Diary(plain_store())
    driver = StreamDriver(model_of(family), store)
    forward = driver.runner._forward

    def fail(*args: Any) -> Any:
        forward(*args)
        raise RuntimeError("injected")

    monkeypatch.setattr(driver.runner, "_forward", fail)
    driver.add("a", prompt(90, 1), BRIEF)
    while not driver.core.steps:
        driver.core.step()
    driver.drain()
    assert store.written
    assert not any(store.store.objects())
    assert driver.stats.dumps_discarded
    assert driver.stats.dumped == 0
    monkeypatch.undo()
    driver.run()
    driver.drain()
    assert driver.stats.dumped == len(list(store.store.objects())) > 0
    driver.close()


def test_a_step_that_fails_while_its_load_is_under_way_dumps_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward pass raises at its first layer; rows are still coming."""
    store = Diary(copy_of(filled("falcon_h1", STORED)))
    before = set(store.store.objects())
    driver = StreamDriver(model_of("falcon_h1"), store, "layerwise")
    watch = Watch(driver)
    raised: list[int] = []

    def fail_once(layer: int) -> None:
        if layer == 1 and not raised:
            raised.append(layer)
            raise RuntimeError("injected")

    watch.before = fail_once
    driver.add("a", prompt(90, 1) + prompt(30, 2), BRIEF)
    while not raised:
        driver.core.step()
        driver.event.wait(0.002)
    driver.drain()
    assert {one.name for one in store.store.objects()} == {one.name for one in before}
    driver.run()
    assert driver.results["a"].completions[0].error is None
    driver.close()
