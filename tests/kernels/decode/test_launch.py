"""Launches of attention fit the device, and use it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.kernels.decode.launch import MAX_SPLITS, Shape, choose_launch, choose_splits, padded, token_bound
from hybridkv.sight import Sight

PROCESSORS = 132
SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("num_programs", [1, 4, 40, 132, 160, 256, 264])
def test_splits_fill_the_processors(num_programs: int) -> None:
    splits = choose_splits(num_programs, PROCESSORS, 10_000)
    in_use = num_programs * splits
    assert in_use / (-(-in_use // (2 * PROCESSORS)) * 2 * PROCESSORS) > 0.85


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 5000))
def test_splits_are_bounded(num_programs: int, processors: int, num_blocks: int) -> None:
    splits = choose_splits(num_programs, processors, num_blocks)
    assert 1 <= splits <= min(num_blocks, MAX_SPLITS)


def test_full_batches_split_long_rows_only() -> None:
    shape = Shape(64, 4, 4, (256, 256), 2)
    assert choose_launch(shape, 8192, PROCESSORS).splits == 1
    launch = choose_launch(shape, 131072, PROCESSORS)
    assert (launch.splits, launch.min_share) == (16, 2048)


@given(
    st.sampled_from([1, 4, 16, 64, 128]),
    st.sampled_from(
        [(64,), (64, 64), (64, 16, 128), (256, 256), (512, 64), (512, 64, 1024), (512, 512), (128, 64, 128)]
    ),
    st.sampled_from([1, 2, 4]),
)
def test_tiles_fit_in_shared_memory(num_folded: int, tiles: tuple[int, ...], element_bytes: int) -> None:
    launch = choose_launch(Shape(8, 1, num_folded, tiles, element_bytes), 8192, PROCESSORS)
    keys = launch.block_tokens * sum(tiles) * element_bytes
    query = launch.block_heads * (tiles[0] + sum(tile for tile in tiles[1:2] if tile < tiles[0])) * element_bytes
    assert keys * (launch.num_stages - 1) + query < SHARED_BYTES - 16 * 1024
    for size in (launch.block_tokens, launch.block_heads):
        assert size >= 16
        assert size & (size - 1) == 0


def test_bounds() -> None:
    assert token_bound(Sight(), 100) == 100
    assert token_bound(Sight(window=7), 100) == 7
    assert token_bound(Sight(chunk=700), 100) == 100
    assert [padded(dim) for dim in (1, 16, 17, 64, 72)] == [16, 16, 32, 64, 128]
