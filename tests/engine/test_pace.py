"""Prompts share a step while that saves time, and no longer."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import pytest

from hybridkv.engine.pace import Pace
from tests.engine.drive import GREEDY, Driver
from tests.engine.zoo import build, prompt


def observed(step_s: float, token_s: float) -> Pace:
    pace = Pace()
    for num_tokens in (300, 1, 2, 128, 3, 700):
        pace.observe(num_tokens, step_s + token_s * num_tokens)
    return pace


def test_nothing_is_held_back_before_both_kinds_of_steps_were_seen() -> None:
    pace = Pace()
    assert pace.enough_tokens == sys.maxsize
    pace.observe(1, 0.05)
    pace.observe(17, 0.1)  # neither short nor long
    pace.observe(127, 0.5)
    assert pace.enough_tokens == sys.maxsize
    pace.observe(128, 0.6)
    assert pace.enough_tokens < sys.maxsize


@pytest.mark.parametrize(("step_s", "token_s", "least", "most"), [
    (0.060, 0.0038, 64, 80),  # a slow CPU: tokens are what costs
    (0.035, 0.00015, 900, 1000),  # a fast one: steps
    (0.040, 0.000005, 30_000, 40_000),  # a GPU: more than any step has
    (0.001, 0.0100, 64, 64),  # never less than this
])  # fmt: skip
def test_enough_is_when_tokens_take_four_times_what_a_step_does(
    step_s: float, token_s: float, least: int, most: int
) -> None:
    pace = observed(step_s, token_s)
    assert least <= pace.enough_tokens <= most
    assert pace.most_tokens == 4 * pace.enough_tokens


def test_single_slow_steps_do_not_matter() -> None:
    pace = observed(0.06, 0.0038)
    usual = pace.enough_tokens
    pace.observe(1, 20.0)  # it compiled something
    pace.observe(512, 40.0)
    assert pace.enough_tokens == pytest.approx(usual, rel=0.2)


def test_no_limit_where_more_tokens_take_no_longer() -> None:
    for token_s in (0.0, -0.00001):
        assert observed(0.06, token_s).enough_tokens >= sys.maxsize
        assert observed(0.06, token_s).most_tokens >= sys.maxsize


def test_further_prompts_wait_for_the_next_step_once_it_is_long_enough() -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=200)
    driver.core.scheduler.pace.enough_tokens = 50
    for index, length in enumerate((30, 30, 30, 120, 10)):
        driver.add(str(index), prompt(length, index))
    lengths = []
    for _ in range(4):
        driver.step()
        lengths.append([len(work.tokens) for work in driver.runner.work])
    assert lengths == [[30, 30], [1, 1, 30, 120], [1, 1, 1, 1, 10], [1, 1, 1, 1, 1]]
    driver.run()


def test_a_prompt_longer_than_enough_takes_what_the_budget_has() -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=100)
    driver.core.scheduler.pace.enough_tokens = 20
    driver.add("long", prompt(150, 1))
    driver.add("short", prompt(10, 2))
    driver.step()
    assert [len(work.tokens) for work in driver.runner.work] == [100]
    driver.step()
    assert [len(work.tokens) for work in driver.runner.work] == [50]
    driver.step()
    assert [len(work.tokens) for work in driver.runner.work] == [1, 10]
    driver.run()


def test_a_prompt_is_cut_shorter_while_others_decode() -> None:
    driver = Driver(build("qwen3_next"), max_num_batched_tokens=200)
    driver.core.scheduler.pace.enough_tokens, driver.core.scheduler.pace.most_tokens = 20, 60
    driver.add("quick", prompt(10, 1), replace(GREEDY, max_tokens=3))
    driver.add("long", prompt(300, 2))
    lengths = []
    for _ in range(4):
        driver.step()
        lengths.append([len(work.tokens) for work in driver.runner.work])
    assert lengths == [[10, 190], [1, 60], [1, 50], [1]]
    driver.run()


def test_steps_are_watched() -> None:
    driver = Driver(build("llama"), max_num_batched_tokens=200)
    with patch.object(driver.core.scheduler.pace, "observe") as observe:
        driver.add("one", prompt(140, 1))
        driver.run()
    assert [call.args[0] for call in observe.call_args_list] == [140] + [1] * 7
    assert all(0 < call.args[1] < 60 for call in observe.call_args_list)
