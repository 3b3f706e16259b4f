"""A restart finds what it can use, whatever its memory, and never what it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridkv.cache import Role
from hybridkv.errors import PlanError
from hybridkv.store.blob_store import BlobStore
from tests.devices import DEVICES
from tests.engine.drive import GREEDY, check_greedy, memory_for
from tests.engine.zoo import FAMILIES, prompt
from tests.stream.drive import StreamDriver, filled, model_of, plain_store
from tests.stream.faults import check_same, contents, copy_of
from tests.stream.test_faults import MIXED, MODES, SHARED, STORED

BRIEF = replace(GREEDY, max_tokens=2)
STATEFUL = ["mamba2", "falcon_h1", "qwen3_5_moe", "kimi_linear"]


def cached_by(driver: StreamDriver, tokens: list[int] = SHARED, **options: Any) -> int:
    driver.add("a", tokens + prompt(9, 2), BRIEF, **options)
    cached = driver.run()["a"].cached_tokens
    check_greedy(driver, "a")
    driver.close()
    return cached


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_resumes_from_a_store(family: str, mode: str, device: str) -> None:
    assert cached_by(StreamDriver(model_of(family), copy_of(filled(family, STORED)), mode, device=device)) == 80


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MIXED)
def test_memory_has_the_first_blocks_of_an_object_already(family: str, mode: str) -> None:
    """They are read past: each of several, and the object is whole all the same."""
    below = plain_store()
    spans: dict[str, Any] = {"streamer_options": {"stretch_tokens": 128}}
    first = StreamDriver(model_of(family), below, **spans)
    first.add("a", SHARED, BRIEF)
    first.run()
    first.settle()
    driver = StreamDriver(model_of(family), copy_of(below), mode, **spans)
    first.close()
    driver.add("its beginning", SHARED[:60], BRIEF)
    driver.run()
    assert cached_by(driver) == 80
    assert driver.stats.loaded_tokens == 80 - 48
    assert not driver.stats.failures


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "kimi_linear", "gemma3"])
def test_blocks_that_memory_has_without_their_state_are_not_read_again(family: str, mode: str) -> None:
    """Only the state is, and window tails that are not in idle memory; the store need not even have the blocks."""
    below = copy_of(filled(family, STORED))
    driver = StreamDriver(model_of(family), below, mode)
    driver.add("first", SHARED, BRIEF)
    driver.run()
    lose_checkpoints(driver)
    full = [stored.name for stored in below.objects() if stored.name.group in ("full", "latent")]
    below.delete(full)
    before = driver.stats.loaded_bytes
    driver.add("again", SHARED[:85] + prompt(9, 2), BRIEF)
    driver.run()
    check_greedy(driver, "again")
    assert driver.results["again"].cached_tokens == 80
    assert not driver.stats.failures
    catalogue = driver.streamer.catalogue
    states = sum(group.nbytes(1) for group in catalogue.state_groups)
    tails = sum(
        group.nbytes(catalogue.num_tokens(group, end))
        for group in catalogue.token_groups
        for end in catalogue.ends(group, 0, 80)
        if group.role is Role.LOCAL
    )
    assert driver.stats.loaded_bytes - before == (0 if driver.layout.keeps_idle_windows else states + tails)
    driver.close()


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_the_last_block_of_a_reply_is_needed_even_if_memory_has_the_whole_block(family: str) -> None:
    """Memory supplies whole blocks. The reply's end is evicted from the store, so the prompt resumes before it."""
    below = plain_store()
    first = StreamDriver(model_of(family), below)
    first.add("a", SHARED, replace(GREEDY, max_tokens=8))
    talk = SHARED + first.run()["a"].token_ids[:7]
    first.settle()
    driver = StreamDriver(model_of(family), copy_of(below))
    first.close()
    driver.store.delete([one.name for one in driver.store.objects(group="full") if one.position == 97])
    driver.add("b", talk + prompt(40, 5), BRIEF)
    driver.run()
    lose_checkpoints(driver)
    driver.add("c", talk + prompt(40, 5)[:20] + prompt(9, 6), BRIEF)
    driver.run()
    check_greedy(driver, "c")
    assert driver.results["c"].cached_tokens >= 80
    assert not driver.stats.failures
    driver.close()


def lose_checkpoints(driver: StreamDriver) -> None:
    """What eviction does when states are worth less than KV."""
    prefixes = driver.cache._prefixes
    for node in prefixes.all_nodes([]):
        for checkpoint in list(node.checkpoints):
            prefixes.drop_checkpoint(checkpoint)
        prefixes.tidy(node)
    driver.cache.check_integrity()


def cut_memory(family: str) -> int:
    """An arena so small that a state takes several pages."""
    for memory_bytes in range(1 << 15, 1 << 20, 1 << 13):
        try:
            driver = StreamDriver(model_of(family), plain_store(), memory_bytes=memory_bytes)
        except PlanError:
            continue
        fits = driver.memory.plan.max_requests(140) >= 1
        cut = all(group.pages_per_state > 1 for group in driver.layout.state_groups)
        driver.close()
        if fits and cut:
            return memory_bytes
    raise AssertionError("no arena cuts states")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MIXED)
def test_other_memory_finds_its_objects(family: str, mode: str) -> None:
    for memory_bytes in (memory_for(model_of(family), 2, 140, row_layers=1), 64 << 20):
        store = copy_of(filled(family, STORED))
        assert cached_by(StreamDriver(model_of(family), store, mode, memory_bytes=memory_bytes)) == 80


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", STATEFUL)
def test_states_cut_into_pages_find_objects_of_whole_states(family: str, mode: str) -> None:
    store = copy_of(filled(family, STORED))
    assert cached_by(StreamDriver(model_of(family), store, mode, memory_bytes=cut_memory(family))) == 80


@pytest.mark.parametrize("family", STATEFUL)
def test_states_cut_into_pages_leave_objects_of_whole_states(family: str) -> None:
    below = plain_store()
    small = StreamDriver(model_of(family), below, memory_bytes=cut_memory(family))
    small.add("a", SHARED, BRIEF)
    small.run()
    small.settle()
    check_same(below, filled(family, STORED))
    large = StreamDriver(model_of(family), copy_of(below))
    small.close()
    assert cached_by(large) == 80


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("options", [{"row_layers": 2}, {"attn_pack_size": 1}, {"row_order": "tkhl"}])
def test_another_plan_finds_and_leaves_the_same_objects(family: str, options: dict[str, Any], device: str) -> None:
    store = copy_of(filled(family, STORED))
    assert cached_by(StreamDriver(model_of(family), store, device=device, **options)) == 80
    below = plain_store()
    other = StreamDriver(model_of(family), below, device=device, **options)
    other.add(STORED, SHARED, BRIEF)
    other.run()
    other.settle()
    assert contents(below).keys() == contents(filled(family, STORED)).keys()
    check_same(below, filled(family, STORED))
    other.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "qwen3_next"])
def test_another_block_size_finds_nothing_and_harms_nothing(family: str) -> None:
    below = copy_of(filled(family, STORED))
    before = {one.name for one in below.objects()}
    driver = StreamDriver(model_of(family), below, block_tokens=8)
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    assert driver.run()["a"].cached_tokens == 0
    check_greedy(driver, "a")
    driver.settle()
    assert not driver.stats.failures
    assert before <= {one.name for one in below.objects()}
    again = StreamDriver(model_of(family), copy_of(below))
    driver.close()
    assert cached_by(again) >= 80


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MIXED)
def test_the_next_turn_after_a_restart_resumes_where_a_running_engine_would(
    family: str, mode: str, device: str
) -> None:
    """At the token where the reply ended, turn by turn."""
    below = plain_store()
    running = StreamDriver(model_of(family), below, device=device)
    tokens = prompt(75, 1)
    for turn, length in enumerate((7, 12, 30)):
        name = str(turn)
        running.add(name, tokens, replace(GREEDY, max_tokens=length))
        running.run()
        running.settle()
        reply = running.results[name].completions[0].token_ids
        tokens = [*tokens, *reply, *prompt(21, 2 + turn)]
        end = len(tokens) - 22  # the last token of a reply is sampled, not computed
        restarted = StreamDriver(model_of(family), copy_of(below), mode, device=device)
        restarted.add("next", tokens, BRIEF)
        restarted.run()
        check_greedy(restarted, "next")
        assert restarted.results["next"].cached_tokens == end
        assert not restarted.stats.failures
        restarted.close()
        running.add("same", tokens, BRIEF)
        running.run()
        assert running.results.pop("same").cached_tokens == end
        running.cache.reset()
    running.close()


@pytest.mark.parametrize("family", MIXED)
def test_other_weights_find_nothing(family: str) -> None:
    store = copy_of(filled(family, STORED))
    driver = StreamDriver(model_of(family), store, identity="other weights")
    assert cached_by(driver) == 0
    assert not driver.stats.found


@pytest.mark.parametrize("options", [{"salt": "tenant"}, {"extra_keys": ["adapter"]}])
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_another_salt_or_adapter_finds_nothing(family: str, options: dict[str, Any]) -> None:
    below = copy_of(filled(family, STORED))
    assert cached_by(StreamDriver(model_of(family), below), **options) == 0
    below = plain_store()
    first = StreamDriver(model_of(family), below)
    first.add("a", SHARED, BRIEF, **options)
    first.run()
    first.settle()
    assert cached_by(StreamDriver(model_of(family), copy_of(below)), **options) == 80
    assert cached_by(StreamDriver(model_of(family), copy_of(below))) == 0
    first.close()


def test_objects_of_other_spans_are_not_found() -> None:
    store = copy_of(filled("llama", STORED))
    driver = StreamDriver(model_of("llama"), store, streamer_options={"stretch_tokens": 64})
    assert cached_by(driver) == 0
    assert not driver.stats.found


def test_an_object_under_a_wrong_name_is_no_object() -> None:
    """Rows of other lengths than the name promises: an object of another program, or of a bug."""
    below: BlobStore = copy_of(filled("llama", STORED))
    driver = StreamDriver(model_of("llama"), below)
    for stored in list(below.objects()):
        below.delete([stored.name])
        with below.create(stored.name, [64], value=1.0, position=1) as writer:  # type: ignore[union-attr]
            writer.write(0, [memoryview(bytes(64))])
            writer.commit()
    driver.add("a", SHARED + prompt(9, 2), BRIEF)
    driver.run()
    check_greedy(driver, "a")
    assert driver.stats.failures == {"corrupt": 1}
    driver.close()
