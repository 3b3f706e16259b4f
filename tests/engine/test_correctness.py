"""Every family, every path a token can take: each logit is that of the stock model run alone in float32.

`Driver` compares every token of every step and recounts the cache's books after each.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest

from hybridkv.engine.sampling.params import SamplingParams
from tests.devices import DECODES, DEVICE, DEVICES
from tests.engine.drive import GREEDY, NOT_CAPTURED, Driver, check_greedy, memory_for
from tests.engine.zoo import FAMILIES, build, prompt

HAVE_STATES = [name for name, family in FAMILIES.items() if family.recurrent or family.conv]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def ends_well(driver: Driver) -> dict[str, int]:
    """Run to the end, check greedy tokens, give everything back; returns cached tokens by request."""
    results = driver.run()
    for name in results:
        check_greedy(driver, name)
    driver.cache.reset()
    driver.cache.check_integrity()
    assert not any(driver.cache.pages_in_use().values())
    return {name: result.cached_tokens for name, result in results.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_requests_with_chunked_prefill_beside_decodes(family: str, device: str) -> None:
    driver = Driver(build(family), max_num_batched_tokens=48, device=device)
    driver.add("long", prompt(150, 1))
    driver.add("short", prompt(5, 2), replace(GREEDY, max_tokens=30))
    for _ in range(2):
        driver.step()
    driver.add("middle", prompt(61, 3))
    driver.add("one", prompt(1, 4))
    ends_well(driver)
    assert all(len(result.token_ids) in (8, 30) for result in driver.results.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_sent_again_and_a_conversation_that_goes_on(family: str, device: str) -> None:
    driver = Driver(build(family), device=device)
    driver.add("first", prompt(100, 1))
    first = driver.run()["first"]
    driver.add("again", prompt(100, 1))
    said = first.prompt_token_ids + first.token_ids
    driver.add("next turn", said + prompt(30, 2))
    cached = ends_well(driver)
    assert cached["again"] == 96
    assert cached["next turn"] == len(said) - 1  # the last token was sampled, never fed


@pytest.mark.parametrize("family", FAMILIES)
def test_breakpoints_inside_a_prefill_and_siblings(family: str, device: str) -> None:
    shared = prompt(70, 1)
    driver = Driver(build(family), max_num_batched_tokens=256, device=device)
    driver.add("first", shared + prompt(40, 2), breakpoints=[33, 64])
    driver.run()
    driver.add("second", shared + prompt(40, 3))
    driver.add("other", shared[:40] + prompt(20, 4))
    cached = ends_well(driver)
    assert cached["second"] == 64
    assert cached["other"] == 32


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama4"])
def test_prompts_leave_another_one_at_any_block(family: str, device: str) -> None:
    """Blocks that have slid out of a window or a chunk are still in idle memory."""
    driver = Driver(build(family), device=device)
    shared, size = prompt(150, 1), driver.cache.block_tokens
    driver.add("first", shared)
    driver.run()
    for index, length in enumerate((133, 33, 70)):
        driver.add(str(index), shared[:length] + prompt(30, 2 + index))
        assert driver.run()[str(index)].cached_tokens == length // size * size
    ends_well(driver)


@pytest.mark.parametrize("family", FAMILIES)
def test_siblings_at_once_compute_their_prefix_once(family: str, device: str) -> None:
    shared = prompt(64, 1)
    driver = Driver(build(family), max_num_batched_tokens=512, device=device)
    for index in range(8):
        driver.add(str(index), shared + prompt(20, 10 + index), replace(GREEDY, max_tokens=2))
    driver.run()
    assert driver.core.computed_tokens == 64 + 8 * 20 + 8
    assert sorted(ends_well(driver).values()) == [0] + [64] * 7


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_eviction_and_compaction_in_a_tiny_arena(family: str, device: str) -> None:
    model = build(family)
    driver = Driver(model, memory_bytes=memory_for(model, 2, 140), max_num_batched_tokens=40, device=device)
    for index in range(6):
        driver.add(str(index), prompt(60 + 7 * index, index % 4), replace(GREEDY, max_tokens=34))
    for _ in range(30):
        driver.step()
    for index in range(6, 9):
        driver.add(str(index), prompt(90, index), replace(GREEDY, max_tokens=20))
    ends_well(driver)
    assert driver.core.scheduler.preempted or driver.cache.stats.blocks_evicted


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_part_after_the_prompt(family: str, device: str) -> None:
    driver = Driver(build(family), device=device)
    driver.add("n", prompt(45, 1), SamplingParams(n=4, temperature=1.5, max_tokens=20, ignore_eos=True, seed=7))
    driver.add("beside", prompt(20, 2))
    result = driver.run()["n"]
    assert len({tuple(one.token_ids) for one in result.completions}) == 4
    assert driver.core.computed_tokens == 45 + 4 * 19 + 20 + 7
    driver.cache.reset()
    assert not any(driver.cache.pages_in_use().values())


@pytest.mark.parametrize("decodes", DECODES)
@pytest.mark.parametrize("seed", range(int(os.environ.get("HYBRIDKV_LIVES", "1"))))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_life_of_requests(family: str, seed: int, decodes: str, device: str) -> None:
    """Arrivals, shared prefixes, aborts, samples, resets and step sizes at random, in an arena that is too small."""
    if decodes == "graphs" and device == "cpu":
        pytest.skip("Triton's interpreter is slow")
    if decodes == "packed" and device != DEVICE:
        pytest.skip("Triton interprets no kernels where there is a GPU")
    model = build(family)
    chance = random.Random(f"{family} {seed}")
    driver = Driver(
        model,
        memory_bytes=memory_for(model, 3, 120),
        max_num_batched_tokens=chance.choice([24, 40, 100]),
        block_tokens=chance.choice([8, 16]),
        device=device,
        decodes=decodes,
    )
    alive: list[str] = []
    for number in range(14):
        alive.append(str(number))
        driver.add(str(number), *random_request(chance, driver))
        for _ in range(chance.randrange(6)):
            driver.step()
        if chance.random() < 0.2:
            driver.abort(chance.choice(alive))
        if chance.random() < 0.1:
            driver.cache.reset()
    driver.run()
    assert len(driver.results) == 14
    if decodes != "graphs" or family not in NOT_CAPTURED:
        assert bool(driver.core.captured_steps) == bool(decodes)
    driver.cache.reset()
    driver.cache.check_integrity()
    assert not any(driver.cache.pages_in_use().values())


def random_request(chance: random.Random, driver: Driver) -> tuple[list[int], SamplingParams]:
    """A new prompt, one that begins like others, or the next turn of one that has ended."""
    kind = chance.random()
    if kind < 0.25 and driver.results:
        old = chance.choice(list(driver.results.values()))
        tokens = (old.prompt_token_ids + old.token_ids)[:80] + prompt(chance.randrange(1, 20), chance.randrange(99))
    elif kind < 0.7:
        tokens = prompt(80, chance.randrange(2))[: chance.randrange(10, 80)] + prompt(9, chance.randrange(99))
    else:
        tokens = prompt(chance.randrange(1, 90), chance.randrange(99))
    if chance.random() < 0.15:
        return tokens, SamplingParams(max_tokens=chance.randrange(1, 18), n=3, seed=0, ignore_eos=True)
    return tokens, replace(GREEDY, max_tokens=chance.randrange(1, 18))


@pytest.mark.parametrize("family", HAVE_STATES)
def test_states_cut_into_pages_give_the_same(family: str, device: str) -> None:
    """In a small arena with short rows a state takes several pages."""
    model: Any = build(family)
    for memory_bytes in (1 << 17, 1 << 18, 1 << 19, 1 << 20):
        try:
            driver = Driver(model, memory_bytes=memory_bytes, row_layers=1, max_num_batched_tokens=30, device=device)
        except ValueError:
            continue
        break
    driver.add("a", prompt(33, 1))
    driver.add("b", prompt(20, 2))
    ends_well(driver)


@pytest.mark.parametrize("pack", [1, 2, 4])
@pytest.mark.parametrize("row_order", ["hlkt", "ltkh", "tkhl"])
def test_any_pack_size_and_row_order(pack: int, row_order: str, device: str) -> None:
    driver = Driver(
        build("llama" if pack < 4 else "gemma3"),
        attn_pack_size=min(pack, 2) if pack < 4 else 1,
        row_order=row_order,
        device=device,
    )
    driver.add("a", prompt(75, 1))
    driver.run()
    driver.add("again", prompt(75, 1))
    assert ends_well(driver)["again"] == 64
