"""Hidden states: whatever path the tokens took, each row is that of the stock model run alone in float32."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridkv import Engine, SamplingParams
from hybridkv.engine.results import Completion
from hybridkv.engine.runner import find_decoder
from hybridkv.errors import RequestError
from tests.devices import DEVICES
from tests.engine.drive import GREEDY, Driver, check_greedy, memory_for
from tests.engine.zoo import FAMILIES, build, fresh, prompt

MIXED = ["llama", "gemma3", "falcon_h1", "kimi_linear", "mamba2"]
"""mamba2 has no attention: nothing but hidden states is stored in stretches of blocks."""
SAMPLES = int(os.environ.get("HYBRIDKV_SAMPLES", "100"))
PARTS = 4
Layers = tuple[int | str, ...]


def stock_states(model: Any, tokens: Sequence[int]) -> dict[int | str, torch.Tensor]:
    """What enters each layer of the stock model, what leaves the last, and what the norm makes of that.

    Families disagree on where their own `hidden_states` begin, and give the last only after the norm. But all that
    enters a layer behind the first is among them.
    """
    decoder, layers = find_decoder(model)
    states: dict[int | str, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, i=i: states.update({i: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        )
        for i, layer in enumerate(layers)
    ]
    hooks.append(layers[-1].register_forward_hook(lambda module, args, out: states.update({len(layers): _first(out)})))
    with torch.no_grad():
        found = decoder(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    for i in range(1, len(layers)):
        assert any(torch.equal(states[i], own) for own in found.hidden_states if own.shape == states[i].shape)
    states["final"] = found.last_hidden_state
    return {layer: (rows[0] if rows.dim() == 4 else rows)[0] for layer, rows in states.items()}


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


def check(model: Any, tokens: Sequence[int], layers: Layers, rows: torch.Tensor | None) -> None:
    assert rows is not None
    assert rows.shape[:2] == (len(tokens), len(layers))
    expected = stock_states(model, tokens)
    for index, layer in enumerate(layers):
        scale = float(expected[layer].square().mean().sqrt())
        error = float((rows[:, index] - expected[layer]).square().mean().sqrt())
        assert error <= 1e-5 * scale, f"layer {layer}: {error / scale:.1e}"


def check_all(driver: Driver) -> None:
    """Run to the end, and compare the rows of every request that asked for some."""
    asked = {name: request.params for name, request in driver.core._requests.items()}
    for name, result in driver.run().items():
        if name in asked and asked[name].hidden_layers:
            for completion in result.completions:
                check_one(driver, result.prompt_token_ids, completion, result.hidden_layers, asked[name])


def check_one(driver: Driver, prompt_ids: list[int], one: Completion, layers: Layers, params: SamplingParams) -> None:
    assert one.finish_reason in ("stop", "length")
    tokens = prompt_ids + (one.token_ids[:-1] if params.hidden_tokens == "all" else [])
    check(driver.model, tokens, layers, one.hidden_states)


def tapped(*layers: int | str, **options: Any) -> SamplingParams:
    return replace(GREEDY, hidden_layers=layers, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_beside_others(family: str, device: str) -> None:
    driver = Driver(build(family), max_num_batched_tokens=48, device=device)
    driver.add("long", prompt(150, 1), tapped(0, 1, -1, "final"))
    driver.add("plain", prompt(70, 2))
    driver.step()
    driver.add("reply", prompt(40, 3), tapped(1, hidden_tokens="all", max_tokens=20))
    driver.add("one", prompt(1, 4), tapped(-2, max_tokens=1, hidden_tokens="all"))
    check_all(driver)
    assert driver.results["plain"].hidden_states is None
    assert driver.results["long"].hidden_layers[-1] == "final"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_without_with_and_with_other_taps(family: str, device: str) -> None:
    driver = Driver(build(family), device=device)
    cached = {}
    for name, params in {
        "plain": GREEDY,
        "cold": tapped(1, -1),  # all KV is there, and no rows: computed again
        "warm": tapped(-1, 1),
        "one of them": tapped(1),
        "another": tapped(0, 1),
        "all three": tapped(0, 1, -1),
        "plain again": GREEDY,
    }.items():
        driver.add(name, prompt(100, 1), params)
        check_all(driver)
        cached[name] = driver.results[name].cached_tokens
    assert list(cached.values()) == [0, 0, 96, 96, 0, 96, 96]
    driver.add("longer", prompt(100, 1) + prompt(60, 2), tapped(0, 1, hidden_tokens="all"))
    check_all(driver)
    assert driver.results["longer"].cached_tokens == 96


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_and_forked(family: str, device: str) -> None:
    model = build(family)
    driver = Driver(model, memory_bytes=2 * memory_for(model, 2, 160), max_num_batched_tokens=64, device=device)
    for number in range(5):
        how = "all" if number % 2 else "prompt"
        driver.add(str(number), prompt(90 + number, number), tapped(0, -1, hidden_tokens=how, max_tokens=40))
    check_all(driver)
    for how in ("prompt", "all"):
        driver.add(f"forks {how}", prompt(50, 9), tapped(1, -1, n=3, hidden_tokens=how, temperature=1.0, seed=3))
    check_all(driver)
    assert {len(one.token_ids) for one in driver.results["forks all"].completions} == {8}
    driver.cache.reset()
    assert not any(driver.cache.pages_in_use().values())


@pytest.mark.parametrize("family", MIXED)
def test_a_failed_step_is_rolled_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(build(family), max_num_batched_tokens=48)
    driver.add("a", prompt(150, 1), tapped(0, -1, hidden_tokens="all"))
    driver.step()
    forward = driver.runner._forward

    def fails(*args: Any) -> torch.Tensor:
        forward(*args)
        monkeypatch.setattr(driver.runner, "_forward", forward)
        raise RuntimeError("once")

    monkeypatch.setattr(driver.runner, "_forward", fails)
    driver.core.step()
    check_all(driver)


@pytest.mark.parametrize("stream", ["async", "layerwise"])
@pytest.mark.parametrize("family", MIXED)
def test_rows_come_back_from_a_store(family: str, stream: str, tmp_path: Path) -> None:
    url, tokens = f"file://{tmp_path}?size=1GiB", prompt(400, 1)
    options: dict[str, Any] = {"memory": "64MiB", "device": "cpu", "store": url, "stream": stream}
    with Engine(fresh(family), **options) as engine:
        engine.generate(tokens, replace(GREEDY, max_tokens=1), progress=False)
        engine.flush_store()
        engine.reset_cache()
        [cold] = engine.generate(tokens, tapped(1, -1, "final"), progress=False)
        assert cold.cached_tokens == 0  # keys and values are stored, and no hidden states
    with Engine(fresh(family), **options) as engine:
        for layers in ((-1,), (1, -1, "final")):
            engine.reset_cache()
            [result] = engine.generate(tokens, tapped(*layers, hidden_tokens="all"), progress=False)
            assert result.cached_tokens >= 384
            check(build(family), tokens + result.token_ids[:-1], result.hidden_layers, result.hidden_states)
            engine.check_integrity()
        engine.reset_cache()
        [other] = engine.generate(tokens, tapped(0), progress=False)
        assert other.cached_tokens == 0
        check(build(family), tokens, other.hidden_layers, other.hidden_states)
        traffic = engine.stats().stream
        assert traffic is not None
        assert not traffic.failures  # what is not there is not asked for
        assert traffic.found == 2


@pytest.mark.parametrize("family", MIXED)
def test_plain_requests_see_no_change(family: str) -> None:
    """The same plain requests in a small arena: the same hits and evictions with taps as in a cache that has none."""
    model = build(family)
    memory = memory_for(model, 3, 160)
    alone = Driver(model, memory_bytes=memory, has_taps=False)
    beside = Driver(model, memory_bytes=memory)
    assert alone.layout.token_groups == beside.layout.token_groups
    assert alone.layout.num_slabs == beside.layout.num_slabs
    hits: list[list[int]] = [[], []]
    for number in range(12):
        shared = prompt(96, number % 3)
        for driver, found in zip((alone, beside), hits, strict=True):
            driver.add(str(number), shared + prompt(20, number))
            found.append(driver.run()[str(number)].cached_tokens)
        assert beside.cache.slabs_in_use() == alone.cache.slabs_in_use() | {"taps": 0}
    assert hits[0] == hits[1]
    assert beside.cache.stats.taps_evicted == 0


def test_taps_of_other_layers_on_ones_own_path_are_evicted() -> None:
    driver = Driver(build("llama"), memory_bytes=1 << 19)
    driver.add("many", prompt(392, 1), tapped(0, 1, 2, max_tokens=1))
    driver.run()
    driver.add("one", prompt(392, 1) + prompt(100, 2), tapped(0, hidden_tokens="all"))
    check_all(driver)
    assert driver.cache.stats.taps_evicted


@pytest.mark.parametrize("family", ["mamba2", "llama", "falcon_h1"])
def test_a_tap_joins_after_a_reply_that_ended_inside_a_block(family: str) -> None:
    """Its checkpoint has tokens of a partial block, and on models without token groups no page of them."""
    driver = Driver(build(family))
    driver.add("plain", prompt(40, 1), replace(GREEDY, max_tokens=5))
    talk = prompt(40, 1) + driver.run()["plain"].token_ids
    driver.add("joins", prompt(20, 9), replace(GREEDY, hidden_layers=(1,), max_tokens=1))
    driver.run()
    driver.add("next", talk + prompt(5, 2), replace(GREEDY, hidden_layers=(1,), max_tokens=2))
    assert driver.run()["next"].cached_tokens == 0
    check_greedy(driver, "next")
    driver.cache.check_integrity()


def test_an_aborted_reply_has_no_rows() -> None:
    driver = Driver(build("llama"))
    driver.add("a", prompt(20, 1), tapped(0, n=2, hidden_tokens="all", max_tokens=20))
    driver.add("b", prompt(20, 1), tapped(0, max_tokens=20))
    for _ in range(6):
        driver.step()
    for name in ("a", "b"):
        driver.abort(name)
        assert [one.hidden_states for one in driver.results[name].completions] == [None] * len(
            driver.results[name].completions
        )


def test_taps_are_evicted_before_anything_else() -> None:
    driver = Driver(build("qwen3_5"), memory_bytes=1 << 19)
    driver.add("tapped", prompt(150, 1), tapped(0, 1, 2, 3, -1))
    driver.run()
    held = driver.cache.pages_in_use()["taps"]
    assert held == 5 * 9  # whole blocks
    for number in range(40):
        driver.add(str(number), prompt(150, 2 + number))
        driver.run()
        if driver.cache.stats.taps_evicted:
            break
    stats = driver.cache.stats
    assert stats.taps_evicted == held
    assert stats.blocks_evicted == 0 == stats.checkpoints_evicted
    driver.add("again", prompt(150, 1))
    assert driver.run()["again"].cached_tokens == 144


def test_the_reply_to_a_prompt_whose_rows_are_read_takes_no_pages_for_them() -> None:
    driver = Driver(build("qwen3_next"))
    driver.add("a", prompt(40, 1), tapped(0, -1, max_tokens=40))
    driver.step()
    held = driver.cache.pages_in_use()["taps"]
    [sample] = driver.core.scheduler.running
    assert sample.lease is not None
    assert sample.token_ids
    assert not sample.key.taps
    assert not sample.lease.taps
    check_all(driver)
    assert driver.cache.pages_in_use()["taps"] == held == 2 * 2


def test_requests_at_once_compute_a_prefix_once_only_if_the_first_has_their_taps() -> None:
    for first, follows in ((tapped(0, 1), True), (GREEDY, False)):
        driver = Driver(build("qwen3_next"), max_num_batched_tokens=64)
        driver.add("first", prompt(300, 1), first)
        driver.step()
        driver.add("second", prompt(300, 1), tapped(1))
        check_all(driver)
        assert (driver.results["second"].cached_tokens > 0) == follows
        assert driver.core.scheduler.followed == follows


def test_bytes_held_are_those_of_the_rows() -> None:
    driver = Driver(build("qwen3_next"), memory_bytes=32 << 20)
    plan = driver.memory.plan
    before = driver.cache.pages_in_use()["taps"]
    driver.add("a", prompt(160, 1), tapped(0, 2, -1, hidden_tokens="all", max_tokens=1))
    driver.run()
    group = plan.group("taps")
    held = (driver.cache.pages_in_use()["taps"] - before) * group.slab_bytes / group.pages_per_slab
    assert held <= 1.02 * 160 * 3 * plan.model.hidden_size * plan.model.dtype.nbytes


@pytest.mark.parametrize("part", range(PARTS))
def test_random_lives(part: int) -> None:
    """Rows are as many as tokens, and right, in random batches of random lengths, layers and memory."""
    chance = random.Random(part)
    names = list(FAMILIES)
    done, count = part, part + SAMPLES // PARTS
    while done < count:
        model = build(names[done % len(names)])
        num_layers = len(find_decoder(model)[1])
        memory = memory_for(model, chance.randint(2, 6), 320)
        driver = Driver(model, memory_bytes=2 * memory, max_num_batched_tokens=chance.choice([17, 64, 256]))
        choices: list[int | str] = [*range(-num_layers - 1, 0), "final"]
        for _ in range(min(count - done, chance.randint(8, 20))):
            start = prompt(chance.randint(0, 90), chance.randint(0, 2))
            layers = chance.sample(choices, chance.choice([0, 1, 1, 2, 3]))
            how = chance.choice(["prompt", "all"])
            tokens = start + prompt(chance.randint(1, 60), chance.randint(3, 9))
            driver.add(str(done), tokens, tapped(*layers, hidden_tokens=how, max_tokens=chance.randint(1, 20)))
            done += 1
            for _ in range(chance.randint(0, 4)):
                driver.step()
        asked = driver.results
        check_all(driver)
        assert all(one.finish_reason == "length" for result in asked.values() for one in result.completions)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_layers": [5]}, "this model's are 0 to 4"),
        ({"hidden_layers": [-6]}, "hidden_layers has -6"),
        ({"hidden_layers": [4, -1]}, "layer -1 twice"),
        ({"hidden_layers": ["last"]}, "whole numbers, or 'final'"),
        ({"hidden_layers": [1.5]}, "whole numbers"),
        ({"hidden_layers": 3}, "pass a list"),
        ({"hidden_layers": [1], "hidden_tokens": "reply"}, "'prompt' or 'all'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], reason: str) -> None:
    driver = Driver(build("qwen3_next"))
    assert driver.runner.num_layers == 4
    with pytest.raises(RequestError, match=reason):
        driver.add("a", prompt(10, 1), replace(GREEDY, **options))


def test_a_prompt_whose_rows_cannot_fit_is_refused_at_once() -> None:
    driver = Driver(build("qwen3_next"), memory_bytes=1 << 19)
    driver.add("plain", prompt(400, 1))
    with pytest.raises(RequestError, match=r"400 tokens with hidden states of 5 layers: \d+ tokens of them fit"):
        driver.add("a", prompt(400, 1), tapped(0, 1, 2, 3, 4))
    driver.add("b", prompt(20, 1), tapped(0, 1, 2, 3, 4, hidden_tokens="all", max_tokens=None))
    check_all(driver)
    assert driver.results["b"].finish_reason == "length"
