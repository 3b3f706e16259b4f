"""What specs say of blocks, and what they refuse."""

from __future__ import annotations

import pytest

from hybridkv.errors import ParallelismError
from hybridkv.models import read_config
from hybridkv.sight import Sight
from hybridkv.spec import AttentionLayer, ChunkedLocal, FullAttention, LatentAttention, SlidingWindow


@pytest.mark.parametrize(
    ("spec", "sight", "checkpoint_blocks"),
    [
        (FullAttention(0, ()), Sight(), 0),
        (LatentAttention(0, ()), Sight(), 0),
        (SlidingWindow(0, (), 64), Sight(window=64), 4),
        (SlidingWindow(0, (), 65), Sight(window=65), 4),
        (ChunkedLocal(0, (), 64), Sight(chunk=64), 3),
        (ChunkedLocal(0, (), 63), Sight(chunk=63), 4),
    ],
)
def test_attention_keeps_what_is_in_sight(spec: AttentionLayer, sight: Sight, checkpoint_blocks: int) -> None:
    assert spec.sight == sight
    assert spec.checkpoint_blocks(16) == checkpoint_blocks
    for num_tokens in (0, 1, 70, 1000):
        assert spec.held_blocks(num_tokens, 16) == sight.held_blocks(num_tokens, 16)


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
