"""Tiny stock models of every family the engine runs, and what each of them says when it runs alone.

The oracle is the stock model in float32, one request, one pass, no cache.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine.reference import by_torch
from tests.engine.weights import fill_weights
from tests.tiny import auto_class, is_installed, tiny_config

VOCAB_SIZE = 320  # a byte-level tokenizer needs 256 and a few more
FIRST_PLAIN_TOKEN = 4  # below: padding, begin, end, and the start of a chat message


@dataclass(frozen=True)
class Family:
    """How to make a tiny model, and which parts of a past it keeps."""

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    window: int | None = None  # tokens a window layer sees, itself included
    chunk: int | None = None  # tokens in a chunk of chunk-local attention
    attention: bool = True
    recurrent: bool = False
    conv: bool = False
    rotary: bool = True  # whether position ids reach the logits
    experts: bool = False
    branch_scale: float = 1.0  # of the weights: see fill_weights


def _windowed(
    model_type: str, window: int, *, experts: bool = False, branch_scale: float = 1.0, **overrides: Any
) -> Family:
    overrides = {"sliding_window": window, **overrides}
    return Family(model_type, overrides, window=window, experts=experts, branch_scale=branch_scale)


def _linear(
    model_type: str, *, rotary: bool = True, experts: bool = False, branch_scale: float = 1.0, **overrides: Any
) -> Family:
    return Family(
        model_type, overrides, recurrent=True, conv=True, rotary=rotary, experts=experts, branch_scale=branch_scale
    )


_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _layers(*kinds: str) -> dict[str, Any]:
    """Few layers, which still alternate."""
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}

# Windows, chunks and scan blocks are no multiples of 16 and several times shorter than a test prompt.
FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen3": _windowed("qwen3", 24),
    "gemma3": _windowed("gemma3_text", 20, query_pre_attn_scalar=24, **_layers(*[_WINDOW, _WINDOW, _FULL] * 2)),
    "gemma3n": _windowed(
        "gemma3n_text",
        24,
        branch_scale=0.3,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        **_layers(*[_WINDOW, _FULL] * 3),
    ),
    "gpt_oss": _windowed("gpt_oss", 27, experts=True, **_LOCAL_EXPERTS),
    # Positions 8, 16, 24 ... change the temperature of the layers without rotary positions (every second).
    "llama4": Family(
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 40,
            "floor_scale": 8,
            "attn_scale": 0.3,
            "num_local_experts": 4,
        },
        chunk=40,
        experts=True,
    ),
    "qwen3_next": _linear("qwen3_next", experts=True, **_EXPERTS, **_layers(*[_LINEAR, _FULL] * 2)),
    "qwen3_5": _linear("qwen3_5_text", **_layers(*[_LINEAR] * 3, _FULL)),
    "qwen3_5_moe": _linear("qwen3_5_moe_text", experts=True, **_EXPERTS, **_layers(*[_LINEAR] * 3, _FULL)),
    "falcon_h1": _linear("falcon_h1", mamba_chunk_size=24),
    "nemotron_h": _linear(
        "nemotron_h",
        rotary=False,
        experts=True,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "moe"],
        chunk_size=24,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
    ),
    "bamba": _linear("bamba", mamba_chunk_size=24),
    "granitemoehybrid": _linear(
        "granitemoehybrid", rotary=False, experts=True, attention_multiplier=0.25, mamba_chunk_size=24, **_LOCAL_EXPERTS
    ),
    "zamba2": _linear("zamba2", branch_scale=0.2, use_mem_rope=True, chunk_size=24),
    "jamba": _linear("jamba", rotary=False, branch_scale=0.3, experts=True, **_EXPERTS),
    "lfm2": Family("lfm2", conv=True),
    "kimi_linear": _linear("kimi_linear", rotary=False, experts=True, **_LOCAL_EXPERTS),
    "olmo_hybrid": _linear("olmo_hybrid"),
    "minimax": Family("minimax", {"block_size": 24, **_LOCAL_EXPERTS}, recurrent=True, experts=True),
    "mamba2": Family("mamba2", {"chunk_size": 24}, attention=False, recurrent=True, conv=True, rotary=False),
    "deepseek_v3": Family("deepseek_v3", experts=True),
    # Layers with windows have other numbers of KV heads, and sinks; keys are larger than values.
    "mimo_v2_flash": _windowed("mimo_v2_flash", 25, experts=True, n_routed_experts=8),
    # Layers of full attention have larger heads; later layers read KV of earlier ones.
    "gemma4": _windowed(
        "gemma4_text",
        22,
        branch_scale=0.3,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        **_layers(*[_WINDOW, _FULL] * 3),
    ),
}

# Positions 24, 48 ... change how much queries count.
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
# Positions 16, 32, 48 ... change the scale of queries.
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 0.8,
    "logits_scaling": 1.2,
    "residual_multiplier": 1.3,
    "attention_multiplier": 0.3,
}
_PHI4_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}

# Each keeps what one of the families above keeps. `test_kin` takes them along two paths, and
# HYBRIDKV_FAMILIES=all through every test.
KIN: dict[str, Family] = {
    "qwen2": _windowed("qwen2", 24, use_sliding_window=True, max_window_layers=1),
    "mixtral": Family("mixtral", _LOCAL_EXPERTS, experts=True, branch_scale=2.0),
    "cohere2": _windowed("cohere2", 24, logit_scale=0.9),
    "exaone4": _windowed("exaone4", 24),
    "exaone_moe": _windowed("exaone_moe", 24, experts=True, num_hidden_layers=8, **_EXPERTS),
    "afmoe": _windowed("afmoe", 24, experts=True, branch_scale=1.6, **_EXPERTS),
    "kolibri1": _windowed("kolibri1", 25, experts=True, **_EXPERTS),
    "muse_glimmer": _windowed("muse_glimmer_text", 24, output_multiplier=1.0, qk_scale_factor=1.5),
    "muse_spark": _windowed(
        "muse_spark_text",
        24,
        experts=True,
        num_local_experts=8,
        mlp_layer_types=None,
        output_multiplier=0.8,
        qk_scale_factor=1.0,
        residual_gate_temperature=1.0,
    ),
    "glm4_moe": Family("glm4_moe", {"num_hidden_layers": 4}, experts=True, branch_scale=2.0),
    "minimax_m2": Family("minimax_m2", _LOCAL_EXPERTS, experts=True, branch_scale=2.0),
    "hy_v3": Family("hy_v3", _EXPERTS, experts=True),
    "dots1": _windowed("dots1", 24, experts=True),
    "ernie4_5_moe": Family("ernie4_5_moe", {"moe_num_experts": 8}, experts=True),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", {"num_experts": 8}, experts=True, branch_scale=2.0),
    "olmoe": Family("olmoe", _EXPERTS, experts=True),
    "phimoe": Family("phimoe", _LOCAL_EXPERTS, experts=True, branch_scale=2.0),
    "glm4": Family("glm4"),
    "olmo2": Family("olmo2"),
    "cohere": Family("cohere", {"logit_scale": 0.9}),
    "seed_oss": Family("seed_oss"),
    "ernie4_5": Family("ernie4_5"),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense"),
    "stablelm": Family("stablelm", {"qk_layernorm": False}),
    "arcee": Family("arcee"),
    # Fresh norms of Nemotron multiply by two: a large epsilon takes some of it back.
    "nemotron": Family("nemotron", {"norm_eps": 1.0}),
    "gemma": Family("gemma", {"num_hidden_layers": 3}, branch_scale=2.0),
    "starcoder2": Family("starcoder2", {"use_bias": True, "sliding_window": None}),
    "deepseek_v2": Family("deepseek_v2", experts=True),
    "glm4_moe_lite": Family("glm4_moe_lite", experts=True),
    "mistral4": Family("mistral4", {"rope_parameters": _MISTRAL4_ROPE}, experts=True),
    "minicpm3": Family("minicpm3", {"dim_model_base": 56, "scale_emb": 3, "scale_depth": 2.1}),
    "axk1": Family("axk1", experts=True),
    "bailing_hybrid": _linear("bailing_hybrid", experts=True),
    "lfm2_moe": Family("lfm2_moe", _EXPERTS, conv=True, experts=True),
    "lfm3": Family("lfm3", {"sliding_window": 24}, window=24, conv=True),
    "mamba": Family("mamba", attention=False, recurrent=True, conv=True, rotary=False),
    "falcon_mamba": Family("falcon_mamba", attention=False, recurrent=True, conv=True, rotary=False),
    # One product makes keys and values of full attention, with fewer heads; no layer shares them.
    "gemma4_experts": _windowed(
        "gemma4_text",
        22,
        experts=True,
        branch_scale=0.3,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "gemma4_unified": _windowed("gemma4_unified_text", 22, branch_scale=0.3),
    "laguna": _windowed("laguna", 23, experts=True, branch_scale=2.0, **_EXPERTS),
    # The last layer limits its experts, the one before its shared expert.
    "step3p5": _windowed(
        "step3p5",
        23,
        experts=True,
        branch_scale=2.0,
        n_routed_experts=8,
        query_pre_attn_scalar=2,
        moe_router_scaling_factor=1.5,
        swiglu_limits=[0.0] * 4 + [0.5],
        swiglu_limits_shared=[0.0] * 3 + [0.5, 0.0],
    ),
    "qwen2_moe": _windowed("qwen2_moe", 24, experts=True, **_EXPERTS),
    "qwen3_moe": Family("qwen3_moe", {"num_hidden_layers": 4, **_EXPERTS}, experts=True),
    "mistral": Family("mistral", {"sliding_window": None, "num_hidden_layers": 4}),
    "ministral": _windowed("ministral", 24),
    "ministral3": Family("ministral3", {"rope_parameters": _MINISTRAL3_ROPE}),
    "phi3": Family(
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": _PHI4_ROPE,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
        },
    ),
    "smollm3": _windowed("smollm3", 24, no_rope_layers=[1, 0, 1, 1]),
    "granite": Family("granite", _GRANITE),
    "granite_swa": _windowed("granite_swa", 24, branch_scale=0.6, layer_rope_theta=[0, 1e4, 1e4, 5e5, 0], **_GRANITE),
    "gemma2": _windowed("gemma2", 20, query_pre_attn_scalar=24),
    "olmo3": _windowed("olmo3", 24),
    "qwen3_vl": Family("qwen3_vl_text", {"num_hidden_layers": 4}),
    "qwen3_vl_moe": Family("qwen3_vl_moe_text", {"num_hidden_layers": 4, "head_dim": 32, **_EXPERTS}, experts=True),
    "qwen3_omni_moe": Family("qwen3_omni_moe_text", {"num_hidden_layers": 4, **_EXPERTS}, experts=True),
}

NOT_INSTALLED = {name for name, family in (FAMILIES | KIN).items() if not is_installed(family.model_type)}
"""Families that the installed transformers is too old for. Nothing is tested with them."""
for _name in NOT_INSTALLED:
    (FAMILIES if _name in FAMILIES else KIN).pop(_name)
ALL = FAMILIES | KIN
if os.environ.get("HYBRIDKV_FAMILIES") == "all":
    FAMILIES = ALL


def family_config(name: str, **overrides: Any) -> Any:
    """The config of a family's tiny model."""
    family = ALL[name]
    return tiny_config(family.model_type, **{"vocab_size": VOCAB_SIZE, **family.overrides, **overrides})


def make(config: Any, seed: int = 0, branch_scale: float = 1.0) -> Any:
    """A new model of `config`, float32, in eval mode."""
    # Older releases of transformers take torch's attention for Gemma 2, which leaves the soft cap out.
    caps = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    options = {"attn_implementation": "eager"} if caps else {}
    model = auto_class(config).from_config(config, dtype=torch.float32, **options).eval()
    fill_weights(model, seed, branch_scale)
    return by_torch(model)


@functools.cache
def build(name: str, seed: int = 0) -> Any:
    """The tiny model of a family: one a process, so leave it as it is. Engines get a copy: see `fresh`."""
    return make(family_config(name), seed, ALL[name].branch_scale)


def fresh(name: str, seed: int = 0) -> Any:
    """A copy that may be changed, such as by an engine, which takes a model's attention over."""
    return copy.deepcopy(build(name, seed))


def text_config(model: Any) -> Any:
    """The config of a model's language model, which composite models have inside theirs."""
    return model.config.get_text_config(decoder=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_PLAIN_TOKEN, VOCAB_SIZE, (length,), generator=chance).tolist()  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=512)
def _logits(stock: Any, tokens: tuple[int, ...]) -> Any:
    with torch.inference_mode():
        return stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def oracle_logits(model: Any, token_ids: Sequence[int]) -> Any:
    """Logits [T, V] after each token, from the stock model that runs this request alone in one pass."""
    return _logits(model, tuple(token_ids))
