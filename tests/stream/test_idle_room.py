"""Idle room of a store in memory is filled with states: requests resume from them, and nothing else pays for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cache import Kind
from hybridkv.store import FileStore, Guarded, MemoryStore, Store, Tier, TieredStore
from hybridkv.store.eviction import spare_limit
from hybridkv.stream import Catalogue, DumpPoint, DumpRule, Progress
from tests.engine.drive import GREEDY, check_greedy, memory_for
from tests.engine.zoo import prompt
from tests.store.faulty import Fault, FaultyStore
from tests.store.faulty import Kind as FaultKind
from tests.stream.drive import STRETCH_TOKENS, StreamDriver, model_of, plain_store

BRIEF = replace(GREEDY, max_tokens=2)
FAMILIES = ["mamba2", "falcon_h1", "qwen3_next", "kimi_linear"]
LENGTH = 250
FILL = 48
"""Every other one ends inside a stretch, as likely places do."""


def serve(driver: StreamDriver, name: str, tokens: list[int]) -> int:
    """Number of prompt tokens that were not computed."""
    driver.add(name, tokens, BRIEF)
    driver.run()
    check_greedy(driver, name)
    driver.settle()
    return driver.results[name].cached_tokens


def spare_ends(store: Store) -> set[int | None]:
    return {stored.position for stored in store.objects() if stored.is_spare}


@pytest.mark.parametrize("mode", ["async", "layerwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_resumes_from_what_filled_the_store(family: str, mode: str) -> None:
    store = plain_store()
    driver = StreamDriver(model_of(family), store, mode, fill_tokens=FILL)
    tokens = prompt(LENGTH, 1)
    serve(driver, "a", tokens)
    assert spare_ends(store) == {48, 144}, "192 ends a stretch, 240 is the prompt's end"
    spare = store.stats.spare_bytes
    assert spare > 0
    driver.cache.reset()
    assert serve(driver, "b", tokens[:190] + prompt(20, 2)) == 144
    assert driver.stats.loads[mode] == 1
    assert 144 not in spare_ends(store), "it was used: a normal object from now on"
    driver.close()


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_full_memory_lends_the_pages_for_it(family: str) -> None:
    """The memory is too small for two prompts. The store gets the states all the same, and ends are not evicted."""
    model, store = model_of(family), plain_store()
    memory = memory_for(model, 2, LENGTH + 8, row_layers=1)
    driver = StreamDriver(model, store, fill_tokens=18, memory_bytes=memory)  # 144 for the store
    prompts = [prompt(LENGTH, seed) for seed in range(6)]
    for number, tokens in enumerate(prompts):
        serve(driver, f"a{number}", tokens)
    driver.cache.check_integrity()
    hits = [serve(driver, f"b{number}", tokens[:200] + prompt(9, number)) for number, tokens in enumerate(prompts)]
    without = StreamDriver(model, MemoryStore(64 << 20), memory_bytes=memory)
    for number, tokens in enumerate(prompts):
        serve(without, f"a{number}", tokens)
    plain = [serve(without, f"b{number}", tokens[:200] + prompt(9, number)) for number, tokens in enumerate(prompts)]
    assert sum(hits) > sum(plain)
    driver.close()
    without.close()


def test_requests_begin_with_the_idle_room_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StreamDriver(model_of("falcon_h1"), plain_store(), fill_tokens=FILL)
    begun, begin = list[int](), driver.cache.begin

    def noted(*arguments: Any, store_room: int = 0, **options: Any) -> Any:
        begun.append(store_room)
        return begin(*arguments, store_room=store_room, **options)

    monkeypatch.setattr(driver.cache, "begin", noted)
    room = driver.streamer.num_idle_checkpoints
    serve(driver, "a", prompt(LENGTH, 1))
    assert begun == [room]
    assert 0 < driver.streamer.num_idle_checkpoints < room
    serve(driver, "b", prompt(LENGTH, 2))
    assert begun[1] < room
    driver.close()


def test_a_store_without_idle_room_gets_no_more_than_before(tmp_path: Path) -> None:
    """Disks are not filled, and neither is a store whose objects all have a value."""
    model, tokens = model_of("falcon_h1"), prompt(LENGTH, 1)
    disk = FileStore(tmp_path, 64 << 20)
    driver = StreamDriver(model, disk, fill_tokens=FILL)
    serve(driver, "a", tokens)
    plain = {(one.name.group, one.position) for one in disk.objects(headers=True)}
    driver.close()
    store = MemoryStore(disk_bytes(tokens))
    driver = StreamDriver(model, store, fill_tokens=FILL)
    serve(driver, "a", tokens)
    assert {(one.name.group, one.position) for one in store.objects() if not one.is_spare} == plain
    driver.close()


def test_nothing_is_copied_for_a_store_without_idle_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory has idle room, and is filled. To copy these states for nothing would cost time."""
    driver = StreamDriver(model_of("falcon_h1"), FileStore(tmp_path, 64 << 20), fill_tokens=FILL)
    begun = begun_by(driver, monkeypatch)
    serve(driver, "a", prompt(LENGTH, 1))
    assert begun
    assert not any(is_spare for is_spare, _ in begun)
    driver.close()


def test_blocks_of_whole_stretches_are_never_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.stream.dump_rule._SPARE_STRETCHES", 1)
    store = plain_store()
    driver = StreamDriver(model_of("falcon_h1"), store, fill_tokens=STRETCH_TOKENS)
    serve(driver, "a", prompt(LENGTH, 1))
    states = {group.name for group in driver.streamer.catalogue.state_groups}
    spare = [stored for stored in store.objects() if stored.is_spare]
    assert {stored.position for stored in spare} == set(range(32, 224, 32))
    assert {stored.name.group for stored in spare} == states
    driver.close()


def begun_by(driver: StreamDriver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Pairs for the objects that the dumper is asked to write from now on: is it spare, and is it written?"""
    dumper: Any = driver.streamer.mover._dumper
    begun: list[tuple[bool, bool]] = []
    begin = dumper.begin

    def noted(outgoing: Any) -> bool:
        begun.append((outgoing.is_spare, begin(outgoing)))
        return begun[-1][1]

    monkeypatch.setattr(dumper, "begin", noted)
    return begun


def disk_bytes(tokens: list[int]) -> int:
    """Bytes of what is stored of a prompt without spare objects."""
    store = plain_store()
    driver = StreamDriver(model_of("falcon_h1"), store, fill_tokens=100_000)
    serve(driver, "a", tokens)
    nbytes = store.stats.nbytes
    assert store.stats.spare_bytes == 0
    driver.close()
    return nbytes


def test_the_fastest_tier_is_filled_and_no_other(tmp_path: Path) -> None:
    above, below = MemoryStore(64 << 20), FileStore(tmp_path, 64 << 20)
    store = TieredStore([Tier(Guarded(above)), Tier(Guarded(below))])
    driver = StreamDriver(model_of("falcon_h1"), Guarded(store), fill_tokens=FILL)
    serve(driver, "a", prompt(LENGTH, 1))
    states = {one.position for one in below.objects(headers=True) if one.name.group == "state"}
    assert spare_ends(above) == {48, 144}
    assert not states & {48, 144}
    driver.close()


def test_spare_objects_have_a_queue_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = plain_store()
    driver = StreamDriver(model_of("falcon_h1"), store, fill_tokens=FILL)
    dumper: Any = driver.streamer.mover._dumper
    begun = begun_by(driver, monkeypatch)
    smallest = min(group.nbytes(1) for group in driver.streamer.catalogue.state_groups)
    dumper._max_waiting_bytes = 2 * smallest - 2
    monkeypatch.setattr("hybridkv.stream.dump._SPARE_SHARE", 1 << 30)
    serve(driver, "a", prompt(LENGTH, 1))
    assert (True, False) in begun
    assert (True, True) not in begun
    assert store.stats.spare_bytes == 0
    assert driver.stats.dumps_dropped == begun.count((False, False)), "spare objects are not missed"
    begun.clear()
    dumper._max_waiting_bytes = 64 << 20
    serve(driver, "b", prompt(LENGTH, 2))
    whole = begun.copy()
    assert (True, True) in whole
    begun.clear()
    monkeypatch.setattr("hybridkv.stream.dump._SPARE_SHARE", 1)
    dumper._max_waiting_bytes = driver.streamer.catalogue.load_bytes(0, LENGTH)  # but not with all the states
    serve(driver, "c", prompt(LENGTH, 3))
    assert begun == whole, "neither kind takes the room of the other"
    begun.clear()
    dumper._max_waiting_bytes = 0
    serve(driver, "d", prompt(LENGTH, 4))
    assert {*begun} == {(True, True), (False, False)}, "a large store takes more at a time"
    driver.close()


def test_a_prompt_that_ends_where_a_spare_state_is_being_written_is_stored(tmp_path: Path) -> None:
    """In all tiers, as a normal object: the spare one that is under way is no reason to leave it out."""
    above, below = MemoryStore(64 << 20), FileStore(tmp_path, 64 << 20)
    slow = FaultyStore(above, [fault := Fault(FaultKind.SLOW_WRITE)])
    driver = StreamDriver(model_of("falcon_h1"), TieredStore([Tier(slow), Tier(below)]), fill_tokens=FILL)
    tokens = prompt(LENGTH, 1)
    driver.add("a", tokens, BRIEF)
    driver.run()
    driver.cache.reset()
    driver.add("b", tokens[:145], BRIEF)
    driver.run()
    fault.release.set()
    slow.faults.clear()
    driver.settle()
    for store in (above, below):
        found = [one for one in store.objects(headers=True) if one.position == 144]
        assert {one.name.group for one in found} >= {group.name for group in driver.streamer.catalogue.state_groups}
        assert not any(one.is_spare for one in found)
    driver.close()


def test_the_rule() -> None:
    driver = StreamDriver(model_of("falcon_h1"), plain_store())
    catalogue = driver.streamer.catalogue
    wanted = {40: Kind.FILL, 48: Kind.BRANCH, 64: Kind.FILL, 80: Kind.GRID, 112: Kind.FILL, 144: Kind.FILL}
    wanted |= dict.fromkeys((96, 256, 480, 512), Kind.FILL)
    points = DumpRule(catalogue).of_step(Progress(32, 128, 120, [66], wanted))
    assert points == [
        DumpPoint(40, True, True),
        DumpPoint(48, True),
        DumpPoint(64, True),  # a breakpoint, rounded down
        DumpPoint(80, True),
        DumpPoint(96, False),
        DumpPoint(112, True),  # the prompt's end
        DumpPoint(128, False),
    ]
    points = DumpRule(catalogue).of_step(Progress(128, 600, 700, (), wanted))
    assert [point.end for point in points if point.is_spare] == [144, 512], "the grid is sparse in stores"
    moved = dict.fromkeys((560, 576, 1008, 1024, 1072, 1088, 1104), Kind.FILL)
    for start, end, spare in ((520, 576, []), (960, 1024, [1008, 1024]), (1056, 1088, []), (1088, 1120, [1104])):
        points = DumpRule(catalogue).of_step(Progress(start, end, 2000, (), moved))
        assert [point.end for point in points if point.is_spare] == spare, "a block before the end of a step"
    driver.close()
    windows = StreamDriver(model_of("gemma3"), plain_store())
    points = DumpRule(windows.streamer.catalogue).of_step(Progress(32, 80, 120, (), wanted))
    assert [point for point in points if point.is_spare] == [], "their stretches suffice"
    assert windows.streamer.num_idle_checkpoints == 0
    windows.close()


def test_the_ends_of_steps_make_the_grid_no_denser() -> None:
    """A checkpoint at the end of a step is kept a block before it, where no stretch ends."""
    store = plain_store()
    driver = StreamDriver(model_of("falcon_h1"), store, fill_tokens=2 * STRETCH_TOKENS, max_num_batched_tokens=64)
    serve(driver, "a", prompt(400, 1))
    assert spare_ends(store) == set()
    driver.close()


def test_idle_room_is_counted_in_checkpoints() -> None:
    store = MemoryStore(10 << 20)
    driver = StreamDriver(model_of("falcon_h1"), store)
    catalogue: Catalogue = driver.streamer.catalogue
    assert catalogue.stretch_blocks * catalogue.block_tokens == STRETCH_TOKENS
    assert driver.streamer.num_idle_checkpoints == spare_limit(10 << 20) // catalogue.state_bytes
    driver.close()
