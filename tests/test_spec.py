"""What specs say of blocks, against counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ParallelismError
from hybridkv.models import read_config
from hybridkv.spec import ChunkedLocal, SlidingWindow


def first_visible(spec: SlidingWindow | ChunkedLocal, position: int) -> int:
    if isinstance(spec, SlidingWindow):
        return max(0, position - spec.window + 1)
    return position // spec.chunk * spec.chunk


@given(st.booleans(), st.integers(1, 40), st.integers(1, 24))
def test_local_groups_hold_and_keep_exactly_what_they_can_see(is_window: bool, reach: int, block: int) -> None:
    spec: SlidingWindow | ChunkedLocal = SlidingWindow(0, (), reach) if is_window else ChunkedLocal(0, (), reach)
    positions = range(4 * reach * block + block)
    touched = [p // block - first_visible(spec, p) // block + 1 for p in positions]
    assert spec.held_blocks(len(positions), block) == max(touched)
    at_boundaries = [n // block - first_visible(spec, n) // block for n in positions if n % block == 0]
    assert spec.checkpoint_blocks(block) == max(at_boundaries)
    assert spec.held_blocks(1, block) == 1


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "deepseek_v3", "num_attention_heads": 6}, "attention heads"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4}, "linear key heads"),
        (
            {"model_type": "llama", "num_attention_heads": 6, "hidden_size": 12, "num_key_value_heads": 1},
            "attention heads",
        ),
    ],
)
def test_what_is_not_kept_must_split_too(config: dict[str, object], what: str) -> None:
    with pytest.raises(ParallelismError, match=f"4 does not divide . {what}"):
        read_config(config, name="m", tp=4)
