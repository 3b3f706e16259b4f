"""The arena's tensors: every element has one place, whatever the layout, and operations move just what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.cache import CacheLayout, CopyPage, Operation, ZeroPage, ZeroSlab
from hybridkv.errors import HybridKVError
from hybridkv.memory import Memory
from hybridkv.models import read_config
from hybridkv.plan import Plan, PlanOptions, make_plan
from hybridkv.plan.layout import ROW_ORDERS
from hybridkv.spec import DType
from tests.tiny import tiny_config

CPU = torch.device("cpu")


def plan_of(model_type: str, memory_bytes: int = 3 << 20, **options: object) -> Plan:
    config = tiny_config(model_type).to_dict() | {"dtype": "float32"}
    return make_plan(read_config(config, name=model_type), PlanOptions(memory_bytes, **options))  # type: ignore[arg-type]


def memory_of(plan: Plan) -> Memory:
    return Memory(plan, CacheLayout.from_plan(plan), CPU)


def group_views(memory: Memory, group: str) -> list[torch.Tensor]:
    """Every part of every layer of a group, over all items: those cut into k pages have every k-th page."""
    pages = memory.plan.group(group).layout.pages
    kept = [*memory.tokens.values(), *memory.states.values(), *memory.taps.values()]
    return [part[layer.page :: pages] for layer in kept if layer.group == group for part in layer.parts.values()]


def is_read_back(memory: Memory, group: str) -> bool:
    """Write a distinct value through every (layer, part, page, token, head, element). Whether all are read back."""
    views, first = group_views(memory, group), 0
    expected = []
    for view in views:
        values = torch.arange(first, first + view.numel(), dtype=torch.int32).view(view.shape)
        first += view.numel()
        expected.append(values)
        view.view(torch.int32).copy_(values)
    assert views
    return all(torch.equal(view.view(torch.int32), values) for view, values in zip(views, expected, strict=True))


@pytest.mark.parametrize("row_order", ROW_ORDERS)
def test_what_is_written_through_every_view_is_read_back(row_order: str) -> None:
    for model_type in ("llama", "gemma3_text", "kimi_linear", "falcon_h1"):
        plan = plan_of(model_type, row_order=row_order, row_layers=3)
        for group in plan.groups:
            assert is_read_back(memory_of(plan), group.name)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "zamba2", "minimax", "lfm2"])
@pytest.mark.parametrize("pack", [1, 2, None])
def test_pack_sizes_and_row_lengths_keep_layers_apart(model_type: str, pack: int | None) -> None:
    for row_layers in (1, 2, 4):
        plan = plan_of(model_type, attn_pack_size=pack, row_layers=row_layers)
        for group in plan.groups:
            assert is_read_back(memory_of(plan), group.name)


def test_pages_of_one_slab_do_not_reach_into_the_next() -> None:
    plan = plan_of("qwen3_next")
    memory = memory_of(plan)
    for group in plan.groups:
        memory.buffer.zero_()
        for view in group_views(memory, group.name):
            items = group.pages_per_slab // group.layout.pages
            view[items : 2 * items].fill_(1.0)
        used = memory.buffer.view(plan.num_slabs, plan.slab_bytes).any(1)
        assert used.nonzero().flatten().tolist() == [1]


def test_a_state_cut_into_pages_has_its_layers_on_different_pages() -> None:
    model = read_config(tiny_config("mamba2").to_dict() | {"dtype": "float32"}, name="mamba2")
    for memory_bytes in range(60_000, 400_000, 20_000):
        try:
            plan = make_plan(model, PlanOptions(memory_bytes, row_layers=1))
        except HybridKVError:
            continue
        if plan.groups[0].layout.pages > 1:
            memory = memory_of(plan)
            assert {memory.state(layer).page for layer in range(3)} == set(range(plan.groups[0].layout.pages))
            assert is_read_back(memory, "state")
            return
    pytest.fail("no arena was small enough to cut a state")


def test_dtypes_of_parts_are_the_plan_s() -> None:
    config = tiny_config("qwen3_next").to_dict() | {"dtype": "bfloat16"}
    plan = make_plan(read_config(config, name="q", kv_cache_dtype=DType.FLOAT16), PlanOptions(3 << 20))
    memory = memory_of(plan)
    assert memory.attention(3).parts["k"].dtype == torch.float16
    assert memory.state(0).parts["conv"].dtype == torch.bfloat16
    assert memory.state(0).parts["recurrent"].dtype == torch.float32


def test_a_layer_without_that_kind_is_named() -> None:
    memory = memory_of(plan_of("qwen3_next"))
    with pytest.raises(HybridKVError, match=r"layer 0 keeps no attention.*\[3, 7\]"):
        memory.attention(0)


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    """Of two pools; chains and rings of copies included."""
    page, slab = st.integers(0, 11), st.integers(0, 2)
    pool = st.sampled_from(["full", "state"])
    one = st.one_of(
        st.builds(CopyPage, pool, page, page), st.builds(ZeroPage, pool, page), st.builds(ZeroSlab, pool, slab)
    )
    return draw(st.lists(one, max_size=14))


@settings(max_examples=150)
@given(operations(), st.booleans())
def test_operations_act_one_after_the_other(ops: list[Operation], large: bool) -> None:
    plan = plan_of("qwen3_next", 2 << 20)
    layout = CacheLayout.from_plan(plan)
    memory = Memory(plan, layout, CPU)
    pools = {group.pool_name: group for group in layout.groups}
    ops = [op for op in ops if not isinstance(op, ZeroSlab) or op.slab < layout.num_slabs]
    memory.buffer.copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 256, plan.arena_bytes, dtype=np.uint8)))
    naive = memory.buffer.clone()
    for op in ops:
        group = pools[op.pool]
        pages = naive[: len(naive) // group.page_bytes * group.page_bytes].view(-1, group.page_bytes)
        if isinstance(op, CopyPage):
            pages[op.dst] = pages[op.src].clone()
        elif isinstance(op, ZeroPage):
            pages[op.page] = 0
        else:
            pages[op.slab * group.pages_per_slab : (op.slab + 1) * group.pages_per_slab] = 0
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr("hybridkv.memory.memory._LARGE_PAGE_BYTES", 1)
        memory.run(ops)
    assert torch.equal(memory.buffer, naive)
