"""Finding and refusing models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.errors import ConfigError, HybridKVError, ParallelismError
from hybridkv.models import catalogue, load_model, read_config
from hybridkv.spec import DType, HiddenTap, Split

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}


def test_layer_types_that_the_model_does_not_read_are_refused() -> None:
    config = {"model_type": "phi3", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ConfigError, match="'sliding_attention' for layer 1, but every layer of a phi3 model"):
        read_config(config, name="m")
    inner = {**config, "model_type": "mistral", "sliding_window": 8}
    with pytest.raises(ConfigError, match="'full_attention' for layer 0, but every layer of a mistral model"):
        read_config({"model_type": "mistral3", "text_config": inner}, name="m")
    assert read_config(inner, name="m").model_type == "ministral"


def test_windows_that_are_switched_off_are_refused() -> None:
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    for model_type in ("qwen2", "qwen2_moe", "qwen3", "smollm3"):
        with pytest.raises(ConfigError, match="layer_types names windows, but use_sliding_window"):
            read_config({"model_type": model_type, **config}, name="m")
        assert read_config({"model_type": model_type, "use_sliding_window": True, **config}, name="m").layers


@pytest.mark.parametrize("model_type", ["ministral", "gemma2", "olmo3", "granite_swa"])
def test_a_model_that_always_needs_a_window_is_refused_without_one(model_type: str) -> None:
    config = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": None}
    with pytest.raises(ConfigError, match="'sliding_window' is None, expected a positive integer"):
        read_config({"model_type": model_type, **config}, name="m")


def test_the_thinker_of_an_omni_model_is_read() -> None:
    text = {"model_type": "qwen3_omni_moe_text", "num_hidden_layers": 3, "head_dim": 128}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text}
    whole = {"model_type": "qwen3_omni_moe", "dtype": "float32", "thinker_config": thinker, "talker_config": {}}
    spec = read_config(whole, name="m")
    assert (spec.model_type, spec.num_layers, spec.dtype) == ("qwen3_omni_moe_text", 3, DType.FLOAT32)
    with pytest.raises(ConfigError, match="thinker_config is 3, expected an object"):
        read_config({**whole, "thinker_config": 3}, name="m")


def test_unknown_layer_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="layer 1 of m has unknown layer type 'indexed_attention'"):
        read_config({**LLAMA, "layer_types": ["full_attention", "indexed_attention"]}, name="m")


def test_unknown_pattern_letter_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 2 of m has unknown layer type 'X'"):
        read_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M-X*"}, name="m")


def test_unknown_family_is_refused_and_known_ones_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown model type 'rwkv'.*qwen3_next"):
        read_config({"model_type": "rwkv"}, name="m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "1 layer types for num_hidden_layers 2"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers' is 'two', expected a positive integer"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0"),
        ({"num_attention_heads": True}, "'num_attention_heads' is True"),
        ({"layer_types": "full_attention"}, "expected a list of strings"),
        ({"dtype": 16}, "dtype is 16"),
        ({"dtype": "int3"}, "config of m: dtype: unknown dtype 'int3'"),
        ({"layer_types": []}, "0 layer types for num_hidden_layers 2"),
        ({"num_hidden_layers": 10**7}, "at most 10000"),
        ({"head_dim": 2**40}, "'head_dim' is 1099511627776"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 cannot be divided by num_key_value_heads 3"),
        ({"num_key_value_heads": 16}, "cannot be divided"),
        ({"hidden_size": 60}, "hidden_size 60 cannot be divided by num_attention_heads 8"),
        ({"hidden_size": 4}, "cannot be divided"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**LLAMA, **change}, name="m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type is None"),
        ({"model_type": 7}, "model_type is 7"),
        ({"model_type": "gemma3", "text_config": {"model_type": ["x"]}}, r"unknown model type \['x'\]"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": "x"}, "'max_window_layers' is 'x'"),
        ({"model_type": "lfm2", "full_attn_idxs": [0], "conv_L_cache": 1}, "over 1 token keeps nothing"),
        ({"model_type": "bamba", "mamba_n_groups": 3}, "128 state-space heads cannot share 3 groups"),
        ({"model_type": "bamba", "hidden_size": 32}, "cannot be divided by mamba_n_heads 128"),
        ({"model_type": "zamba2", "n_mamba_heads": 10**6}, "cannot be divided by n_mamba_heads"),
        ({"model_type": "jamba", "attn_layer_offset": 8}, "not below attn_layer_period 8"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both directions"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "both directions"),
        ({"model_type": "cohere2", "sliding_window": None}, "'sliding_window' is None, expected a positive integer"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "'sliding_window_pattern' is 'LLLG', expected"),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 4}, "leaves none"),
        ({"model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": [1]}, "1 entries for 4 layers"),
        ({"model_type": "lfm2_moe"}, "no layer_types"),
        ({"model_type": "nemotron_h"}, "no layers_block_type"),
        ({"model_type": "bamba", "attn_layer_indices": [40]}, "layer 40 is named"),
        ({"model_type": "zamba2", "num_hidden_layers": 20}, "54 layer types for num_hidden_layers 20"),
        ({"model_type": "kimi_linear", "linear_attn_config": 3}, "expected an object"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
            "each layer from 1 to 27 once",
        ),
        ({"model_type": "gemma3", "text_config": 3}, "expected an object"),
    ],
)
def test_contradictory_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(config, name="m")


def test_sizes_that_do_not_split_are_refused_with_those_that_do() -> None:
    with pytest.raises(
        ParallelismError, match=r"3 does not divide 8 attention heads of m; sizes that work: 1, 2, 4, 8"
    ):
        read_config(LLAMA, name="m", tp=3)


def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    config = {**LLAMA, "num_key_value_heads": 2}
    heads = [read_config(config, name="m", tp=4, rank=rank).layers[0].parts[0].runs[0] for rank in range(4)]
    assert heads == [Split(2, start, 1, repeats=True) for start in (0, 0, 1, 1)]
    with pytest.raises(ParallelismError, match="8 is no multiple of 3 KV heads"):
        read_config({**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 3, "head_dim": 8}, name="m", tp=8)


def test_state_space_groups_follow_their_heads() -> None:
    config = {"model_type": "bamba", "mamba_n_groups": 2, "mamba_d_state": 8}
    conv = read_config(config, name="m", tp=4, rank=3).layers[0].parts[0]
    assert conv.runs[1:] == (Split(16, 8, 8, unit=8, repeats=True),) * 2


@pytest.mark.parametrize(("tp", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_impossible_ranks_are_refused(tp: int, rank: int) -> None:
    with pytest.raises(ParallelismError):
        read_config(LLAMA, name="m", tp=tp, rank=rank)


def test_kv_and_state_dtypes_are_separate() -> None:
    spec = load_model("qwen3-next-80b-a3b", kv_cache_dtype=DType.FLOAT8_E4M3FN, state_dtype=DType.FLOAT16)
    types = {(part.name, part.dtype) for layer in spec.layers for part in layer.parts}
    assert types == {
        ("k", DType.FLOAT8_E4M3FN),
        ("v", DType.FLOAT8_E4M3FN),
        ("conv", DType.BFLOAT16),
        ("recurrent", DType.FLOAT16),
    }


def test_dtypes_come_from_the_config() -> None:
    config = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"], "torch_dtype": "float16"}
    mamba, attention = read_config({**config, "mamba_ssm_cache_dtype": "bfloat16"}, name="m").layers
    assert [part.dtype for part in mamba.parts] == [DType.FLOAT16, DType.BFLOAT16]
    assert attention.parts[0].dtype is DType.FLOAT16
    assert read_config(config, name="m").layers[0].parts[1].dtype is DType.FLOAT32


def test_taps_are_specs_of_their_own() -> None:
    spec = read_config(LLAMA, name="m", taps=[1, 0, 1])
    taps = [layer for layer in spec.layers if isinstance(layer, HiddenTap)]
    assert [tap.layer for tap in taps] == [0, 1]
    assert taps[0].parts[0].shape == (1, 64)
    tapped = read_config(LLAMA, name="m", taps=[0], kv_cache_dtype=DType.FLOAT8_E4M3FN)
    assert tapped.layers[-1].parts[0].dtype is DType.BFLOAT16
    with pytest.raises(ConfigError, match="no layer 3 to tap: choose from 0 to 2"):
        read_config(LLAMA, name="m", taps=[3])


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "QWEN3-NEXT-80B-A3B/", "qwen3-next-80b-a3b-instruct-fp8"]
)
def test_catalogue_names_are_found_as_people_write_them(name: str) -> None:
    assert load_model(name).name == "qwen3-next-80b-a3b"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("ai21labs/AI21-Jamba-1.5-Mini", "jamba-1.5-mini"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nvidia-nemotron-nano-9b-v2"),
    ],
)
def test_what_publishers_put_around_a_name_is_ignored(name: str, entry: str) -> None:
    assert load_model(name).name == entry


def test_names_too_long_for_a_path_are_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown model"):
        load_model("x" * 5000)


def test_unknown_names_get_suggestions() -> None:
    with pytest.raises(ConfigError, match="did you mean qwen3-next-80b-a3b"):
        load_model("qwen3-nxt-80b")


def test_directories_and_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path)
    path = tmp_path / "config.json"
    for text, message in (
        ("{", "cannot read"),
        ("[]", "not an object"),
        ("\xff", "cannot read"),
        ("[" * 200_000, "cannot read"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=message):
            load_model(path)
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert load_model(tmp_path).name == tmp_path.name


@pytest.mark.parametrize("is_nested", [False, True])
def test_published_types_are_planned_as_what_transformers_runs_them_as(is_nested: bool, tmp_path: Path) -> None:
    published = {**catalogue()["kimi-k2"].config, "model_type": "kimi_k2"}
    config = {"model_type": "kimi_k25", "text_config": published} if is_nested else published
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_model(tmp_path)
    assert (spec.model_type, spec.layers) == ("deepseek_v3", load_model("kimi-k2").layers)


def test_dtype_names() -> None:
    assert DType.parse("torch.bfloat16") is DType.parse("BF16") is DType.BFLOAT16
    with pytest.raises(HybridKVError, match="unknown dtype 'int3'"):
        DType.parse("int3")


# --- layers that differ in sizes --------------------------------------------------------------------------------------


def test_fields_of_single_layers_take_the_place_of_the_config_s() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    layers = read_config({**config, "per_layer_config": {"01": {"num_key_value_heads": 2}}}, name="m").layers
    assert [spec.parts[0].shape for spec in layers] == [(4, 16), (2, 16), (4, 16)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"per_layer_config": {"1": {"skip": ["attention"]}}}, "lets layer 1 skip a part of itself"),
        ({"per_layer_config": {"9": {}}}, "expected an object of fields for layers 0 to 1"),
        ({"per_layer_config": [3]}, "expected an object with the fields of layers by number"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [4]}, "has 1 entries for 2 layers"),
        (
            {"model_type": "laguna", "num_attention_heads_per_layer": [8, 12]},
            "num_attention_heads 12 cannot be divided",
        ),
        ({"model_type": "step3p5", "layer_types": ["full_attention"] * 3}, "has 3 layer types for num_hidden_layers 2"),
        ({"model_type": "step3p5", "attention_other_setting": 96}, "attention_other_setting is 96, expected an object"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "attends in both directions"),
        (
            {"model_type": "gemma4_text", "num_kv_shared_layers": 1},
            "is to read the KV of another 'full_attention' layer",
        ),
    ],
)
def test_sizes_that_no_layer_can_have_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({"model_type": "llama", "num_hidden_layers": 2, **config}, name="m")


def test_windows_of_mimo_as_published_count_the_current_token_too() -> None:
    layers = read_config({"model_type": "mimo_v2_flash", "sliding_window_size": 128}, name="m").layers
    assert {spec.group for spec in layers} == {"full", "window129"}
