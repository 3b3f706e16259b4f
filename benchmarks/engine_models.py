"""The checkpoints of the benchmarks of engine and server: stock Hugging Face models with seeded random weights.

The large two keep the proportions of the real models at a size two CPU cores can run: Qwen3-Next with three linear
layers to one of full attention and a mixture of experts, Gemma-3 with five windows of 512 tokens to one full layer. The
tiny two have next to no arithmetic, so that what remains is the engine's own time. Linear heads are 128 wide:
vLLM's kernels know no other width.

Nothing here knows of engines or workloads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SEED = 20
MAX_TOKENS = 4096  # of a sequence


class Shape(NamedTuple):
    """One checkpoint to make."""

    vocab_size: int
    config: Callable[[], Any]
    """A transformers config; a function, so that naming the shapes does not import transformers."""
    large: bool


def _qwen3_next(**sizes: Any) -> Any:
    from transformers import Qwen3NextConfig

    num_layers = sizes["num_hidden_layers"]
    return Qwen3NextConfig(
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)],
        max_position_embeddings=MAX_TOKENS,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )


def _gemma3(**sizes: Any) -> Any:
    from transformers import Gemma3TextConfig

    num_layers = sizes["num_hidden_layers"]
    return Gemma3TextConfig(
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)],
        max_position_embeddings=MAX_TOKENS,
        query_pre_attn_scalar=sizes["head_dim"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )


SHAPES = {
    "qwen3-next": Shape(
        16384,
        lambda: _qwen3_next(
            vocab_size=16384,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            intermediate_size=2048,
            moe_intermediate_size=256,
            shared_expert_intermediate_size=256,
            num_experts=16,
            num_experts_per_tok=4,
        ),
        large=True,
    ),
    "gemma-3": Shape(
        16384,
        lambda: _gemma3(
            vocab_size=16384,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            intermediate_size=3072,
            sliding_window=512,
        ),
        large=True,
    ),
    "qwen3-next-tiny": Shape(
        1024,
        lambda: _qwen3_next(
            vocab_size=1024,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            intermediate_size=256,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        large=False,
    ),
    "gemma-3-tiny": Shape(
        1024,
        lambda: _gemma3(
            vocab_size=1024,
            hidden_size=128,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            intermediate_size=256,
            sliding_window=128,
        ),
        large=False,
    ),
}


SERVED = Shape(
    1024,
    lambda: _qwen3_next(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        intermediate_size=512,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    large=False,
)
"""What a server is loaded with clients on."""


def build(name: str, directory: Path, dtype: str, max_tokens: int = MAX_TOKENS) -> int:
    """Write one of `SHAPES` and return its number of parameters."""
    return build_shape(SHAPES[name], directory, dtype, max_tokens)


def build_shape(shape: Shape, directory: Path, dtype: str, max_tokens: int = MAX_TOKENS) -> int:
    """Write one checkpoint and return its number of parameters. The weights depend on the shape and the seed alone."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = shape.config()
    config.max_position_embeddings = max_tokens
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, safe_serialization=True)
    return sum(p.numel() for p in model.parameters())
