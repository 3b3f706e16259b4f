"""Families whose layers all keep latents (MLA)."""

from __future__ import annotations

from dataclasses import replace

from hybridkv.models.config import Config
from hybridkv.models.family import Layers, all_layers, family, given_or
from hybridkv.models.feed_forward import deepseek_experts, dense, longcat_experts
from hybridkv.models.layers import latent_attention


@family(
    "deepseek_v2",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    weight_defaults={
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    compiles=False,  # rotary angles are complex numbers: torch's compiler makes graphs of one size, and wrong ones
)
@family(
    "deepseek_v3",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_mtp_layers": 1,
    },
    weight_defaults={
        "vocab_size": 129280,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
)
@family(
    "glm4_moe_lite",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    weight_defaults={
        "vocab_size": 154880,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
)
@family(
    "mistral4",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
    },
    weight_defaults={
        "vocab_size": 131072,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
    },
)
@family(
    "minicpm3",
    feed_forward=dense,
    defaults={
        "hidden_size": 2560,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
    },
    weight_defaults={
        "vocab_size": 73448,
        "intermediate_size": 6400,
        "tie_word_embeddings": True,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "v_head_dim": None,
    },
)
@family(
    "axk1",
    feed_forward=deepseek_experts,
    defaults={
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    weight_defaults={
        "vocab_size": 163840,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 192,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
)
def deepseek(cfg: Config) -> Layers:
    return Layers(given_or(cfg, all_layers(cfg, "full_attention")), {"full_attention": latent_attention})


@family(
    "longcat_flash",
    feed_forward=longcat_experts,
    defaults={
        "hidden_size": 6144,
        "num_layers": 28,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    weight_defaults={
        "vocab_size": 131072,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    plan_only="each of its decoder layers attends twice, and the engine keeps one past of a kind a decoder layer",
)
def longcat_flash(cfg: Config) -> Layers:
    """Two attention layers in each decoder layer. They are counted one by one, as by transformers' cache."""
    cfg = replace(cfg, values={**cfg.values, "num_hidden_layers": 2 * cfg.integer("num_layers")})
    return Layers(all_layers(cfg, "full_attention"), {"full_attention": latent_attention})
