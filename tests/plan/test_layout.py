"""Pages, rows and strides: every byte has one owner, whatever the order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import PlanError
from hybridkv.models import load_model, read_config
from hybridkv.plan.layout import (
    PART_ALIGN_BYTES,
    ROW_ORDERS,
    PageLayout,
    PartView,
    check_row_order,
    lay_out,
    most_pages,
)
from hybridkv.plan.plan import split_into_groups
from hybridkv.spec import HiddenTap, LayerSpec, ModelSpec
from tests.plan.strategies import models


def element_offsets(view: PartView) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The byte offset of each element, by the strides alone."""
    offsets = np.full(view.shape, view.offset_bytes, dtype=np.int64)
    for axis, stride in enumerate(view.strides_bytes):
        index = np.arange(view.shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(view.shape))])
        offsets = offsets + index * stride
    return offsets


def owners(layout: PageLayout, views: list[tuple[int, PartView]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How many (layer, part, element) own each byte of each page."""
    count = np.zeros((layout.pages, layout.page_bytes), dtype=np.int64)
    for page, view in views:
        for byte in range(view.dtype.nbytes):
            np.add.at(count[page], element_offsets(view).ravel() + byte, 1)
    return count


@given(models(), st.integers(1, 20), st.integers(1, 5), st.sampled_from(ROW_ORDERS), st.data())
def test_every_byte_has_one_owner_or_is_padding(
    model: ModelSpec, block_tokens: int, row_layers: int, row_order: str, data: st.DataObject
) -> None:
    for specs in split_into_groups(model.layers, None).values():
        pages = data.draw(st.integers(1, most_pages(specs, row_layers)))
        layout = lay_out(specs, block_tokens, row_layers, row_order, pages)
        if isinstance(specs[0], HiddenTap):  # one layer a page
            layouts = [[(0, view)] for view in layout.rows[0].views]
        else:
            layouts = [[(row.page, view) for row in layout.rows for view in row.views]]
        for views in layouts:
            count = owners(layout, views)
            assert count.max() == 1
            tokens = 1 if specs[0].kind == "linear_state" else block_tokens
            kept = specs[:1] if isinstance(specs[0], HiddenTap) else specs
            assert count.sum() == sum(spec.nbytes for spec in kept) * tokens


@given(models(), st.integers(1, 20), st.integers(1, 5), st.sampled_from(ROW_ORDERS))
def test_rows_cover_pages_and_hold_each_layer_once(
    model: ModelSpec, block_tokens: int, row_layers: int, row_order: str
) -> None:
    for specs in split_into_groups(model.layers, None).values():
        layout = lay_out(specs, block_tokens, row_layers, row_order)
        end = 0
        for row in layout.rows:
            assert row.offset_bytes == end
            assert row.nbytes % PART_ALIGN_BYTES == 0
            end += row.nbytes
            for view in row.views:
                assert view.layer in row.layers
                offsets = element_offsets(view)
                assert row.offset_bytes <= offsets.min()
                assert offsets.max() + view.dtype.nbytes <= end
                if specs[0].kind == "linear_state":
                    assert view.offset_bytes % PART_ALIGN_BYTES == 0
        assert end == layout.page_bytes
        assert [layer for row in layout.rows for layer in row.layers] == [spec.layer for spec in specs]
        if not isinstance(specs[0], HiddenTap):
            assert all(len(row.layers) <= row_layers for row in layout.rows)


@given(models(), st.integers(1, 20), st.integers(1, 5))
def test_all_orders_agree_on_shapes_and_sizes(model: ModelSpec, block_tokens: int, row_layers: int) -> None:
    for specs in split_into_groups(model.layers, None).values():
        layouts = [lay_out(specs, block_tokens, row_layers, order) for order in ROW_ORDERS]
        shapes = [[(v.layer, v.part, v.shape) for row in layout.rows for v in row.views] for layout in layouts]
        assert all(shape == shapes[0] for shape in shapes)
        assert len({layout.page_bytes for layout in layouts}) == 1


@pytest.mark.parametrize("row_order", ROW_ORDERS)
def test_strides_follow_the_order(row_order: str) -> None:
    """A larger axis further out has the larger stride: the order is what it says."""
    specs = load_model("qwen3.5-4b").layers
    full = split_into_groups(specs, None)["full"]
    layout = lay_out(full, 16, 4, row_order)
    row = layout.rows[0]
    first = {(view.layer, view.part): view for view in row.views}
    view, other_layer = first[row.layers[0], "k"], first[row.layers[1], "k"]
    strides = {
        "t": view.strides_bytes[0],
        "h": view.strides_bytes[1],
        "l": other_layer.offset_bytes - view.offset_bytes,
        "k": first[row.layers[0], "v"].offset_bytes - view.offset_bytes,
    }
    assert sorted(strides, key=lambda axis: -strides[axis]) == list(row_order)


@pytest.mark.parametrize("tp", [2, 4])
def test_with_heads_outermost_a_rank_is_one_run_of_the_row(tp: int) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 16,
    }

    def rows(tp: int, rank: int) -> PageLayout:
        return lay_out(read_config(config, name="m", tp=tp, rank=rank).layers, 16, 4, "hlkt")

    whole = rows(1, 0)
    for rank in range(tp):
        piece = rows(tp, rank)
        for row, local in zip(whole.rows, piece.rows, strict=True):
            assert local.nbytes * tp == row.nbytes
            start = row.nbytes // tp * rank
            for view, mine in zip(row.views, local.views, strict=True):
                heads = slice(8 // tp * rank, 8 // tp * (rank + 1))
                expected = element_offsets(view)[:, heads] - row.offset_bytes - start
                assert (element_offsets(mine) - local.offset_bytes == expected).all()


def test_rows_are_cut_evenly_and_where_shapes_change() -> None:
    state = split_into_groups(load_model("qwen3.5-397b-a17b").layers, None)["state"]
    assert [len(row.layers) for row in lay_out(state, 16, 4, "hlkt").rows] == [3, 4, 4, 4] * 3
    small, large = (
        read_config({"model_type": "llama", "num_hidden_layers": 1, "head_dim": d}, name="m") for d in (8, 16)
    )
    mixed: list[LayerSpec] = [small.layers[0], large.layers[0]]
    assert len(lay_out(mixed, 16, 4, "hlkt").rows) == 2


def test_a_state_is_cut_into_equal_pages_at_row_boundaries() -> None:
    state = split_into_groups(load_model("qwen3.5-397b-a17b").layers, None)["state"]
    layout = lay_out(state, 16, 4, "hlkt", pages=3)
    assert layout.page_bytes * 3 == layout.item_bytes == sum(spec.nbytes for spec in state)
    assert [row.page for row in layout.rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row.layers for row in layout.rows] == [row.layers for row in lay_out(state, 16, 4, "hlkt").rows]


@pytest.mark.parametrize("order", ["", "hlk", "hlktt", "abcd", "HLKT"])
def test_other_orders_are_refused(order: str) -> None:
    with pytest.raises(PlanError, match="is not an order"):
        check_row_order(order)
