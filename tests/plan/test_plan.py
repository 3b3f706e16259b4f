"""The plan as a whole: addresses, padding, capacity, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ParallelismError, PlanError
from hybridkv.models import catalogue, load_model, read_config
from hybridkv.plan import Plan, PlanOptions, make_plan, slabs
from hybridkv.plan.layout import lay_out
from hybridkv.plan.plan import split_into_groups
from hybridkv.plan.slabs import PAGE_ALIGN_BYTES, PageNeed, choose_slab, smallest_arena
from hybridkv.spec import DType, HiddenTap, LinearState, ModelSpec
from hybridkv.units import parse_size
from tests.plan.strategies import models

GIB = 2**30


def largest_page(model: ModelSpec) -> int:
    groups = split_into_groups(model.layers, None)
    return max(lay_out(specs, 16, 4, "hlkt").page_bytes for specs in groups.values())


def assert_sound(plan: Plan) -> None:
    """What every plan promises."""
    assert plan.arena_bytes <= plan.options.memory_bytes
    assert plan.options.memory_bytes - plan.arena_bytes < plan.slab_bytes
    for group in plan.groups:
        unused = plan.slab_bytes - group.stride_bytes * group.pages_per_slab
        assert 0 <= unused < group.stride_bytes
        assert not unused or group.kind == HiddenTap.kind
        assert group.stride_bytes >= group.page_bytes
        assert group.stride_bytes % PAGE_ALIGN_BYTES == 0
        assert 0 <= group.padding_ratio <= plan.padding_ratio < 1
        last = plan.num_slabs * group.pages_per_slab - 1
        assert plan.page_offset(group, last) + group.stride_bytes + unused == plan.arena_bytes
        assert plan.page_offset(group, group.pages_per_slab) == plan.slab_bytes
        for layer in group.layers:
            row = group.row_of(layer)
            assert row.first_layer <= layer <= row.last_layer
    kept = sorted((spec.layer, spec.kind) for group in plan.groups for spec in group.specs)
    has_taps = any(group.kind == HiddenTap.kind for group in plan.groups)
    wanted = [spec for spec in plan.model.layers if has_taps or not isinstance(spec, HiddenTap)]
    assert kept == sorted((spec.layer, spec.kind) for spec in wanted)


@settings(deadline=None)
@given(models(), st.integers(0, 400), st.integers(1, 40), st.integers(1, 5), st.data())
def test_random_plans_are_sound_or_refused_with_a_size_that_works(
    model: ModelSpec, memory_kib: int, block_tokens: int, row_layers: int, data: st.DataObject
) -> None:
    packable = sum(spec.kind in ("full_attention", "latent_attention") for spec in model.layers)
    pack = data.draw(st.none() | st.integers(1, packable)) if packable else None
    options: dict[str, Any] = {"block_tokens": block_tokens, "row_layers": row_layers, "attn_pack_size": pack}
    try:
        plan = make_plan(model, PlanOptions(memory_kib * 1024, **options))
    except PlanError as error:
        needed = str(error).split("at least ")[1].split(",")[0]
        assert parse_size(needed) > memory_kib * 1024
        plan = make_plan(model, PlanOptions(parse_size(needed), **options))
    assert_sound(plan)


PADS_MORE = {"lfm3-1.7b": 0.026}
"""In an arena of 256 pages: three sizes of pages fit one another in slabs that are too large for so few."""


@pytest.mark.parametrize("name", sorted(catalogue()))
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_catalogue_plans_pad_at_most_two_percent(name: str, tp: int) -> None:
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        try:
            model = load_model(name, tp=tp, state_dtype=dtype)
        except ParallelismError:
            return
        for memory in (256 * largest_page(model), 80 * GIB, 1000 * GIB):
            if memory >= 256 * largest_page(model):
                plan = make_plan(model, PlanOptions(memory))
                assert_sound(plan)
                is_smallest = memory < 80 * GIB
                assert plan.padding_ratio <= (PADS_MORE.get(name, 0.02) if is_smallest else 0.02)


@pytest.mark.parametrize("pack", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["qwen3.5-397b-a17b", "falcon-h1-34b", "gemma-3-27b", "kimi-linear-48b-a3b"])
def test_packs_split_full_attention_only(name: str, pack: int) -> None:
    model = load_model(name)
    if pack > sum(spec.kind in ("full_attention", "latent_attention") for spec in model.layers):
        return
    plan = make_plan(model, PlanOptions(80 * GIB, attn_pack_size=pack))
    assert_sound(plan)
    assert plan.padding_ratio <= 0.02
    packed = [group for group in plan.groups if group.kind in ("full_attention", "latent_attention")]
    assert [len(group.layers) for group in packed[:-1]] == [pack] * (len(packed) - 1)
    assert sum(group.kind == "linear_state" for group in plan.groups) <= 1


def test_known_slabs() -> None:
    """26 full and 5 window pages of Gemma-3-27B, 3 and 4 of LFM2 fill a slab to the byte."""
    gemma = make_plan(load_model("gemma-3-27b"), PlanOptions(80 * GIB))
    assert {group.name: group.pages_per_slab for group in gemma.groups} == {"window1024": 5, "full": 26}
    lfm2 = make_plan(load_model("lfm2-8b-a1b"), PlanOptions(2 * GIB))
    assert {group.name: group.pages_per_slab for group in lfm2.groups} == {"state": 4, "full": 3}
    assert gemma.padding_ratio == lfm2.padding_ratio == 0


def test_attention_and_state_of_one_layer_are_in_two_groups() -> None:
    plan = make_plan(load_model("falcon-h1-34b"), PlanOptions(80 * GIB))
    assert plan.group("full").layers == plan.group("state").layers == tuple(range(72))
    with pytest.raises(PlanError, match="no group 'nope'"):
        plan.group("nope")
    with pytest.raises(PlanError, match="layer 99 is not in group 'full'"):
        plan.group("full").row_of(99)
    with pytest.raises(PlanError, match="outside the arena"):
        plan.page_offset(plan.group("full"), -1)


def test_small_arenas_cut_states_and_large_ones_do_not() -> None:
    model = load_model("qwen3.5-397b-a17b", tp=2)
    small = make_plan(model, PlanOptions(5 * GIB))
    large = make_plan(model, PlanOptions(80 * GIB))
    assert small.group("state").layout.pages > 1 == large.group("state").layout.pages
    assert small.padding_ratio <= 0.02
    assert [row.layers for row in small.group("state").rows] == [row.layers for row in large.group("state").rows]


def test_taps_change_nothing_for_those_who_do_not_ask() -> None:
    options = PlanOptions(80 * GIB)
    plain = make_plan(load_model("qwen3-next-80b-a3b"), options)
    tapped = make_plan(load_model("qwen3-next-80b-a3b", taps=[3, 11, 47]), options)
    taps = tapped.group("taps")
    assert taps.layers == (3, 11, 47)
    assert taps.page_bytes == 16 * 2048 * 2
    assert tapped.groups[:-1] == plain.groups
    assert tapped.num_slabs == plain.num_slabs


TIGHT_IN_2_GIB = {"glm-4.5", "glm-4.6", "glm-4.7", "llama-3.1-405b", "mistral-small-4-119b"}
"""Models whose slabs have so few pages in 2 GiB that a part of a tap's page, or of one request, counts."""


@pytest.mark.parametrize("name", sorted(catalogue()))
@pytest.mark.parametrize("memory", [2 * GIB, 20 * GIB, 80 * GIB])
def test_taps_cost_others_next_to_nothing_and_pad_little(name: str, memory: int) -> None:
    model = load_model(name)
    plain = make_plan(model, PlanOptions(memory))
    tapped = make_plan(load_model(name, taps=range(model.num_layers)), PlanOptions(memory))
    taps, is_tight = tapped.group("taps"), memory == 2 * GIB and name in TIGHT_IN_2_GIB
    assert taps.padding_ratio <= (1 / taps.pages_per_slab if is_tight else 0.02)
    assert [group.stride_bytes for group in tapped.groups[:-1]] == [group.stride_bytes for group in plain.groups]
    assert tapped.slab_bytes <= max(plain.slab_bytes, memory / 200)
    for num_tokens in (1024, 32768):
        assert tapped.max_requests(num_tokens) >= 0.99 * plain.max_requests(num_tokens) - is_tight


def test_an_arena_too_small_for_taps_has_none() -> None:
    model = load_model("deepseek-v3", taps=[3])
    model = replace(model, layers=(model.layers[0], model.layers[-1]))
    assert [group.name for group in make_plan(model, PlanOptions(2**20)).groups] == ["latent"]
    assert [group.name for group in make_plan(model, PlanOptions(2**30)).groups] == ["latent", "taps"]


@given(st.integers(1, 40_000))
def test_max_requests_is_the_most_that_fit(num_tokens: int) -> None:
    plan = make_plan(load_model("gpt-oss-120b"), PlanOptions(8 * GIB))
    fits = plan.max_requests(num_tokens)
    assert plan.slabs_for(fits, num_tokens) <= plan.num_slabs - 1 < plan.slabs_for(fits + 1, num_tokens)


def test_windows_hold_only_what_they_see() -> None:
    plan = make_plan(load_model("gemma-3-27b"), PlanOptions(80 * GIB))
    window = plan.group("window1024")
    assert window.held_pages(10, 16) == 1
    assert window.held_pages(32768, 16) == 65  # 1,024 tokens that begin inside a block
    assert plan.group("full").held_pages(32768, 16) == 2048


def test_cut_states_and_strides_are_counted() -> None:
    plan = make_plan(load_model("qwen3.5-397b-a17b", tp=2), PlanOptions(5 * GIB))
    state, full = plan.group("state"), plan.group("full")
    assert state.held_pages(100, 16) == state.layout.pages == 3
    assert plan.request_bytes(100) == 3 * state.stride_bytes + 7 * full.stride_bytes
    assert state.padding_ratio == 1 - plan.model.state_bytes / (3 * state.stride_bytes)


def test_states_are_counted_once_a_request() -> None:
    plan = make_plan(load_model("mamba2-2.7b"), PlanOptions(80 * GIB))
    assert plan.max_requests(10) == plan.max_requests(100_000) == (plan.num_slabs - 1) * plan.groups[0].pages_per_slab


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 0}, "block of 0 tokens"),
        ({"block_tokens": 10**20}, "a block has 1 to 65536 tokens"),
        ({"row_layers": 0}, "rows of 0 layers"),
        ({"row_order": "xyzw"}, "row order 'xyzw'"),
        ({"attn_pack_size": 13}, "has 12 full-attention layers; choose 1 to 12"),
        ({"attn_pack_size": 0}, "attention pack size 0"),
        ({"memory_bytes": 2**20}, "1 MiB is too little .* at least 164MiB"),
    ],
)
def test_conflicts_are_found_here(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(**{"memory_bytes": 80 * GIB, **options}))


def test_models_without_what_is_asked_for_are_refused() -> None:
    with pytest.raises(PlanError, match="no full-attention layers"):
        make_plan(load_model("mamba2-2.7b"), PlanOptions(80 * GIB, attn_pack_size=2))
    nothing = read_config({"model_type": "nemotron_h", "layers_block_type": ["mlp"]}, name="m")
    with pytest.raises(PlanError, match="no layer of m keeps anything"):
        make_plan(nothing, PlanOptions(GIB))
    only_taps = read_config({"model_type": "nemotron_h", "layers_block_type": ["mlp"]}, name="m", taps=[0])
    with pytest.raises(PlanError, match="no layer of m keeps anything"):
        make_plan(only_taps, PlanOptions(GIB))
    with pytest.raises(PlanError, match="requests of 0 tokens"):
        make_plan(load_model("mamba2-2.7b"), PlanOptions(80 * GIB)).max_requests(0)


@pytest.mark.parametrize(
    ("pages", "memory"),
    [
        ([64, 10**9 + 7], 80 * GIB),
        ([3456, 45_000_000], 80 * GIB),
        ([9 * 2 * 16], 80 * GIB),
        ([4096 * 147_456, 304_000_000], 8000 * GIB),
        ([2048 + i for i in range(40)], GIB),
    ],
)
def test_slab_search_is_bounded_on_awkward_pages(
    pages: list[int], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no slab size pads little, or pages are huge, the search must not go through all of memory."""
    searched = []
    search = slabs._best_strides

    def counted(page: int, low: int, high: int) -> npt.NDArray[np.int64]:
        searched.append(high - low)
        return search(page, low, high)

    monkeypatch.setattr(slabs, "_best_strides", counted)
    assert choose_slab([PageNeed(page, page, 1) for page in pages], memory) is not None
    assert sum(searched) < 80_000_000


def test_uneven_cuts_do_not_buy_smaller_slabs_with_padding() -> None:
    model = load_model("nemotron-3-nano-30b-a3b")
    plan = make_plan(model, PlanOptions(12 * GIB, block_tokens=4096))
    assert plan.padding_ratio <= 0.02


@settings(deadline=None)
@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=3), st.integers(0, 6), st.integers(1, 3))
def test_slab_search_against_brute_force(pages: list[int], scale: int, min_pages: int) -> None:
    needs = [PageNeed(page, page, min_pages) for page in pages]
    memory = smallest_arena(needs) * (1 + scale)
    choice = choose_slab(needs, memory)
    assert choice is not None
    assert choose_slab(needs, smallest_arena(needs) - PAGE_ALIGN_BYTES) is None
    for need, stride in zip(needs, choice.strides_bytes, strict=True):
        assert stride >= need.page_bytes
        assert choice.slab_bytes % stride == stride % PAGE_ALIGN_BYTES == 0
    best = min(brute_force_losses(needs, memory, choice.slab_bytes))
    assert choice.loss_bytes <= best + 1e-6 * memory


def brute_force_losses(needs: list[PageNeed], memory: int, up_to: int) -> list[float]:
    """Losses of all slab sizes up to a limit with acceptable padding."""
    losses = [float("inf")]
    for slab in range(PAGE_ALIGN_BYTES, up_to, PAGE_ALIGN_BYTES):
        strides = [smallest_stride(need.page_bytes, slab) for need in needs]
        if 0 in strides:
            continue
        pairs = list(zip(needs, strides, strict=True))
        padding = max(1 - need.page_bytes / stride for need, stride in pairs)
        slabs = 1 + sum(-(-need.min_pages // (slab // stride)) for need, stride in pairs)
        if padding <= 0.02 and slabs * slab <= memory:
            losses.append(memory * padding + slab * (1 + len(needs) / 2))
    return losses


def smallest_stride(page_bytes: int, slab_bytes: int) -> int:
    """The smallest aligned divisor of the slab that holds the page; 0 if none does."""
    count = min(slab_bytes // page_bytes, slab_bytes // PAGE_ALIGN_BYTES)
    return next((slab_bytes // n for n in range(count, 0, -1) if slab_bytes % (n * PAGE_ALIGN_BYTES) == 0), 0)


def test_a_state_only_model_has_states_only() -> None:
    plan = make_plan(load_model("mamba2-2.7b"), PlanOptions(80 * GIB))
    assert [type(group.specs[0]) for group in plan.groups] == [LinearState]
