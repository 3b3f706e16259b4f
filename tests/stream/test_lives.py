"""Nothing that happens to a request drops a transfer, and no transfer that hangs keeps a page or changes one."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from hybridkv import SamplingParams
from hybridkv.store import StoreFault
from hybridkv.store.guard import Guarded
from tests.devices import DECODES, DEVICE, DEVICES
from tests.engine.drive import GREEDY, check_greedy, memory_for
from tests.engine.test_correctness import random_request
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.store.faulty import Fault, Kind
from tests.stream.drive import StreamDriver, filled, model_of, plain_store
from tests.stream.faults import GarbageStore, check_same, contents, copy_of
from tests.stream.test_faults import MIXED, MODES, SHARED, STORED

BRIEF = replace(GREEDY, max_tokens=2)
ONE_OF_EACH = ["llama", "gemma3", "mamba2", "falcon_h1", "kimi_linear"]


def garbage_of(family: str, *names: str) -> GarbageStore:
    return GarbageStore(copy_of(filled(family, *(names or (STORED,)))))


# --- requests that end while they load --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_an_abort_in_the_middle_of_a_load_frees_its_pages_at_once(family: str) -> None:
    store = garbage_of(family)
    fault = Fault(Kind.SLOW)
    store.faults.append(fault)
    driver = StreamDriver(model_of(family), store)
    driver.add("a", SHARED + prompt(9, 2))
    driver.until_loading()
    assert fault.reached.wait(5)
    driver.abort("a")
    assert driver.results["a"].completions[0].finish_reason == "abort"
    assert driver.pages_left() == 0
    assert driver.stats.failures == {"aborted": 1}
    driver.add("b", prompt(60, 3), BRIEF)
    driver.run()
    check_greedy(driver, "b")
    fault.release.set()
    driver.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_load_that_hangs_frees_its_pages_and_its_request_goes_on_without(family: str, mode: str) -> None:
    store = garbage_of(family)
    fault = Fault(Kind.SLOW, row=0)
    store.faults.append(fault)
    driver = StreamDriver(model_of(family), store, mode, streamer_options={"load_timeout_s": 0.05})
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    driver.run()
    check_greedy(driver, "a")
    assert driver.results["a"].cached_tokens == 0
    assert driver.stats.failures == {"timeout": 1}
    assert driver.pages_left() == 0
    fault.release.set()
    driver.close()


def tight_memory(family: str, num_tokens: int) -> int:
    """Memory in which a request of so many tokens just fits."""
    return memory_for(model_of(family), 1, num_tokens, row_layers=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "what"), [("async", "hangs"), ("async", "is aborted"), ("layerwise", "hangs")])
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_load_that_goes_wrong_takes_no_room_from_anybody(family: str, mode: str, what: str, device: str) -> None:
    """Memory has room for one request. Its load hangs; it, the next and a long reply get all the room there is."""
    store = garbage_of(family)
    fault = Fault(Kind.SLOW)
    store.faults.append(fault)
    driver = StreamDriver(
        model_of(family),
        store,
        mode,
        memory_bytes=tight_memory(family, 140),
        device=device,
        streamer_options={"load_timeout_s": 0.05 if what == "hangs" else 20.0},
    )
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    if what == "is aborted":
        driver.until_loading()
        assert fault.reached.wait(5)
        driver.abort("a")
    driver.run()
    driver.add("b", prompt(100, 3), BRIEF)
    driver.add("c", prompt(30, 4), replace(GREEDY, max_tokens=90))
    driver.run()
    for name in ("a", "b", "c") if what == "hangs" else ("b", "c"):
        assert driver.results[name].completions[0].error is None
        check_greedy(driver, name)
    assert len(driver.results["c"].token_ids) == 90
    fault.release.set()
    driver.close()


def test_no_room_in_the_middle_of_a_reply_is_an_error_and_not_a_shorter_reply() -> None:
    """Nothing but a bug makes it happen: requests that do not fit are refused."""
    driver = StreamDriver(model_of("llama"), plain_store(), memory_bytes=tight_memory("llama", 140))
    driver.core.limits.max_model_len = 10_000
    driver.add("a", prompt(30, 4), replace(GREEDY, max_tokens=900))
    completion = driver.run()["a"].completions[0]
    assert completion.finish_reason == "error"
    assert completion.error is not None
    assert completion.error.startswith("no room to go on at token")
    assert len(completion.token_ids) < 900
    driver.close()


def test_giving_up_waits_for_a_copy_into_pages_and_lets_no_other_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StreamDriver(model_of("falcon_h1"), garbage_of("falcon_h1"))
    pages = driver.streamer.mover._pages
    copy_in, begun, ended = pages.copy_in, threading.Event(), []

    def slowly(*args: Any) -> None:
        begun.set()
        time.sleep(0.3)
        copy_in(*args)
        ended.append(args)

    monkeypatch.setattr(pages, "copy_in", slowly)
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    driver.until_loading()
    assert begun.wait(5)
    driver.abort("a")
    count = len(ended)
    assert count > 0
    time.sleep(0.5)
    assert len(ended) == count, "a page was written after its load was given up"
    driver.close()


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_that_come_too_late_reach_nobody(device: str) -> None:
    """A read that hangs ends after its request has computed everything: no page that is used by now may change."""
    store = garbage_of("falcon_h1")
    fault = Fault(Kind.SLOW, row=1)
    store.faults.append(fault)
    memory_bytes = memory_for(model_of("falcon_h1"), 4, 140, row_layers=1)
    driver = StreamDriver(
        model_of("falcon_h1"),
        store,
        memory_bytes=memory_bytes,
        device=device,
        streamer_options={"load_timeout_s": 0.05},
    )
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    driver.run()
    driver.add("b", prompt(100, 4), replace(GREEDY, max_tokens=30))
    for index in range(30):
        driver.step()
        if index == 10:
            fault.release.set()
    driver.run()
    check_greedy(driver, "b")
    driver.close()


def test_when_all_readers_hang_nobody_waits_for_them_again() -> None:
    names = [f"90/{seed}" for seed in range(1, 7)]
    store = garbage_of("llama", *names)
    fault = Fault(Kind.SLOW)
    store.faults.append(fault)
    driver = StreamDriver(model_of("llama"), store, streamer_options={"load_timeout_s": 0.1})
    for seed in range(1, 6):
        driver.add(str(seed), prompt(90, seed) + prompt(9, 50), BRIEF)
    driver.run()
    timeouts = driver.stats.failures["timeout"]
    assert timeouts >= 1
    assert sum(load.num_hanging for load in driver.streamer.mover._loads) == driver.streamer.mover._readers.count
    assert driver.pages_left() == 0
    start = Stopwatch()
    driver.add("late", prompt(90, 6) + prompt(9, 50), BRIEF)
    driver.run()
    assert driver.stats.failures["timeout"] == timeouts
    assert driver.stats.skipped_lookups == 1
    assert start.seconds < 5
    for name in driver.results:
        check_greedy(driver, name)
    fault.release.set()
    store.faults.clear()
    driver.settle()
    driver.cache.reset()
    driver.add("back", prompt(90, 6) + prompt(9, 50), BRIEF)
    assert driver.run()["back"].cached_tokens >= 80
    driver.close()


def test_when_lookups_hang_nobody_waits_for_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, release = garbage_of("falcon_h1"), threading.Event()
    lookup = store.lookup

    def hang(names: Any) -> list[bool]:
        release.wait()
        return lookup(names)

    monkeypatch.setattr(store, "lookup", hang)
    driver = StreamDriver(model_of("falcon_h1"), store, streamer_options={"lookup_timeout_s": 0.05})
    for index in range(6):
        driver.add(str(index), prompt(40, 10 + index), BRIEF)
        driver.run()
        check_greedy(driver, str(index))
    assert driver.stats.slow_lookups == 2, "each slow lookup is counted once"
    assert driver.stats.skipped_lookups == 4
    release.set()
    deadline = time.monotonic() + 10
    while driver.streamer.finder.is_blocked:
        assert time.monotonic() < deadline
    driver.add("back", SHARED + prompt(9, 2), BRIEF)
    assert driver.run()["back"].cached_tokens == 80
    driver.close()


def test_a_slow_lookup_is_counted_once_however_long_its_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store, release = garbage_of("llama"), threading.Event()
    monkeypatch.setattr(store, "lookup", lambda names: release.wait() and [False] * len(names))
    driver = StreamDriver(
        model_of("llama"), store, max_num_seqs=2, max_num_batched_tokens=2, streamer_options={"lookup_timeout_s": 0.01}
    )
    driver.add("first", prompt(30, 3), BRIEF)
    driver.add("second", prompt(30, 4), BRIEF)
    driver.run()
    assert driver.stats.slow_lookups == 2
    release.set()
    driver.close()


@pytest.mark.parametrize("answer", ["nothing", "an error"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_what_was_in_memory_when_the_store_was_asked_may_be_gone_when_it_answers(
    family: str, mode: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store adds nothing to token 97, where a turn could have resumed; then the cache is reset."""
    store, release = GarbageStore(plain_store()), threading.Event()
    driver = StreamDriver(model_of(family), store, mode)
    driver.add("a", SHARED, GREEDY)
    talk = SHARED + driver.run()["a"].token_ids
    lookup = store.lookup

    def slow(names: Any) -> list[bool]:
        release.wait(10)
        if answer == "an error":
            raise StoreFault("injected")
        return lookup(names)

    monkeypatch.setattr(store, "lookup", slow)
    driver.add("b", talk + prompt(40, 2), BRIEF)
    driver.step()
    driver.cache.reset()
    release.set()
    driver.run()
    check_greedy(driver, "b")
    driver.close()


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0.05, 30.0], ids=["late", "not late yet"])
def test_closing_in_the_middle_of_a_load_that_hangs_does_not_hang(timeout_s: float) -> None:
    store = garbage_of("falcon_h1")
    fault = Fault(Kind.SLOW)
    store.faults.append(fault)
    driver = StreamDriver(model_of("falcon_h1"), store, streamer_options={"load_timeout_s": timeout_s})
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    driver.until_loading()
    assert fault.reached.wait(5)
    start = Stopwatch()
    driver.close(clean=False)
    assert start.seconds < 10
    fault.release.set()


# --- followers, samples, breakpoints, turns ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_siblings_wait_for_the_one_that_loads(family: str) -> None:
    store = garbage_of(family)
    driver = StreamDriver(model_of(family), store)
    for index in range(4):
        driver.add(str(index), SHARED[:85] + prompt(9, 20 + index), BRIEF)
    driver.run()
    assert driver.stats.loads == {"async": 1}
    assert [driver.results[str(index)].cached_tokens for index in range(4)] == [80] * 4
    driver.close()


@pytest.mark.parametrize("what", ["fails", "hangs", "is aborted"])
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_siblings_of_one_whose_load_goes_wrong(family: str, what: str) -> None:
    store = garbage_of(family)
    fault = Fault(Kind.SLOW, row=0, times=1)
    store.faults.append(fault)
    if what == "fails":
        store.faults.append(Fault(Kind.FAIL_READ, row=1, times=1))
    timeout_s = 0.1 if what == "hangs" else 20.0
    driver = StreamDriver(model_of(family), store, streamer_options={"load_timeout_s": timeout_s})
    for index in range(4):
        driver.add(str(index), SHARED[:85] + prompt(9, 20 + index), BRIEF)
    driver.until_loading()
    assert fault.reached.wait(5)
    for _ in range(3):
        driver.step()
    if what == "is aborted":
        driver.abort("0")
    if what != "hangs":
        fault.release.set()
    driver.run()
    for index in range(4):
        check_greedy(driver, str(index))
    assert driver.stats.failures
    fault.release.set()
    driver.close()


@pytest.mark.parametrize("bad", [False, True], ids=["good", "fault"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_samples_part_after_a_prompt_that_was_loaded(family: str, mode: str, bad: bool) -> None:
    params = SamplingParams(n=3, temperature=1.2, seed=5, max_tokens=6, ignore_eos=True)
    clean = StreamDriver(model_of(family), plain_store())
    clean.add("n", SHARED + prompt(9, 2), params)
    expected = [one.token_ids for one in clean.run()["n"].completions]
    clean.close()
    store = garbage_of(family)
    driver = StreamDriver(model_of(family), store, mode)
    if bad:
        store.faults.append(Fault(Kind.FLIP_ROW, row=1, times=1))
    driver.add("n", SHARED + prompt(9, 2), params)
    result = driver.run()["n"]
    assert [one.token_ids for one in result.completions] == expected
    assert (result.cached_tokens == 80) == (not bad)
    driver.close()


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_breakpoint_can_be_resumed_from_the_store(family: str) -> None:
    below = plain_store()
    first = StreamDriver(model_of(family), below)
    first.add("a", prompt(90, 1), BRIEF, breakpoints=[50])
    first.run()
    first.settle()
    second = StreamDriver(model_of(family), copy_of(below))
    second.add("b", prompt(90, 1)[:55] + prompt(20, 2), BRIEF)
    assert second.run()["b"].cached_tokens == 48
    first.close()
    second.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_the_next_turn_of_a_chat_after_a_restart(family: str, mode: str) -> None:
    below = plain_store()
    first = StreamDriver(model_of(family), below)
    first.add("a", SHARED, replace(GREEDY, max_tokens=30))
    result = first.run()["a"]
    first.settle()
    second = StreamDriver(model_of(family), copy_of(below), mode)
    second.add("b", SHARED + result.token_ids + prompt(20, 2), BRIEF)
    assert second.run()["b"].cached_tokens == 119
    check_greedy(second, "b")
    first.close()
    second.close()


@functools.cache
def long_turn(family: str) -> tuple[list[int], Any]:
    """A conversation whose first reply ends inside a block, and a store that has more of it."""
    first = StreamDriver(model_of(family), plain_store())
    first.add("a", SHARED, GREEDY)
    talk = SHARED + first.run()["a"].token_ids[:7] + prompt(60, 2)
    first.close()
    below = plain_store()
    second = StreamDriver(model_of(family), below)
    second.add("b", talk, BRIEF)
    second.run()
    second.settle()
    second.runner.close()
    return talk, below


@pytest.mark.parametrize("kind", [None, Kind.FAIL_READ, Kind.SLOW])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_load_that_begins_inside_a_block(family: str, mode: str, kind: Kind | None) -> None:
    """A turn resumes in memory at token 97; the store goes on to 144, with whole blocks."""
    talk, below = long_turn(family)
    store = GarbageStore(copy_of(below))
    driver = StreamDriver(model_of(family), store, mode, streamer_options={"load_timeout_s": 0.1 if kind else 20.0})
    driver.streamer.find = lambda *args, **options: None  # type: ignore[method-assign]
    driver.add("a", SHARED, GREEDY)
    driver.run()
    del driver.streamer.find
    fault = None if kind is None else Fault(kind, row=1)
    store.faults += [] if fault is None else [fault]
    assert driver.cache.match(talk + prompt(9, 3)).num_tokens == 97
    driver.add("b", talk + prompt(9, 3), BRIEF)
    cached = driver.run()["b"].cached_tokens
    check_greedy(driver, "b")
    if fault is None:
        assert cached == 144
    else:
        assert fault.struck
        assert 80 <= cached <= 128
        fault.release.set()
    driver.close()


# --- modes ------------------------------------------------------------------------------------------------------------


def test_auto_is_layerwise_alone_and_asynchronous_in_company() -> None:
    store = garbage_of("falcon_h1", "90/1", "90/2")
    driver = StreamDriver(model_of("falcon_h1"), store, "auto")
    driver.add("alone", prompt(90, 1) + prompt(9, 3), replace(GREEDY, max_tokens=30))
    while not driver.stats.loads:
        driver.step()
    assert driver.stats.loads == {"layerwise": 1}
    driver.streamer.mover._bytes_per_s = 1.0  # a slow store: the next load is predicted to take long
    driver.add("in company", prompt(90, 2) + prompt(9, 3), BRIEF)
    driver.run()
    assert driver.stats.loads == {"layerwise": 1, "async": 1}
    driver.close()


@pytest.mark.parametrize(("bytes_per_s", "mode"), [(1e12, "layerwise"), (1.0, "async")])
def test_auto_waits_in_company_only_for_what_comes_at_once_and_alone_not_for_long(
    bytes_per_s: float, mode: str
) -> None:
    for company in (False, True):
        driver = StreamDriver(model_of("falcon_h1"), garbage_of("falcon_h1", "90/2"), "auto")
        driver.streamer.mover._bytes_per_s = bytes_per_s
        if company:
            driver.add("beside", prompt(20, 9), replace(GREEDY, max_tokens=30))
            driver.step()
            driver.step()
        driver.add("one", prompt(90, 2) + prompt(9, 3), BRIEF)
        driver.run()
        assert driver.stats.loads == {mode: 1}
        driver.close()


def test_a_store_that_nobody_has_loaded_from_makes_nobody_wait() -> None:
    driver = StreamDriver(model_of("falcon_h1"), garbage_of("falcon_h1", "90/2"), "auto")
    driver.add("beside", prompt(20, 9), replace(GREEDY, max_tokens=30))
    driver.step()
    driver.step()
    driver.add("one", prompt(90, 2) + prompt(9, 3), BRIEF)
    driver.run()
    assert driver.stats.loads == {"async": 1}
    driver.close()


def test_others_decode_while_one_loads() -> None:
    store = garbage_of("falcon_h1")
    fault = Fault(Kind.SLOW)
    driver = StreamDriver(model_of("falcon_h1"), store)
    driver.add("beside", prompt(20, 9), replace(GREEDY, max_tokens=40))
    for _ in range(3):
        driver.step()
    store.faults.append(fault)
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    driver.until_loading()
    before = driver.core.steps
    for _ in range(10):
        driver.step()
    assert driver.core.steps == before + 10
    fault.release.set()
    driver.run()
    assert driver.results["a"].cached_tokens == 80
    driver.close()


# --- random lives -----------------------------------------------------------------------------------------------------

_KINDS = [Kind.MISSING, Kind.SHORT_ROW, Kind.FLIP_HEADER, Kind.FLIP_ROW, Kind.SLOW, Kind.FAIL_LOOKUP, Kind.FAIL_OPEN]
_KINDS += [Kind.FAIL_CREATE, Kind.FAIL_READ, Kind.FAIL_WRITE, Kind.FAIL_COMMIT, Kind.LOST, Kind.SLOW_WRITE]


@pytest.mark.parametrize("decodes", DECODES)
@pytest.mark.parametrize("seed", range(int(os.environ.get("HYBRIDKV_LIVES", "2"))))
@pytest.mark.parametrize("family", MIXED)
def test_a_random_life_on_a_store_with_random_faults(family: str, seed: int, decodes: str) -> None:
    """Arrivals, shared prefixes, aborts, samples, resets, in an arena that is too small; checked at every step."""
    chance = random.Random(f"{family} {seed}")
    model = model_of(family)
    below = copy_of(filled(family, "80/0", "80/1"))
    store = GarbageStore(below)
    guarded = Guarded(store, clock=lambda: 2.0 * time.monotonic()) if seed % 2 else store
    driver = StreamDriver(
        model,
        guarded,
        chance.choice(["auto", "async", "layerwise"]),
        memory_bytes=memory_for(model, 3, 120, row_layers=1),
        max_num_batched_tokens=chance.choice([24, 40, 100]),
        streamer_options={"load_timeout_s": 0.05, "lookup_timeout_s": 0.5},
        fill_tokens=chance.choice([None, 16, 32]),
        decodes=decodes,
        device=DEVICE if decodes else "cpu",
    )
    driver.streamer.mover._dumper._max_waiting_bytes = chance.choice([1 << 16, 1 << 26])
    alive, all_faults = [], []
    for number in range(14):
        alive.append(str(number))
        driver.add(str(number), *random_request(chance, driver))
        for _ in range(chance.randrange(6)):
            driver.step()
        if chance.random() < 0.2:
            driver.abort(chance.choice(alive))
        if chance.random() < 0.15:
            driver.cache.reset()
        if chance.random() < 0.6:
            fault = Fault(chance.choice(_KINDS), row=chance.choice([None, 0, 1]), after=chance.randrange(9))
            store.faults[:] = [fault]
            all_faults.append(fault)
        elif chance.random() < 0.5:
            store.faults.clear()
        if chance.random() < 0.4:
            for fault in all_faults:
                fault.release.set()
    driver.run()
    assert len(driver.results) == 14
    for fault in all_faults:
        fault.release.set()
    store.faults.clear()
    driver.settle()
    check_same(below, clean_life(family, driver, below))
    driver.close()


def clean_life(family: str, lived: StreamDriver, below: Any) -> Any:
    """What an engine without faults, and with room, leaves of everything that was asked for."""
    store = plain_store()
    driver = StreamDriver(model_of(family), store, memory_bytes=32 << 20)
    sizes = sorted({one.position for one in below.objects() if one.position})
    for name, result in lived.results.items():
        for index, completion in enumerate(result.completions):
            whole = result.prompt_token_ids + completion.token_ids
            ends = [size for size in sizes if size <= len(whole)]
            driver.cache.reset()
            driver.add(f"{name}.{index}", [*whole, 5], replace(GREEDY, max_tokens=1), breakpoints=ends)
            driver.run()
            driver.add(f"{name}.{index} to the token", whole[:-1], replace(GREEDY, max_tokens=1))
            driver.run()
    for length, seed in ((80, 0), (80, 1)):
        driver.cache.reset()
        ends = [size for size in sizes if size <= length]
        driver.add(f"filled {seed}", prompt(length, seed), BRIEF, breakpoints=ends)
        driver.run()
    driver.drain()
    driver.runner.close()
    assert contents(store)
    return store
