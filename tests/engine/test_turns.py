"""Clients side by side: who starts next, counted in steps of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.drive import GREEDY, Driver, memory_for
from tests.engine.zoo import build, prompt

NUM_PROMPTS = N = 128


def driver_with_a_big_client(**options: object) -> Driver:
    """16,384 samples of one client wait, and 16 can run."""
    driver = Driver(build("qwen3_next"), max_num_seqs=16, **options)  # type: ignore[arg-type]
    params = replace(GREEDY, n=N, max_tokens=6)
    for number in range(NUM_PROMPTS):
        driver.add(f"big {number}", prompt(6, number), params, client="big")
    return driver


def drop_big(driver: Driver) -> None:
    for number in range(NUM_PROMPTS):
        driver.core.abort(f"big {number}")


def running(driver: Driver) -> list[str]:
    return [sample.request.id for sample in driver.core.scheduler.running]


@pytest.mark.parametrize("decodes", ["", "packed"])
@pytest.mark.parametrize("moment", [1, 2, 4, 7])
def test_a_small_request_beside_a_big_one_starts_within_two_steps_of_a_free_slot(moment: int, decodes: str) -> None:
    driver = driver_with_a_big_client(decodes=decodes)
    for _ in range(moment):
        driver.step()
    driver.add("small", prompt(5, 900), client="small")
    while len(running(driver)) == 16 and not any(update.finish_reason for update in driver.step()):
        pass
    begin = driver.core.steps
    while "small" not in running(driver):
        driver.step()
        assert driver.core.steps - begin <= 2
    drop_big(driver)
    assert len(driver.run()["small"].token_ids) == 8


def test_siblings_leave_a_place_to_those_whose_turn_it_is() -> None:
    """The first prompt fills the step, and its siblings could fill all places at its end."""
    driver = Driver(build("llama"), max_num_batched_tokens=32, max_num_seqs=8)
    driver.add("many", prompt(32, 1), replace(GREEDY, n=20, temperature=1.0), client="a")
    for client in "bc":
        driver.add(client, prompt(4, ord(client)), client=client)
    driver.add("own", prompt(4, 2), client="a")
    driver.step()
    assert running(driver) == ["many"] * 6
    driver.step()
    assert running(driver) == ["many"] * 6 + ["b", "c"]
    driver.run()


def test_siblings_that_start_with_their_prompt_are_as_old_as_it() -> None:
    """So they are preempted after requests that started later."""
    driver = Driver(build("llama"))
    driver.add("many", prompt(6, 1), replace(GREEDY, n=3))
    driver.add("later", prompt(6, 2))
    driver.step()
    assert running(driver) == ["many"] * 3 + ["later"]
    driver.run()


def test_an_aborted_request_makes_way_at_once() -> None:
    driver = driver_with_a_big_client(max_num_batched_tokens=16)  # a step ends in the middle of a prompt
    scheduler = driver.core.scheduler
    assert scheduler.num_waiting == NUM_PROMPTS * N
    for _ in range(3):
        driver.step()
        assert scheduler.num_waiting + len(running(driver)) == NUM_PROMPTS * N
    driver.add("small", prompt(5, 900), client="small")
    drop_big(driver)
    assert ([one.request.id for one in scheduler.waiting], scheduler.num_waiting) == (["small"], 1)
    driver.step()
    assert running(driver) == ["small"]


def test_a_preempted_sample_goes_on_before_any_that_has_not_run() -> None:
    """It is preempted only for those that started before it, though many that came before it start after it."""
    model = build("qwen3_next")
    driver = Driver(model, memory_bytes=memory_for(model, 2, 100), max_num_batched_tokens=64)
    params = replace(GREEDY, max_tokens=39)
    for number in range(10):
        driver.add(f"big {number}", prompt(60, number), params, client="big")
    for _ in range(3):
        driver.step()
    driver.add("small", prompt(60, 99), params, client="small")
    order: list[str] = []
    ended: list[str] = []
    while "small" not in driver.results:
        ended += [update.request_id for update in driver.step() if update.finish_reason]
        order += [name for name in running(driver) if name not in order]
    assert driver.results["small"].metrics.preemptions
    assert set(ended) == set(order[: order.index("small") + 1]), "those that started later end later"
    drop_big(driver)
