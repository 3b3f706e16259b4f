"""The models of the decoding benchmark: random weights made on the device, and a core to step through by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from hybridkv.engine.assembly import Settings, build_core, plan_options
from hybridkv.engine.core import EngineCore
from hybridkv.engine.loading.checkpoint import LoadedModel, load
from hybridkv.store import Store

MAX_TOKENS = 16384
BLOCK_TOKENS = 16
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _qwen3_5(**sizes: Any) -> PretrainedConfig:
    from transformers import Qwen3_5TextConfig

    num_layers = sizes["num_hidden_layers"]
    return Qwen3_5TextConfig(
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)],
        max_position_embeddings=MAX_TOKENS,
        **_NO_SPECIAL_TOKENS,
        **sizes,
    )


def _gemma3(**sizes: Any) -> PretrainedConfig:
    from transformers import Gemma3TextConfig

    num_layers = sizes["num_hidden_layers"]
    return Gemma3TextConfig(
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)],
        max_position_embeddings=MAX_TOKENS,
        query_pre_attn_scalar=sizes["head_dim"],
        **_NO_SPECIAL_TOKENS,
        **sizes,
    )


SHAPES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "qwen3.5-4b": lambda: _qwen3_5(
        vocab_size=32768,
        hidden_size=2560,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        intermediate_size=9216,
    ),
    "gemma-3-4b": lambda: _gemma3(
        vocab_size=32768,
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=10240,
        sliding_window=1024,
    ),
}
TINY_SHAPES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "qwen3.5-4b": lambda: _qwen3_5(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        intermediate_size=128,
    ),
    "gemma-3-4b": lambda: _gemma3(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        sliding_window=32,
    ),
}
"""The same kinds of layers, for a run that only shows that the benchmark works."""


def make_model(config: PretrainedConfig, device: torch.device) -> LoadedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return load(model, device=device)


def make_core(
    loaded: LoadedModel,
    memory_bytes: int,
    max_requests: int,
    *,
    compile: bool,
    graphs: bool,
    store: Store | None = None,
) -> EngineCore:
    """`max_requests`: most requests of a step."""
    kind = loaded.device.type
    settings = Settings(
        plan=plan_options(
            kind, memory=memory_bytes, block_tokens=BLOCK_TOKENS, attn_pack_size=None, row_layers=None, row_order="hlkt"
        ),
        policy="lru",
        max_num_batched_tokens=max_requests * MAX_TOKENS,  # prompts are not computed: the more at once, the better
        max_num_seqs=max_requests,
        max_model_len=None,
        seed=0,
        stream="auto",
        load_timeout_s=60.0,
        compile=compile,
        graphs=graphs,
    )
    return build_core(loaded, settings, store)
