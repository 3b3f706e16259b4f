"""A layerwise load that is late: other requests go on, and the load ends beside their steps."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from hybridkv import SamplingParams
from hybridkv.store.blob_store import BlobStore
from hybridkv.stream.step import STEP_WAIT_S, StepTransfers
from tests.engine.drive import GREEDY, FixedPace, check_greedy, memory_for
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.store.faulty import Fault, Kind
from tests.stream.drive import StreamDriver, filled, model_of
from tests.stream.faults import GarbageStore, check_same, copy_of
from tests.stream.test_faults import SHARED, STORED

BRIEF = replace(GREEDY, max_tokens=2)
LONG = replace(GREEDY, max_tokens=50)
KINDS = ["llama", "gemma3", "mamba2", "falcon_h1", "kimi_linear"]
"""Full attention, windows, states, and mixes of them."""
LATE = SHARED + prompt(9, 2)
BESIDE = prompt(20, 7)


@functools.cache
def clean_store(family: str) -> BlobStore:
    """What the same requests leave in a store without faults."""
    store = copy_of(filled(family, STORED))
    driver = StreamDriver(model_of(family), store, "layerwise")
    driver.add("beside", BESIDE, LONG)
    driver.add("late", LATE, LONG)
    driver.add("late and brief", LATE, BRIEF)
    driver.run()
    driver.drain()
    driver.runner.close()
    return store


class LateDriver(StreamDriver):
    """Loads hang at the first or the last row of a group."""

    def __init__(
        self, family: str, place: str = "first", *, stored: tuple[str, ...] = (STORED,), **options: Any
    ) -> None:
        self.family = family
        self.below = copy_of(filled(family, *stored))
        store = GarbageStore(self.below)
        super().__init__(model_of(family), store, "layerwise", **options)
        group = self.streamer.catalogue.groups[0 if place == "first" else -1]
        self.fault = Fault(Kind.SLOW, group.name, row=0 if place == "first" else len(group.layers) - 1)
        store.faults.append(self.fault)

    def begin(self) -> None:
        """One request decodes, and the load of another is late."""
        self.add("beside", BESIDE, LONG)
        while not self.num_tokens("beside"):
            self.step()
        self.add("late", LATE, BRIEF)
        self.until_late()

    def until_late(self) -> None:
        deadline = time.monotonic() + 20
        while not self.stats.late_loads:
            assert time.monotonic() < deadline, "no load was late"
            self.step()

    def num_tokens(self, name: str) -> int:
        return sum(len(update.token_ids) for update in self.updates if update.request_id == name)

    def end(self) -> None:
        """All replies are right, and nothing is left: no page, and no wrong byte in the store."""
        self.run()
        for name in self.results:
            check_greedy(self, name)
        self.fault.release.set()
        self.settle()
        check_same(self.below, clean_store(self.family))
        self.close()


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("family", KINDS)
def test_other_requests_go_on_while_a_load_is_late(family: str, place: str) -> None:
    driver = LateDriver(family, place)
    driver.begin()
    before, steps = driver.num_tokens("beside"), driver.core.steps
    for _ in range(20):
        driver.step()
    assert driver.num_tokens("beside") == before + 20
    assert driver.core.steps == steps + 20
    assert driver.num_tokens("late") == 0
    assert driver.streaming.num_loading == 1
    driver.fault.release.set()
    results = driver.run()
    assert results["late"].cached_tokens == 80, "what was loaded is not computed"
    assert driver.stats.late_loads == 1
    assert driver.stats.loads == {"async": 1}
    assert not driver.stats.failures
    driver.end()


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_request_alone_waits_for_its_load(family: str) -> None:
    driver = LateDriver(family)
    driver.add("late", LATE, BRIEF)
    threading.Timer(6 * STEP_WAIT_S, driver.fault.release.set).start()
    driver.run()
    assert driver.stats.late_loads == 0
    assert driver.stats.loads == {"layerwise": 1}
    assert driver.stats.wait_seconds > 2 * STEP_WAIT_S
    driver.end()


@functools.cache
def next_turn(family: str) -> list[int]:
    """A prompt that goes on after the stored reply, which ends at token 91, inside a block."""
    driver = StreamDriver(model_of(family), copy_of(filled(family, STORED)))
    driver.add("a", SHARED, BRIEF)
    reply = driver.run()["a"].completions[0].token_ids
    driver.close()
    return SHARED + reply + prompt(9, 2)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("family", KINDS)
def test_a_late_load_that_ends_inside_a_block_begins_again(family: str, place: str) -> None:
    """The step has written tokens to the load's last page, so what it left must not be read."""
    driver = LateDriver(family, place)
    driver.add("beside", BESIDE, LONG)
    while not driver.num_tokens("beside"):
        driver.step()
    driver.add("late", next_turn(family), BRIEF)
    driver.until_late()
    before = driver.num_tokens("beside")
    for _ in range(5):
        driver.step()
    assert driver.num_tokens("beside") == before + 5, "the other one goes on"
    driver.fault.release.set()
    results = driver.run()
    assert results["late"].cached_tokens == 91
    assert driver.stats.late_loads == 1
    assert driver.stats.loads == {"async": 1}
    assert not driver.stats.failures
    for name in driver.results:
        check_greedy(driver, name)
    driver.close()


@pytest.mark.parametrize("family", KINDS)
def test_a_request_that_arrives_during_the_wait_is_served(family: str) -> None:
    driver = LateDriver(family)
    arrived = threading.Event()
    driver.core.calls_wait = arrived.is_set
    driver.add("late", LATE, BRIEF)
    threading.Timer(4 * STEP_WAIT_S, arrived.set).start()
    driver.until_late()
    assert arrived.is_set()
    arrived.clear()
    driver.add("beside", BESIDE, LONG)
    while "beside" not in driver.results:
        driver.step()
    assert not driver.fault.release.is_set()
    assert driver.num_tokens("late") == 0
    driver.fault.release.set()
    driver.end()
    assert driver.results["late"].cached_tokens == 80


@pytest.mark.parametrize("family", KINDS)
def test_an_abort_of_a_late_request_frees_its_pages_at_once(family: str) -> None:
    driver = LateDriver(family)
    driver.begin()
    driver.abort("late")
    assert driver.results["late"].completions[0].finish_reason == "abort"
    assert driver.stats.failures == {"aborted": 1}
    assert not driver.streaming.is_busy
    driver.end()


@pytest.mark.parametrize("family", KINDS)
def test_a_late_load_that_never_comes_times_out(family: str) -> None:
    driver = LateDriver(family)
    driver.begin()
    [load] = driver.streamer.mover._loads
    load._deadline = time.monotonic()
    driver.run()
    assert driver.results["late"].cached_tokens == 0
    assert driver.stats.failures == {"timeout": 1}
    assert driver.stats.late_loads == 1
    driver.end()


@pytest.mark.parametrize("family", KINDS)
def test_a_late_load_that_fails_in_the_end(family: str) -> None:
    driver = LateDriver(family)
    driver.begin()
    store = driver.store
    assert isinstance(store, GarbageStore)
    store.faults.append(Fault(Kind.FAIL_READ, driver.fault.group, driver.fault.row))
    driver.fault.release.set()
    driver.run()
    assert driver.stats.failures == {"fault": 1}
    assert driver.results["late"].cached_tokens < 80
    driver.end()


def test_closing_while_a_load_is_late_does_not_hang() -> None:
    driver = LateDriver("falcon_h1")
    driver.begin()
    start = Stopwatch()
    driver.close(clean=False)
    assert start.seconds < 10
    driver.fault.release.set()


# --- steps that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model", "sample"])
@pytest.mark.parametrize("family", KINDS)
def test_a_step_that_fails_gives_its_late_load_up(family: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows come after the pages were freed: they reach no page that another request has by then."""
    driver = LateDriver(family)
    owner, name = (driver.runner, "run") if part == "model" else (driver.core, "_sample")
    does = getattr(owner, name)

    def fail_once(*args: Any) -> Any:
        result = does(*args)
        step = driver.streaming._step
        if step is not None and step.late:
            monkeypatch.setattr(owner, name, does)
            raise RuntimeError("injected")
        return result

    monkeypatch.setattr(owner, name, fail_once)
    driver.add("beside", BESIDE, LONG)
    while not driver.num_tokens("beside"):
        driver.step()
    driver.add("late", LATE, BRIEF)
    deadline = time.monotonic() + 20
    while not driver.stats.failures:
        assert time.monotonic() < deadline, "the load was not given up"
        driver.core.step()
        driver.cache.check_integrity()
    assert driver.stats.failures == {"aborted": 1}
    assert driver.stats.late_loads == 0
    driver.fault.release.set()
    driver.run()
    assert driver.results["late"].completions[0].error is None
    driver.end()


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_later_step_that_fails_does_not_concern_a_late_load(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LateDriver(family)
    driver.begin()
    run = driver.runner.run

    def fail_once(work: Any) -> Any:
        monkeypatch.setattr(driver.runner, "run", run)
        raise RuntimeError("injected")

    monkeypatch.setattr(driver.runner, "run", fail_once)
    driver.core.step()
    driver.cache.check_integrity()
    driver.fault.release.set()
    driver.run()
    assert driver.results["late"].cached_tokens == 80
    assert driver.stats.loads == {"async": 1}
    driver.end()


# --- what happens beside it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_samples_and_seeds_of_a_late_request(family: str) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=4, ignore_eos=True)
    said = []
    for is_late in (False, True):
        driver = LateDriver(family)
        if is_late:
            driver.add("beside", BESIDE, LONG)
            driver.step()
        else:
            driver.fault.release.set()
        driver.add("late", LATE, params)
        if is_late:
            driver.until_late()
            driver.fault.release.set()
        completions = driver.run()["late"].completions
        said.append([completion.token_ids for completion in completions])
        assert driver.stats.late_loads == is_late
        driver.close()
    assert said[0] == said[1]


@pytest.mark.parametrize("family", KINDS)
def test_little_memory_beside_a_late_load(family: str) -> None:
    """Requests beside it are preempted and need all the pages there are; they get those of the late load only later."""
    driver = LateDriver(family, memory_bytes=memory_for(model_of(family), 4, 100, row_layers=1))
    driver.begin()
    for index in range(3):
        driver.add(str(index), prompt(60, 40 + index), replace(GREEDY, max_tokens=20))
    for _ in range(20):
        driver.step()
    driver.fault.release.set()
    driver.run()
    for name, result in driver.results.items():
        assert result.completions[0].error is None
        check_greedy(driver, name)
    driver.close()


def test_all_loads_of_a_step_have_one_budget() -> None:
    class Hanging:
        asked_s = 0.0

        def wait(self, layer: int, most_s: float) -> bool:
            Hanging.asked_s += most_s
            time.sleep(most_s)
            return False

    step = StepTransfers(None, lambda: True)  # type: ignore[arg-type]
    step.loads = {name: Hanging() for name in "abc"}  # type: ignore[misc]
    for layer in range(4):
        step.before_layer(layer)
    assert step.late == {"a", "b", "c"}
    assert 0 < Hanging.asked_s <= STEP_WAIT_S


@pytest.mark.parametrize("family", KINDS)
def test_several_late_loads_beside_one_that_is_in_time(family: str) -> None:
    driver = LateDriver(family, stored=("90/1", "90/3", "90/4"))
    driver.fault.times = 2
    for seed in (1, 3, 4):
        driver.add(str(seed), prompt(90, seed) + prompt(9, 2), BRIEF)
    driver.until_late()
    driver.fault.release.set()
    for name, result in driver.run().items():
        assert result.cached_tokens == 80
        check_greedy(driver, name)
    assert sum(driver.stats.loads.values()) == 3
    assert driver.stats.loads["async"] == driver.stats.late_loads
    driver.close()


class NotedPace(FixedPace):
    """Knows the tokens of the steps that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[int] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.shown.append(num_tokens)


def test_steps_that_wait_for_a_store_say_nothing_of_the_models_pace() -> None:
    """Else a slow store would have every later step take fewer prompt tokens."""
    noted = {}
    for mode in ("layerwise", "async"):
        driver = StreamDriver(model_of("llama"), copy_of(filled("llama", STORED)), mode)
        driver.core.scheduler.pace = pace = NotedPace()
        driver.add("a", LATE, BRIEF)
        driver.run()
        assert driver.stats.loads == {mode: 1}
        noted[mode] = pace.shown
        driver.close()
    assert noted == {"layerwise": [1], "async": [len(LATE) - 80, 1]}


def test_steps_beside_a_load_say_nothing_of_the_models_pace() -> None:
    fault = Fault(Kind.SLOW)
    driver = StreamDriver(model_of("llama"), GarbageStore(copy_of(filled("llama", STORED)), [fault]))
    driver.core.scheduler.pace = pace = NotedPace()
    driver.add("beside", BESIDE, LONG)
    driver.step()
    driver.add("late", LATE, BRIEF)
    driver.until_loading()
    assert pace.shown
    pace.shown.clear()
    for _ in range(3):
        driver.step()
    assert pace.shown == []
    fault.release.set()
    driver.run()
    assert {1, len(LATE) - 80 + 1} <= set(pace.shown)
    driver.close()
