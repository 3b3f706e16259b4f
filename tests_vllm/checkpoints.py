"""Tiny random checkpoints that vLLM's CPU build runs: hybrids whose layers keep a state or a window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 128
_GAIN = 5.0
"""Random weights are multiplied by it: otherwise what a prompt says hardly changes the logits."""
_FOCUS = 1.0
"""More of it: attention looks at fewer tokens, so that each wrong one counts."""
_FORGETTING = -5.0
"""Logarithm of the rate at which a linear layer forgets: states remember hundreds of tokens."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """`exact`: how far logprobs may differ from vLLM's own with the same chunks; `loose`: with other chunks."""

    name: str
    dtype: str
    exact: float
    loose: float
    config: dict[str, Any]
    unit: int
    """Ends of prompts are found to a multiple of so many tokens."""
    tight_blocks: int
    tight_prompt: int
    """In so many blocks several prompts of so many tokens find room, and 40 more tokens for each do not."""

    def found(self, count: int) -> int:
        """How many of a prompt's tokens are found again, at least."""
        return count // self.unit * self.unit


FAMILIES = {
    "qwen3_next": Family(
        "qwen3_next",
        dtype="bfloat16",  # vLLM's linear attention knows no other on a CPU
        exact=0.01,
        loose=0.25,
        config={
            "head_dim": 32,  # with the sizes below: a uniform block of 384 tokens
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0, 1, 2],  # vLLM wants one layer of experts
        },
        unit=1,
        tight_blocks=14,
        tight_prompt=370,
    ),
    "gemma3": Family(
        "gemma3",
        dtype="float32",
        exact=0.002,
        loose=0.002,
        config={
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        unit=16,
        tight_blocks=22,
        tight_prompt=250,
    ),
}


def save_checkpoint(family: Family, path: Path) -> Path:
    """Write the family's model with the same random weights every time."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    if family.name == "gemma3":
        model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**_COMMON, **family.config))
    else:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**_COMMON, **family.config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(_GAIN)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(_FOCUS)
            elif name.endswith("A_log"):
                parameter.fill_(_FORGETTING)
    model.save_pretrained(path)
    return path
