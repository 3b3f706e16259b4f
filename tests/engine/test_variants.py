"""What published checkpoints switch on or off and the zoo's models leave as it is: each against the stock model.

One short life a variant: chunked prefill beside decodes, a prompt sent again, and too little room for all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridkv.errors import RequestError
from tests.engine.drive import GREEDY, Driver, check_greedy, memory_for
from tests.engine.zoo import ALL, family_config, make, prompt


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "factor": 4.0,
    "original_max_position_embeddings": 96,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
SHORT_LONGROPE = {
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [2.0 + i for i in range(4)],
}
MSCALE = {"short_mscale": 1.1, "long_mscale": 1.2}
MROPE = {"partial_rotary_factor": 0.5, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FALCON_MULTIPLIERS = {
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.3,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.5,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.1,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 0.6],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.5,
}
GRANITE_MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.1,
}
MINIMAX_FACTORS = {
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.7,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.8,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.6,
}
ADAPTERS = {"use_shared_attention_adapter": True, "adapter_rank": 6, "num_key_value_heads": 4}

TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: linear rope, tied": ("llama", {**rope("linear", factor=4.0), "tie_word_embeddings": True}),
    "llama: yarn, biases": ("llama", {**rope("yarn", **YARN), "attention_bias": True, "mlp_bias": True}),
    "llama: llama3 rope, heads of 64": ("llama", {**rope("llama3", **LLAMA3), "head_dim": 64}),
    "llama: dynamic rope, heads of 80": ("llama", {**rope("dynamic", factor=4.0), "head_dim": 80}),
    "llama: one wide KV head": ("llama", {"num_key_value_heads": 1, "head_dim": 192}),
    "llama: no shared KV heads": ("llama", {"num_key_value_heads": 4, "head_dim": 256}),
    "qwen3: yarn, no windows": ("qwen3", {**rope("yarn", **YARN), "use_sliding_window": False}),
    "qwen3: windows alone": ("qwen3", {"max_window_layers": 0, "attention_bias": True}),
    **{f"qwen3: window {n}": ("qwen3", {"sliding_window": n}) for n in (1, 2, 5, 16, 17, 500)},
    "qwen2: no biases of QKV, windows alone": ("qwen2", {"max_window_layers": 0, "num_key_value_heads": 4}),
    "qwen2_moe: no windows, some dense": (
        "qwen2_moe",
        {"use_sliding_window": False, "decoder_sparse_step": 2, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen2_moe: windows as given": ("qwen2_moe", {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}),
    "qwen3_moe: windows, biases": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 20, "attention_bias": True},
    ),
    "mistral: windows": ("mistral", {"sliding_window": 20, "head_dim": None, "tie_word_embeddings": True}),
    "mixtral: windows": ("mixtral", {"sliding_window": 20, "num_key_value_heads": 4}),
    "ministral: windows alone": ("ministral", {"layer_types": None, "num_key_value_heads": 4}),
    "ministral3: windows": ("ministral3", {"sliding_window": 20}),
    "phi3: windows, whole rotary": ("phi3", {"sliding_window": 20, "rope_parameters": None}),
    "phi3: partial rotary, tied": (
        "phi3",
        {**rope("default", partial_rotary_factor=0.5), "tie_word_embeddings": True, "num_key_value_heads": None},
    ),
    "smollm3: no windows": ("smollm3", {"use_sliding_window": False, "sliding_window": None, "attention_bias": True}),
    "smollm3: windows as given": ("smollm3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "granite: biases, tied, yarn": (
        "granite",
        {**rope("yarn", **YARN), "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granite_swa: rope everywhere, untied": (
        "granite_swa",
        {"layer_rope_theta": None, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "granite_swa: windows as given": ("granite_swa", {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}),
    "gemma2: no soft caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2: windows as given": (
        "gemma2",
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "attention_bias": True},
    ),
    "olmo3: yarn in full layers": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "olmo3: every other window": ("olmo3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "qwen3_vl: biases, yarn": (
        "qwen3_vl",
        {**rope("yarn", mrope_section=[2, 1, 1], mrope_interleaved=True, **YARN), "attention_bias": True},
    ),
    "qwen3_vl_moe: some dense": ("qwen3_vl_moe", {"decoder_sparse_step": 2, "head_dim": None}),
    "gemma3: soft caps, untied": (
        "gemma3",
        {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0, "tie_word_embeddings": False},
    ),
    "gemma3: rope by layer type": ("gemma3", {"rope_parameters": BY_LAYER_TYPE, "attention_bias": True}),
    "gemma3n: sparse": ("gemma3n", {"activation_sparsity_pattern": [0.9] * 3 + [0.0] * 3}),
    "gemma3n: no KV shared": ("gemma3n", {"num_kv_shared_layers": 0}),
    "gemma3n: three inputs": ("gemma3n", {"altup_num_inputs": 3, "final_logit_softcapping": 5.0}),
    "gemma4: heads of 512": ("gemma4", {"global_head_dim": 512, "head_dim": 256}),
    "gemma4: one product, soft caps": (
        "gemma4",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    ),
    "gemma4: no KV shared": ("gemma4", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    "mimo_v2_flash: heads of 192 and 128": ("mimo_v2_flash", {"head_dim": 192, "v_head_dim": 128}),
    "mimo_v2_flash: groups, biases": (
        "mimo_v2_flash",
        {"n_group": 2, "topk_group": 1, "attention_bias": True, "attention_value_scale": None},
    ),
    "laguna: gate by element": ("laguna", {"gating": "per-element", "moe_router_logit_softcapping": 5.0}),
    "laguna: yarn in full attention": (
        "laguna",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "attention_bias": True,
        },
    ),
    "step3p5: biases, no limits": ("step3p5", {"attention_bias": True, "mlp_bias": True, "swiglu_limits": None}),
    "step3p5: rope as published": (
        "step3p5",
        {
            "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },
    ),
    "gpt_oss: yarn": ("gpt_oss", rope("yarn", truncate=False, beta_fast=32.0, beta_slow=1.0, **YARN)),
    "gpt_oss: no biases": ("gpt_oss", {"attention_bias": False, "swiglu_limit": 1.0}),
    "llama4: llama3 rope": ("llama4", {**rope("llama3", **LLAMA3), "attn_temperature_tuning": False}),
    "llama4: every other expert": ("llama4", {"use_qk_norm": False, "interleave_moe_layer_step": 2}),
    "llama4: chunks alone": ("llama4", {"no_rope_layers": [1] * 4}),
    "llama4: four without rope": ("llama4", {"no_rope_layers": [0] * 4 + [1] * 2, "num_hidden_layers": 6}),
    **{f"llama4: chunk {n}": ("llama4", {"attention_chunk_size": n}) for n in (1, 5, 16)},
    "qwen3_next: partial yarn": ("qwen3_next", rope("yarn", partial_rotary_factor=0.5, **YARN)),
    "qwen3_next: some dense": (
        "qwen3_next",
        {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2, "attention_bias": True, "norm_topk_prob": False},
    ),
    "qwen3_next: other heads": ("qwen3_next", {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 2}),
    "qwen3_5: mrope": ("qwen3_5", rope("default", **MROPE)),
    "qwen3_5: mrope, yarn": ("qwen3_5", rope("yarn", **MROPE, **YARN)),
    "falcon_h1: multipliers": ("falcon_h1", FALCON_MULTIPLIERS),
    "falcon_h1: norm after gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon_h1: norm before gate": ("falcon_h1", {"mamba_rms_norm": True, "time_step_limit": (0.2, 0.4)}),
    "falcon_h1: biases": (
        "falcon_h1",
        {
            "attention_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
            "head_dim": 32,
        },
    ),
    "nemotron_h: latent experts": ("nemotron_h", {"moe_latent_size": 40, "routed_scaling_factor": 2.5}),
    "nemotron_h: groups, limits": (
        "nemotron_h",
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "time_step_limit": (0.2, 0.4)},
    ),
    "nemotron_h: biases": (
        "nemotron_h",
        {"use_bias": True, "mlp_bias": True, "attention_bias": True, "use_conv_bias": False, "mamba_proj_bias": True},
    ),
    "nemotron_h: a window it ignores": ("nemotron_h", {"sliding_window": 20, "tie_word_embeddings": True}),
    "bamba: partial rotary": ("bamba", {**rope("default", partial_rotary_factor=0.5), "mamba_conv_bias": False}),
    "bamba: biases, limits": (
        "bamba",
        {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "time_step_limit": (0.2, 0.4)},
    ),
    "bamba: one group, short conv": ("bamba", {"mamba_n_groups": 1, "mamba_d_conv": 3}),
    "granitemoehybrid: rope, dense": (
        "granitemoehybrid",
        {"position_embedding_type": "rope", "num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    "granitemoehybrid: multipliers, tied": (
        "granitemoehybrid",
        {**GRANITE_MULTIPLIERS, "tie_word_embeddings": True, "position_embedding_type": "nope"},
    ),
    "granitemoehybrid: attention alone": ("granitemoehybrid", {"layer_types": ["attention"] * 4}),
    "granitemoehybrid: Mamba alone": ("granitemoehybrid", {"layer_types": ["mamba"] * 4}),
    "zamba2: adapters": ("zamba2", {**ADAPTERS, "use_mem_rope": False}),
    "zamba2: adapters of two blocks": ("zamba2", {**ADAPTERS, "num_mem_blocks": 2, "use_long_context": True}),
    "zamba2: biases": ("zamba2", {"add_bias_linear": True, "use_conv_bias": False}),
    "jamba: biases": ("jamba", {"mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_dt_rank": 5}),
    "jamba: dense": ("jamba", {"use_associative_scan": False, "num_experts": 1, "num_experts_per_tok": 1}),
    "lfm2: bias, long conv": ("lfm2", {"conv_bias": True, "tie_word_embeddings": False, "conv_L_cache": 5}),
    "kimi_linear: query latents": ("kimi_linear", {"q_lora_rank": 12, "n_group": 2, "norm_topk_prob": False}),
    "kimi_linear: no latents": ("kimi_linear", {"layer_types": ["linear_attention"] * 5}),
    "olmo_hybrid: no rope": ("olmo_hybrid", {"rope_parameters": None, "attention_bias": True}),
    "olmo_hybrid: yarn, small beta": ("olmo_hybrid", {**rope("yarn", **YARN), "linear_allow_neg_eigval": False}),
    "minimax: long blocks, window": ("minimax", {"block_size": 256, "sliding_window": 20}),
    "minimax: short blocks, factors": ("minimax", {"block_size": 5, **MINIMAX_FACTORS}),
    "mamba2: biases, tied": ("mamba2", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    "mamba2: limits": ("mamba2", {"time_step_limit": (0.2, 0.4), "conv_kernel": 3}),
    "cohere2: biases, untied": ("cohere2", {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.3}),
    "cohere2: windows alone": ("cohere2", {"layer_types": ["sliding_attention"] * 4, "num_key_value_heads": 4}),
    "exaone4: no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4: a pattern beside the types": ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": TYPES}),
    "exaone4: llama3 rope, tied": ("exaone4", {**rope("llama3", **LLAMA3), "tie_word_embeddings": True}),
    "exaone_moe: one group, two shared": (
        "exaone_moe",
        {"n_group": 1, "num_shared_experts": 2, "num_hidden_layers": 4},
    ),
    "exaone_moe: experts in some layers": (
        "exaone_moe",
        {"mlp_layer_types": ["sparse", "dense"] * 4, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "afmoe: biases, tied": (
        "afmoe",
        {"attention_bias": True, "tie_word_embeddings": True, "num_dense_layers": 2, "mup_enabled": False},
    ),
    "afmoe: full at every second": ("afmoe", {"global_attn_every_n_layers": 2, "route_scale": 2.4, "head_dim": 16}),
    "kolibri1: normed, tied": ("kolibri1", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "glm4_moe: biases, no norms": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe: all rotary, experts alone": (
        "glm4_moe",
        {**rope("default", partial_rotary_factor=1.0), "first_k_dense_replace": 0, "n_group": 1, "n_shared_experts": 2},
    ),
    "minimax_m2: partial rotary": ("minimax_m2", {"rotary_dim": 12, "tie_word_embeddings": True}),
    "hy_v3: experts alone": ("hy_v3", {"mlp_layer_types": ["sparse"] * 3, "enable_moe_fp32_combine": False}),
    "dots1: no windows, biases": ("dots1", {"sliding_window": None, "attention_bias": True, "norm_topk_prob": True}),
    "dots1: windows alone": ("dots1", {"max_window_layers": 0, "num_key_value_heads": 4}),
    "ernie4_5_moe: experts in the middle": (
        "ernie4_5_moe",
        {"moe_layer_interval": 1, "moe_layer_end_index": 2, "moe_num_shared_experts": 0, "use_bias": True},
    ),
    "hunyuan_v1_moe: other numbers of experts": ("hunyuan_v1_moe", {"moe_topk": [1, 3], "attention_bias": True}),
    "hunyuan_v1_moe: alpha": ("hunyuan_v1_moe", rope("dynamic", alpha=1000.0, factor=1.0)),
    "olmoe: clipped": ("olmoe", {"clip_qkv": 0.8, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "phimoe: window, biases": ("phimoe", {"sliding_window": 24, "attention_bias": True, "lm_head_bias": True}),
    "phimoe: longrope": ("phimoe", rope("longrope", **{**LONGROPE, "original_max_position_embeddings": 128}, **MSCALE)),
    "muse_glimmer: all rotary, biases": (
        "muse_glimmer",
        {"layer_rope_theta": [10000.0] * 5, "attention_bias": True, "output_multiplier": 0.2},
    ),
    "muse_spark: dense first": ("muse_spark", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}),
    "glm4: no biases, yarn": ("glm4", {**rope("yarn", partial_rotary_factor=0.5, **YARN), "attention_bias": False}),
    "olmo2: biases, yarn": ("olmo2", {**rope("yarn", **YARN), "attention_bias": True, "num_key_value_heads": 4}),
    "cohere: no norms, biases": ("cohere", {"use_qk_norm": False, "attention_bias": True, "logit_scale": 0.3}),
    "seed_oss: biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "ernie4_5: biases, untied": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense: alpha": (
        "hunyuan_v1_dense",
        {**rope("dynamic", alpha=1000.0, factor=1.0), "attention_bias": True},
    ),
    "stablelm: norms, side by side": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm: half rotary": ("stablelm", rope("default", partial_rotary_factor=0.5)),
    "arcee: biases, tied": ("arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "nemotron: biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "gemma: one KV head, biases": ("gemma", {"num_key_value_heads": 1, "attention_bias": True}),
    "starcoder2: window, untied": ("starcoder2", {"sliding_window": 24, "tie_word_embeddings": False}),
    "deepseek_v3: no query latents": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "v_head_dim": 40}),
    "deepseek_v3: yarn": ("deepseek_v3", rope("yarn", mscale=1.0, mscale_all_dim=1.0, **YARN)),
    "deepseek_v2: groups, no query latents": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "q_lora_rank": None, "attention_bias": True, "v_head_dim": 40},
    ),
    "deepseek_v2: yarn": ("deepseek_v2", rope("yarn", mscale=0.707, mscale_all_dim=0.707, **YARN)),
    "glm4_moe_lite: halves turned": (
        "glm4_moe_lite",
        {"rope_interleave": False, "q_lora_rank": None, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mistral4: dense first, halves turned": (
        "mistral4",
        {"first_k_dense_replace": 2, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    ),
    "minicpm3: longrope": ("minicpm3", rope("longrope", **{**LONGROPE, **SHORT_LONGROPE})),
    "minicpm3: untied, no query latents": (
        "minicpm3",
        {"tie_word_embeddings": False, "q_lora_rank": None, "attention_bias": True, "v_head_dim": None},
    ),
    "axk1: every other layer dense, yarn": (
        "axk1",
        {"moe_layer_freq": 2, "num_hidden_layers": 4, **rope("yarn", mscale=1.0, mscale_all_dim=1.0, **YARN)},
    ),
    "bailing_hybrid: open gate": (
        "bailing_hybrid",
        {"kda_safe_gate": False, "short_conv_kernel_size": 3, "attention_bias": True, **rope("yarn", **YARN)},
    ),
    "bailing_hybrid: no latents": ("bailing_hybrid", {"layer_types": ["linear_attention"] * 4}),
    "lfm2_moe: biases, long conv": (
        "lfm2_moe",
        {"conv_bias": True, "conv_L_cache": 5, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "lfm3: no gates, no norms": (
        "lfm3",
        {"use_attention_gate": False, "use_sandwich_norm": False, "conv_bias": True, "attention_bias": True},
    ),
    "lfm3: short conv, no windows": (
        "lfm3",
        {"conv_L_cache": 2, "layer_types": ["full_attention", "conv"] * 3, "tie_word_embeddings": False},
    ),
    "mamba: biases, untied": (
        "mamba",
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 5},
    ),
    "falcon_mamba: biases, short conv": ("falcon_mamba", {"use_bias": True, "conv_kernel": 3, "state_size": 16}),
    "deepseek_v3: halves turned": ("deepseek_v3", {"rope_interleave": False, "n_shared_experts": 2}),
}


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family in ALL])
def test_a_variant_gives_what_the_stock_model_gives(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    model = make(family_config(family, **overrides), branch_scale=ALL[family].branch_scale)
    driver = Driver(model, memory_bytes=memory_for(model, 2, 100), max_num_batched_tokens=40)
    driver.add("long", prompt(90, 1), replace(GREEDY, max_tokens=6))
    driver.add("short", prompt(5, 2), replace(GREEDY, max_tokens=20))
    driver.step()
    driver.add("middle", prompt(51, 3), replace(GREEDY, max_tokens=14))
    driver.run()
    driver.add("again", prompt(90, 1), replace(GREEDY, max_tokens=3))
    driver.add("other", prompt(51, 3)[:40] + prompt(9, 4), replace(GREEDY, max_tokens=3))
    for name in driver.run():
        check_greedy(driver, name)


PHI = {"max_position_embeddings": 384, "original_max_position_embeddings": 96}


@pytest.mark.parametrize(("family", "overrides"), [("llama", rope("longrope", **LONGROPE)), ("phi3", PHI)])
def test_longrope_ends_where_it_would_turn_all_keys_anew(family: str, overrides: dict[str, Any]) -> None:
    driver = Driver(make(family_config(family, **overrides)))
    driver.add("to the end", prompt(90, 1), replace(GREEDY, max_tokens=50))
    driver.add("beside", prompt(50, 2))
    result = driver.run()["to the end"]
    check_greedy(driver, "to the end")
    assert len(result.prompt_token_ids + result.token_ids) == 96
    with pytest.raises(RequestError, match="within 96"):
        driver.add("longer", prompt(96, 3))
