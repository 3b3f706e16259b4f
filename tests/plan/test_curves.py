"""Series of figures: lengths, packings, and GPUs."""

from __future__ import annotations

from functools import partial

import pytest

from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan, uniform_pack_sizes
from hybridkv.plan.curves import by_packing, fits_by_length, lengths_between, request_lengths, uniform_layouts
from hybridkv.plan.gpus import GPUS, fewest_gpus, fits_on_gpus
from hybridkv.spec import ModelSpec

GIB = 2**30


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [
        (1, [1]),
        (100, [1, 2, 4, 8, 16, 32, 64, 100]),
        (1024, [16, 32, 64, 128, 256, 512, 1024]),
        (40_000, [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 40_000]),
    ],
)
def test_lengths_are_powers_of_two_and_the_longest(longest: int, lengths: list[int]) -> None:
    assert request_lengths(longest) == lengths
    between = lengths_between(lengths)
    assert set(lengths) <= set(between)
    assert (between[0], between[-1]) == (lengths[0], longest)


def test_longer_requests_never_fit_more_often() -> None:
    plan = make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(20 * GIB))
    for counts in fits_by_length(plan, lengths_between(request_lengths(2**20))).values():
        assert counts == sorted(counts, reverse=True)


def test_every_pack_size_is_there_once() -> None:
    plan = make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(20 * GIB))
    sizes = sorted(set(uniform_pack_sizes(plan.model).values()))
    assert [one.pack_size for one in uniform_layouts(plan).values()] == sizes
    for one in by_packing(plan):
        assert one.plan is not None
        assert one.plan.options == PlanOptions(20 * GIB, attn_pack_size=one.pack_size)


def test_a_packing_that_finds_no_room_has_no_plan() -> None:
    """Each pack is a group of its own and needs a slab."""
    plan = make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(200 * 2**20))
    assert [one.plan is None for one in by_packing(plan)] == [True, True, False, False, False]


def test_numbers_of_gpus_that_a_model_cannot_be_split_over_are_left_out() -> None:
    fits = fits_on_gpus(partial(_model, "falcon-h1-34b"), PlanOptions(0), 0)
    assert {fit.num_gpus for fit in fits} == {1, 2, 4}
    assert len(fits) == 3 * len(GPUS)


def test_gpus_hold_weights_first() -> None:
    weights = 100 * GIB
    fits = fits_on_gpus(partial(_model, "qwen3-next-80b-a3b"), PlanOptions(0, block_tokens=32), weights)
    for fit in fits:
        assert fit.cache_bytes == max(0, int(fit.gpu.memory_bytes * 0.9) - weights // fit.num_gpus)
        assert (fit.plan is None) == (fit.cache_bytes == 0)
        if fit.plan is not None:
            assert fit.plan.options == PlanOptions(fit.cache_bytes, block_tokens=32)
            assert fit.plan.model.tp == fit.num_gpus
    h100 = GPUS[2]
    assert fewest_gpus(fits, h100, 1, 8192) == 2
    most = max(fit.max_requests(8192) for fit in fits if fit.gpu == h100)
    assert fewest_gpus(fits, h100, most, 8192) == 16
    assert fewest_gpus(fits, h100, most + 1, 8192) is None


def _model(name: str, tp: int) -> ModelSpec:
    return load_model(name, tp=tp)
