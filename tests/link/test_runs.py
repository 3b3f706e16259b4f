"""What one engine sends arrives at its place in another: every byte, whatever plans, ranks and blocks the two have."""

from __future__ import annotations

import functools
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hybridkv.cache import Role
from hybridkv.errors import HybridKVError, InputError, PlanError
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.runs import Cutter, PageTables
from hybridkv.models.reader import read_config
from hybridkv.plan.layout import ROW_ORDERS
from hybridkv.spec import DType, FullAttention, ModelSpec
from tests.engine.zoo import family_config
from tests.link.sides import Side, check_arrived, copy, cutter, geometry_of, seen_from, side, transfer, truth
from tests.stream.naive import SIZES, Naive, models

transfers = settings(
    max_examples=int(os.environ.get("HYBRIDKV_FORMS", "12")),
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FAMILIES = ["llama", "gemma3", "gemma4", "mimo_v2_flash", "llama4", "qwen3_next", "mamba2", "kimi_linear", "falcon_h1"]
MIB = 1 << 20
PLANS: list[dict[str, Any]] = [
    {"block_tokens": 16, "row_layers": 4, "row_order": "hlkt", "memory_bytes": 8 * MIB},
    {"block_tokens": 8, "row_layers": 1, "row_order": "tklh", "memory_bytes": 6 * MIB, "attn_pack_size": 1},
    {"block_tokens": 32, "row_layers": 2, "row_order": "lkth", "memory_bytes": 10 * MIB},
    {"block_tokens": 16, "row_layers": 3, "row_order": "hlkt", "memory_bytes": 4 * MIB},
]


@functools.cache
def spec_of(family: str, tp: int = 1, rank: int = 0) -> ModelSpec:
    taps = [1] if family in ("llama", "qwen3_next") else []
    return read_config(
        family_config(family).to_dict(), name=family, tp=tp, rank=rank, kv_cache_dtype=DType.BFLOAT16, taps=taps
    )


def plan_of(family: str, number: int) -> dict[str, Any]:
    options, layers = dict(PLANS[number]), spec_of(family).layers
    if sum(isinstance(layer, FullAttention) for layer in layers) < 2:
        options.pop("attn_pack_size", None)
    return options


def engines(family: str, tp: int, number: int, end: int, seed: int = 0) -> list[Side]:
    options = plan_of(family, number)
    return [side(spec_of(family, tp, rank), end, options, seed=seed + rank) for rank in range(tp)]


def sending(sources: list[Side], target: Side) -> list[Side]:
    """Those ranks that have something for the target."""
    found = []
    for source in sources:
        try:
            cutter(source, target)
        except LinkMismatch as error:
            assert "nothing to send" in str(error)  # noqa: PT017
        else:
            found.append(source)
    return found


# --- every byte -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (0, 1), (1, 2), (2, 0), (0, 3), (3, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_moves_between_plans(family: str, ours: int, theirs: int, by_layer: bool) -> None:
    (source,), (target,) = engines(family, 1, ours, 90), engines(family, 1, theirs, 90, seed=9)
    check_arrived(target, transfer([source], target, 0, parcel_bytes=20_000, by_layer=by_layer), 0)


@pytest.mark.parametrize(("tp", "their_tp"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_moves_between_sizes(family: str, tp: int, their_tp: int) -> None:
    sources = engines(family, tp, 0, 60)
    for target in engines(family, their_tp, 2, 60, seed=9):
        check_arrived(target, transfer(sending(sources, target), target, 0), 0)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "falcon_h1", "kimi_linear"])
def test_states_move_between_different_numbers_of_pages(family: str) -> None:
    options = [{"memory_bytes": size << 10, "row_layers": 1} for size in (130, 170, 240, 8000)]
    sides = [state_side(spec_of(family), one) for one in options]
    assert len({one.geometry.tables["state"].pages_per_item for one in sides}) > 1
    for source in sides:
        for target in sides:
            for by_layer in (False, True):
                check_arrived(target, transfer([source], target, 0, by_layer=by_layer), 0)


def state_side(spec: ModelSpec, options: dict[str, Any]) -> Side:
    """With little memory: as much as two blocks and a state need."""
    while True:
        try:
            return side(spec, 20, options)
        except (PlanError, IndexError):  # of the plan, or no slab is left
            options = {**options, "memory_bytes": options["memory_bytes"] + (20 << 10)}


@st.composite
def options_of(draw: st.DrawFn, model: Naive) -> dict[str, Any]:
    packable = sum(layer.kind in ("full", "latent") for layer in model.layers)
    return {
        "block_tokens": draw(st.sampled_from([1, 4, 6, 8, 16, 32])),
        "memory_bytes": draw(st.sampled_from([2 * MIB, 3 * MIB])),
        "attn_pack_size": draw(st.sampled_from([None, *range(1, packable + 1)])),
        "row_layers": draw(st.integers(1, 4)),
        "row_order": draw(st.sampled_from(ROW_ORDERS)),
    }


@transfers
@given(st.data())
def test_random_models_move(data: st.DataObject) -> None:
    """Also with windows that begin earlier than needed, tapped layers, and blocks that the target has already."""
    model = data.draw(models())
    end, seed = data.draw(st.sampled_from([1, 17, 40, 85])), data.draw(st.integers(0, 99))
    start = data.draw(st.integers(0, end))
    tp, their_tp = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(SIZES))
    ours, theirs = data.draw(options_of(model)), data.draw(st.one_of(options_of(model), st.none()))
    taps = [f"tap{layer.number}" for layer in model.layers if layer.kind == "tap"]
    wanted = data.draw(st.lists(st.sampled_from(taps), unique=True)) if taps else []
    sources = [side(model.spec(tp, rank), end, ours, seed=seed + rank, taps=taps) for rank in range(tp)]
    number = data.draw(st.integers(0, their_tp - 1))
    from_block = data.draw(st.sampled_from([None, 0, 2]))
    spec = model.spec(their_tp, number)
    target = side(spec, end, theirs or ours, seed=seed + 50, taps=wanted, from_block=from_block)
    target = without_some(target, random.Random(seed))
    order = random.Random(seed).sample(sources, tp)
    options = {"parcel_bytes": data.draw(st.sampled_from([1, 1000, MIB])), "by_layer": data.draw(st.booleans())}
    check_arrived(target, transfer(sending(order, target), target, start, **options), start)


def without_some(target: Side, chance: random.Random) -> Side:
    """Some blocks are not wanted."""
    blocks = {name: [page * (chance.random() < 0.8) for page in pages] for name, pages in target.request.blocks.items()}
    return target._replace(request=target.request._replace(blocks=blocks))


# --- parcels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_tokens_before_the_first_of_a_lost_parcel_are_there(number: int) -> None:
    (source,), (target,) = engines("llama", 1, 0, 96), engines("llama", 1, number, 96, seed=9)
    parcels = cutter(source, target).parcels(source.tables, target.tables, 0, 96, parcel_bytes=3000)
    memory = source.filled(bytearray(source.rank.memory), truth, 0, source.layers)
    assert len({parcel.first_token for parcel in parcels}) > 3
    for lost in parcels:
        after = bytearray(target.rank.memory)
        for parcel in parcels:
            if parcel is not lost:
                copy(parcel, memory, after)
        if lost.first_token:
            request = target.request._replace(end=lost.first_token)
            check_tokens(target._replace(request=request), after)
        with pytest.raises(AssertionError):
            check_tokens(target, after)


def check_tokens(target: Side, after: bytearray) -> None:
    must = target.mask(seen_from(0), 0) == 1
    expected = target.filled(bytearray(after), truth, 0, target.layers)
    assert (np.frombuffer(after, np.uint8)[must] == np.frombuffer(expected, np.uint8)[must]).all()


def test_first_token_of_what_is_needed_whole_is_the_start() -> None:
    (source,), (target,) = engines("gemma3", 1, 0, 90), engines("gemma3", 1, 1, 90)
    parcels = cutter(source, target).parcels(source.tables, target.tables, 40, 90, parcel_bytes=1000)
    assert {parcel.first_token for parcel in parcels if parcel.role is Role.LOCAL} == {40}
    assert min(parcel.first_token for parcel in parcels if parcel.role is Role.FULL) == 40
    assert max(parcel.first_token for parcel in parcels) > 40


def test_pages_in_a_row_are_one_run() -> None:
    (source,), (target,) = engines("qwen3_next", 1, 0, 160), engines("qwen3_next", 1, 0, 160)
    group = source.rank.plan.group("full")
    first = 3 * group.pages_per_slab
    ours, theirs = list(range(first, first + 10)), list(range(first + 20, first + 30))
    parcels = cutter(source, target).parcels(
        PageTables({"full": ours}, {}), PageTables({"full": theirs}, {}), 0, 160, parcel_bytes=16 * MIB
    )
    assert [len(parcel.nbytes) for parcel in parcels] == [1]
    assert group.page_bytes * 10 - 640 <= parcels[0].total_bytes <= group.stride_bytes * 10
    assert parcels[0].source.tolist() == [group.page_offset(first)]
    assert parcels[0].target.tolist() == [group.page_offset(first + 20)]


def test_a_page_is_one_run_if_layouts_are_equal() -> None:
    (source,), (target,) = engines("qwen3_next", 1, 0, 90), engines("qwen3_next", 1, 3, 90, seed=9)
    (same,) = engines("qwen3_next", 1, 0, 90, seed=9)
    parcels = cutter(source, same).parcels(source.tables, same.tables, 0, 90)
    assert {parcel.group: len(parcel.nbytes) <= 6 for parcel in parcels} == {"state": True, "full": True}
    assert sum(len(p.nbytes) for p in cutter(source, target).parcels(source.tables, target.tables, 0, 90)) >= 7


def test_parcels_by_layer_are_in_the_order_of_layers() -> None:
    (source,), (target,) = engines("qwen3_next", 1, 1, 90), engines("qwen3_next", 1, 0, 90)
    parcels = cutter(source, target).parcels(source.tables, target.tables, 0, 90, by_layer=True)
    assert [parcel.last_layer for parcel in parcels] == sorted(parcel.last_layer for parcel in parcels)
    assert {parcel.last_layer for parcel in parcels} == set(range(source.rank.plan.model.num_layers))


def test_nothing_wanted_is_nothing_sent() -> None:
    (source,), (target,) = engines("falcon_h1", 1, 0, 90), engines("falcon_h1", 1, 1, 90)
    cut = cutter(source, target)
    assert cut.parcels(source.tables, PageTables({}, {}), 0, 90) == []
    assert cut.parcels(source.tables, PageTables({"full.0": []}, {"state": []}), 0, 90) == []
    assert {p.group for p in cut.parcels(source.tables, target.tables, 90, 90)} == {"state"}


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_block_that_the_source_lacks_is_named() -> None:
    (source,), (target,) = engines("llama", 1, 0, 90), engines("llama", 1, 1, 90)
    pages = list(source.tables.tables["full"])
    cut, had = cutter(source, target), PageTables({"full": [*pages[:2], 0, *pages[3:]]}, {})
    with pytest.raises(LinkMismatch, match=r"'full\.0', block 4 of the target: .* block 2 of its 'full'"):
        cut.parcels(had, target.tables, 0, 90)
    with pytest.raises(LinkMismatch, match=r"block 0 of its 'full'"):
        cut.parcels(PageTables({}, {}), target.tables, 0, 90)
    assert cut.parcels(had, target.tables, 48, 90)


def test_tokens_of_a_window_that_are_not_seen_may_be_missing() -> None:
    (source,) = engines("gemma3", 1, 1, 90)
    (target,) = engines("gemma3", 1, 2, 90)
    name = next(name for name in target.tables.tables if name.startswith("window"))
    cut, pages = cutter(source, target), list(source.tables.tables[name])
    first = next(number for number, page in enumerate(pages) if page)
    assert target.tables.tables[name][first * 8 // 32], "the target's first block begins before the source's"
    assert cut.parcels(source.tables, target.tables, 0, 90)
    pages[first] = 0
    with pytest.raises(LinkMismatch, match=f"'{name}', block {first * 8 // 32} of the target"):
        cut.parcels(PageTables({**source.tables.tables, name: pages}, source.tables.states), target.tables, 0, 90)


def test_a_state_that_the_source_lacks_is_named() -> None:
    (source,), (target,) = engines("mamba2", 1, 0, 90), engines("mamba2", 1, 1, 90)
    with pytest.raises(LinkMismatch, match=r"'state': the source has pages \[\]"):
        cutter(source, target).parcels(PageTables({}, {}), target.tables, 0, 90)


@pytest.mark.parametrize("pages", [[10**9], [-1], [2**70], ["a"], [[1, 2]], [None]])
def test_pages_outside_the_arena_are_refused(pages: list[Any]) -> None:
    (source,), (target,) = engines("llama", 1, 0, 16), engines("llama", 1, 0, 16)
    for ours, theirs in (({"full": pages}, target.tables.tables), (source.tables.tables, {"full": pages})):
        with pytest.raises(LinkMismatch, match="group 'full'"):
            cutter(source, target).parcels(PageTables(ours, {}), PageTables(theirs, {}), 0, 16)


def test_unknown_tables_and_taps_are_refused() -> None:
    (source,), (target,) = engines("llama", 1, 0, 16), engines("llama", 1, 0, 16)
    for wrong in (PageTables({"window7": [1]}, {}), PageTables({}, {"full": [1]})):
        with pytest.raises(LinkMismatch, match=r"group '\w+' is not one of the target's"):
            cutter(source, target).parcels(source.tables, wrong, 0, 16)
    untapped = replace(source.geometry, groups={"full": source.geometry.groups["full"]})
    cut = Cutter(untapped, target.geometry)
    assert cut.parcels(source.tables, target.tables, 0, 16)
    with pytest.raises(LinkMismatch, match="'tap1': the source does not keep it"):
        cut.parcels(source.tables, PageTables({"tap1": [5]}, {}), 0, 16)
    with pytest.raises(InputError, match="start <= end"):
        cut.parcels(source.tables, target.tables, 9, 8)


def test_ranks_without_a_common_share_are_refused() -> None:
    sources, targets = engines("llama", 4, 0, 16), engines("llama", 2, 0, 16)
    assert [len(sending(sources, target)) for target in targets] == [1, 2]  # rank 0 alone sends hidden states
    with pytest.raises(LinkMismatch, match=r"nothing to send.*another rank"):
        cutter(sources[1], targets[0])
    assert cutter(sources[2], targets[1]).pieces == {"full": range(1, 2)}
    assert issubclass(LinkMismatch, HybridKVError)


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "bert"}, "model type: llama at the source, bert at the target"),
    ({"identity": "other"}, "identity of the weights: weights at the source, other at the target"),
    ({"groups": {}}, r"groups: \['full'\] at the source, \[\] at the target"),
])  # fmt: skip
def test_different_models_are_refused(change: dict[str, Any], message: str) -> None:
    (source,) = engines("llama", 1, 0, 16)
    with pytest.raises(LinkMismatch, match=message):
        Cutter(source.geometry, replace(source.geometry, **change))


def test_different_parts_layers_and_groups_are_refused() -> None:
    source = geometry_of(spec_of("llama"), plan_of("llama", 0))
    config = family_config("llama").to_dict()
    for dtype, num_layers, message in (
        (DType.FLOAT8_E4M3FN, 2, r"parts of layer 0 of group 'full': .*bfloat16.*float8"),
        (DType.BFLOAT16, 1, r"layers of group 'full': \[0, 1\] at the source, \[0\] at the target"),
    ):
        spec = read_config({**config, "num_hidden_layers": num_layers}, name="llama", kv_cache_dtype=dtype)
        with pytest.raises(LinkMismatch, match=message):
            Cutter(source, geometry_of(spec, plan_of("llama", 0)))


def test_block_sizes_with_little_in_common_are_refused() -> None:
    options = {"memory_bytes": 400 * MIB}
    source = geometry_of(spec_of("llama"), {**options, "block_tokens": 4093, "row_order": "tlkh"})
    target = geometry_of(spec_of("llama"), {**options, "block_tokens": 4099})
    cut = Cutter(source, target)
    with pytest.raises(LinkMismatch, match="of which one divides the other"):
        cut.parcels(PageTables({}, {}), PageTables({"full": [1]}, {}), 0, 16)
