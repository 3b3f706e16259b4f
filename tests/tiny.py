"""A tiny transformers model of every family: real model code, random weights, sizes that differ from each other."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

from hybridkv.models.family import FAMILIES

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_DELTA: dict[str, Any] = {
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK: dict[str, Any] = {"q_lora_rank": 24, **_GROUPED_EXPERTS}

_FIVE_TO_ONE = [*["sliding_attention"] * 5, "full_attention"]

_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2, "sliding_window": 16},
    "ministral": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "ministral3": {"num_hidden_layers": 2, "head_dim": 24},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 2},
    "qwen2": {"num_hidden_layers": 2},
    "qwen2_moe": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 3,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
        **_MOE,
    },
    "qwen3": {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "qwen3_moe": {"num_hidden_layers": 2, "head_dim": 24, **_MOE},
    "phi3": {"num_hidden_layers": 2, "sliding_window": 24},
    "smollm3": {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 24},
    "granite": {"num_hidden_layers": 2},
    "granite_swa": {"num_hidden_layers": 5, "sliding_window": 16},
    "qwen3_vl_text": {"num_hidden_layers": 2, "head_dim": 24, "rope_parameters": _MROPE},
    "qwen3_vl_moe_text": {
        "num_hidden_layers": 3,
        "head_dim": 24,
        "mlp_only_layers": [1],
        "rope_parameters": _MROPE,
        **_MOE,
    },
    "qwen3_omni_moe_text": {"num_hidden_layers": 2, "rope_parameters": _MROPE, **_MOE},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 16},
    "gemma3_text": {"num_hidden_layers": 7, "head_dim": 24, "sliding_window": 16},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "head_dim": 24,
        "sliding_window": 16,
        "num_kv_shared_layers": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "laurel_rank": 8,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 16},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 16},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 16},
    "exaone_moe": {"num_hidden_layers": 4, "sliding_window": 16, "n_group": 2, "topk_group": 1, **_MOE},
    "afmoe": {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "sliding_window": 16,
        "num_shared_experts": 1,
        "mup_enabled": True,
        **_MOE,
    },
    "kolibri1": {
        "num_hidden_layers": 5,
        "head_dim": 24,
        "sliding_window": 16,
        "shared_expert_intermediate_size": 48,
        **_MOE,
    },
    "muse_glimmer_text": {"num_hidden_layers": 5, "head_dim": 24, "sliding_window": 16},
    "muse_spark_text": {
        "num_hidden_layers": 5,
        "head_dim": 24,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_hidden_size": 48,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    },
    "glm4_moe": {"num_hidden_layers": 3, "head_dim": 24, "use_qk_norm": True, **_GROUPED_EXPERTS},
    "minimax_m2": {"num_hidden_layers": 2, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {"num_hidden_layers": 3, "head_dim": 24, **_MOE},
    "dots1": {
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "max_window_layers": 2,
        "n_shared_experts": 1,
        **_GROUPED_EXPERTS,
    },
    "ernie4_5_moe": {
        "num_hidden_layers": 4,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_interval": 2,
    },
    "hunyuan_v1_moe": {"num_hidden_layers": 2, "head_dim": 24, "num_experts": 4, "moe_topk": 2},
    "olmoe": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {"num_hidden_layers": 2, "head_dim": 24},
    "olmo2": {"num_hidden_layers": 2},
    "cohere": {"num_hidden_layers": 2, "use_qk_norm": True},
    "seed_oss": {"num_hidden_layers": 2, "head_dim": 24},
    "ernie4_5": {"num_hidden_layers": 2, "head_dim": 24},
    "hunyuan_v1_dense": {"num_hidden_layers": 2, "head_dim": 24},
    "stablelm": {"num_hidden_layers": 2, "qk_layernorm": True},
    "arcee": {"num_hidden_layers": 2},
    "nemotron": {"num_hidden_layers": 2},
    "gemma": {"num_hidden_layers": 2, "head_dim": 24},
    "starcoder2": {"num_hidden_layers": 2, "sliding_window": 16, "use_bias": False},
    "llama4_text": {
        "num_hidden_layers": 8,
        "head_dim": 24,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "attention_chunk_size": 32,
    },
    "deepseek_v2": {"num_hidden_layers": 3, **_MLA, **_DEEPSEEK},
    "deepseek_v3": {"num_hidden_layers": 3, **_MLA, **_DEEPSEEK},
    "glm4_moe_lite": {"num_hidden_layers": 3, **_MLA, **_DEEPSEEK},
    "mistral4": {"num_hidden_layers": 3, **_MLA, **_DEEPSEEK},
    "minicpm3": {"num_hidden_layers": 3, "q_lora_rank": 24, **_MLA},
    "axk1": {"num_hidden_layers": 3, **_MLA, **_DEEPSEEK},
    "longcat_flash": {
        "num_layers": 2,
        "head_dim": 8,
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "zero_expert_num": 0,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        **_MLA,
    },
    "qwen3_next": {"num_hidden_layers": 8, "shared_expert_intermediate_size": 32, **_DELTA, **_MOE},
    "qwen3_5_text": {"num_hidden_layers": 8, **_DELTA},
    "qwen3_5_moe_text": {"num_hidden_layers": 8, "shared_expert_intermediate_size": 32, **_DELTA, **_MOE},
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 24,
    },
    "kimi_linear": {
        "num_hidden_layers": 5,
        "linear_attn_config": {
            "full_attn_layers": [2, 5],
            "kda_layers": [1, 3, 4],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **_MLA,
    },
    "bailing_hybrid": {
        "num_hidden_layers": 4,
        "head_dim": 12,
        "layer_group_size": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **_MLA,
    },
    "minimax": {"num_hidden_layers": 4, "head_dim": 24, "num_local_experts": 2},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        **_MOE,
    },
    "lfm3": {"num_hidden_layers": 6, "head_dim": 24, "sliding_window": 16},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 128, **_MAMBA},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2], **_MAMBA},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 2,
        "shared_intermediate_size": 32,
        **_MAMBA,
    },
    "nemotron_h": {
        "head_dim": 24,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "num_mem_blocks": 1,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 2,
        "mamba_d_state": 24,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "num_hidden_layers": 3,
        "chunk_size": 16,
    },
    "mamba": {"num_hidden_layers": 3, "state_size": 24, "intermediate_size": 128},
    "falcon_mamba": {"num_hidden_layers": 3, "state_size": 24, "expand": 3, "intermediate_size": 160},
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 8,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 17,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "laguna": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [8, 4, 4, 8],
        "head_dim": 24,
        "sliding_window": 16,
        "shared_expert_intermediate_size": 32,
        **_MOE,
    },
    "step3p5": {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "num_sliding_attention_heads": 8,
        "head_dim": 24,
        "sliding_window": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 48,
    },
    "gemma4_text": {
        "num_hidden_layers": 9,
        "layer_types": [*_FIVE_TO_ONE, *_FIVE_TO_ONE[-3:]],
        "head_dim": 24,
        "global_head_dim": 40,
        "sliding_window": 16,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    },
    "gemma4_unified_text": {
        "num_hidden_layers": 6,
        "head_dim": 24,
        "global_head_dim": 40,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
    },
}

QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_QWEN_AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
_MUSE: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "out_hidden_size": 128,
    "projector_hidden_size": 32,
}
_MUSE_AUDIO: dict[str, Any] = {
    "patch_sizes": [4, 4],
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_hidden_layers": 2,
    "out_hidden_size": 64,
}
_STEP_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_ratio": 1.5,
    "image_size": 56,
    "patch_size": 14,
    "max_position_embeddings": 16,
}
# Placeholders of images and sounds lie above the text vocabulary of the tests' prompts.
COMPOSITE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl_text": ("qwen3_vl", {"vision_config": QWEN_VISION}),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", {"vision_config": QWEN_VISION}),
    "qwen3_omni_moe_text": ("qwen3_omni_moe_thinker", {"vision_config": QWEN_VISION, "audio_config": _QWEN_AUDIO}),
    "muse_glimmer_text": ("muse_glimmer", _MUSE),
    "muse_spark_text": ("muse_spark", {"audio_config": _MUSE_AUDIO, **_MUSE}),
    "step3p5": ("step3p7", {"vision_config": _STEP_VISION}),
}
"""Language models that transformers has inside of a composite model only: its type, and the rest of its config."""


def is_installed(model_type: str) -> bool:
    """Whether the installed transformers has a family's model. True for types that have no record: they must fail."""
    return model_type not in FAMILIES or FAMILIES[model_type].is_in(version("transformers"))


TINY = {model_type: sizes for model_type, sizes in _SIZES.items() if is_installed(model_type)}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The config of a tiny model, of transformers' own class: other packages register theirs under the same names."""
    sizes = copy.deepcopy({**_BASE, **TINY[model_type], **overrides})  # a config writes into what it is given
    text = config_class(model_type)(**sizes)
    if model_type not in COMPOSITE_ONLY:
        return text
    wrapper, others = COMPOSITE_ONLY[model_type]
    return config_class(wrapper)(text_config=text.to_dict(), **others)


def config_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return getattr(transformers, CONFIG_MAPPING_NAMES[model_type])


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of `config`: some are listed as multimodal models only."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
