"""Model types without a record: planned from their layer types, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridkv.errors import ConfigError, ParallelismError
from hybridkv.models import read_compute, read_config
from hybridkv.models.families.refused import REFUSED
from hybridkv.models.family import FAMILIES

PLAIN: dict[str, Any] = {
    "model_type": "foo",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
STOCK_LAYERS = {
    "full_attention": "DynamicLayer",
    "sliding_window": "DynamicSlidingWindowLayer",
    "chunked_local": "DynamicSlidingWindowLayer",
    "linear_state": "LinearAttentionLayer",
}


def with_types(*types: str, **fields: Any) -> dict[str, Any]:
    return {**PLAIN, "num_hidden_layers": len(types), "layer_types": list(types), **fields}


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (PLAIN, {"model_type": "llama"}),
        ({**PLAIN, "head_dim": 24}, {"model_type": "qwen3"}),
        (with_types("sliding_attention", "full_attention", sliding_window=7), {"model_type": "gpt_oss", "head_dim": 8}),
        (with_types("full_attention", "linear_attention", **DELTA), {"model_type": "qwen3_next", "head_dim": 8}),
        (with_types("conv", "full_attention", "attention", conv_L_cache=3), {"model_type": "lfm2"}),
    ],
)
def test_layer_types_say_what_is_kept(config: dict[str, Any], known: dict[str, Any]) -> None:
    spec = read_config(config, name="m")
    assert spec.layers == read_config({**config, **known}, name="m").layers
    assert not spec.has_record
    assert spec.model_type == "foo"
    assert read_config({**config, **known}, name="m").has_record


def test_chunks_are_read() -> None:
    spec = read_config(with_types("chunked_attention", "full_attention", attention_chunk_size=9), name="m")
    assert [layer.kind for layer in spec.layers] == ["chunked_local", "full_attention"]


def test_nested_configs_of_unknown_types_are_read() -> None:
    nested = {"model_type": "foo_vl", "text_config": {**PLAIN, "model_type": "foo_vl_text"}}
    spec = read_config(nested, name="m")
    assert spec.model_type == "foo_vl_text"
    assert spec.layers == read_config(PLAIN, name="m").layers


def test_windows_that_are_switched_off_do_not_count() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    assert read_config({**PLAIN, **off}, name="m").layers == read_config(PLAIN, name="m").layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 512}, "'kv_lora_rank', a sign of latents"),
        ({"v_head_dim": 16}, "'v_head_dim', a sign of latents"),
        ({"index_topk": 2048}, "'index_topk', a sign of index keys"),
        ({"indexer_types": ["full"]}, "'indexer_types', a sign of index keys"),
        ({"compress_ratios": [4]}, "'compress_ratios', a sign of compressed tokens"),
        ({"sparse_attention_config": {"topk": 4}}, "'sparse_attention_config', a sign of sparse attention"),
        ({"mamba_d_state": 128}, "'mamba_d_state', a sign of states"),
        ({"ssm_state_size": 128}, "'ssm_state_size', a sign of states"),
        ({"conv_kernel_size": 4}, "'conv_kernel_size', a sign of convolutions"),
        ({"num_kv_shared_layers": 2}, "'num_kv_shared_layers', a sign of keys and values that layers share"),
        ({"use_cla": True}, "'use_cla', a sign of keys and values that layers share"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "'per_layer_config', a sign of sizes that differ"),
        ({"swa_num_key_value_heads": 4}, "'swa_num_key_value_heads', a sign of sizes that differ"),
        ({"attention_k_eq_v": True}, "'attention_k_eq_v', a sign of keys that are values"),
        ({"kv_channels": 16}, "'kv_channels', a sign of sizes of another name"),
        ({"attention_window_size": 16}, "'attention_window_size', a sign of windows"),
        ({"is_encoder_decoder": True}, "'is_encoder_decoder', a sign of attention to another"),
        ({"use_bidirectional_attention": True}, "a sign of attention in both directions"),
        ({"num_key_value_heads": None}, "'num_key_value_heads' is None"),
        ({"num_key_value_heads": [2, 4]}, r"'num_key_value_heads' is \[2, 4\]"),
        ({"layer_types": ["full_attention"] * 3 + ["indexed"]}, "layer 3 of m has unknown layer type 'indexed'"),
        ({"layer_types": ["full_attention"]}, "1 layer types for num_hidden_layers 4"),
        ({"layer_types": ["linear_attention"] * 4}, "no 'linear_num_key_heads'"),
        ({"layer_types": ["sliding_attention"] * 4}, "no 'sliding_window'"),
    ],
)
def test_signs_of_another_past_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"m is of the unknown model type 'foo', .*{message}.*; we read .*qwen3_next"):
        read_config({**PLAIN, **change}, name="m")


@pytest.mark.parametrize(
    "sign",
    [
        {"sliding_window": 128},
        {"attention_chunk_size": 128},
        {"full_attention_interval": 4},
        {"sliding_window_pattern": 6},
        {"attn_layer_period": 8},
        {"layers_block_type": ["attention"]},
        {"linear_num_key_heads": 16},
        {"global_attn_every_n_layers": 4},
    ],
)
def test_layers_of_several_kinds_must_be_listed(sign: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"but no layer_types: add the type of each layer to config\.json"):
        read_config({**PLAIN, **sign}, name="m")
    listed = with_types("full_attention", "full_attention", **sign)
    assert len(read_config(listed, name="m").layers) == 2


def test_sizes_that_do_not_split_are_refused_as_elsewhere() -> None:
    with pytest.raises(ParallelismError, match=r"3 does not divide .* sizes that work: 1, 2, 4, 8"):
        read_config(PLAIN, name="m", tp=3)


def test_weights_are_taken_from_the_name_or_not_known() -> None:
    assert read_compute(PLAIN, name="foo-8b").total_parameters == 8e9
    with pytest.raises(ConfigError, match="unknown model type 'foo'"):
        read_compute(PLAIN, name="foo")


def test_mtp_layers_are_read() -> None:
    spec = read_config({**PLAIN, "num_nextn_predict_layers": 1}, name="m", mtp=True)
    assert [layer.layer for layer in spec.layers] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES) - set(REFUSED)))
def test_plans_agree_with_the_cache_of_transformers(model_type: str) -> None:
    """Of each type that transformers has: its layers keep what we plan, or we refuse it by name."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:
        pytest.skip("its config class has no defaults")
    if config.get_text_config(decoder=True).model_type in FAMILIES:
        pytest.skip("its language model has a record")
    try:
        spec = read_config(json.loads(config.to_json_string(use_diff=False)), name="m")
    except ConfigError as error:
        reasons = ("unknown model type", "which hybridkv does not know yet", "num_kv_shared_layers")  # of drafters: all
        assert any(reason in str(error) for reason in reasons)  # noqa: PT017
        return
    assert [STOCK_LAYERS[layer.kind] for layer in spec.layers] == [
        type(layer).__name__ for layer in DynamicCache(config=config).layers
    ]
