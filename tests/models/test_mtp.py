"""Layers for multi-token prediction: how many there are, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.errors import ConfigError, ParallelismError
from hybridkv.models import catalogue, load_model, read_config
from hybridkv.models.family import FAMILIES
from hybridkv.spec import FullAttention, LatentAttention, LayerSpec, SlidingWindow

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
NEMOTRON: dict[str, Any] = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "moe"]}


def mtp_of(config: dict[str, Any]) -> list[LayerSpec]:
    """The specs that MTP adds, which come last."""
    without, with_mtp = read_config(config, name="m"), read_config(config, name="m", mtp=True)
    assert with_mtp.layers[: len(without.layers)] == without.layers
    assert with_mtp.num_layers == without.num_layers
    return list(with_mtp.layers[len(without.layers) :])


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("deepseek-v3", LatentAttention, 1),
        ("qwen3-next-80b-a3b", FullAttention, 1),
        ("qwen3.5-397b-a17b", FullAttention, 1),
        ("qwen3.6-27b", FullAttention, 1),
        ("glm-4.5", FullAttention, 1),
        ("ling-3.0-flash", LatentAttention, 1),
        ("nemotron-3-super-120b-a12b", FullAttention, 1),
    ],
)
def test_published_models_keep_one_more_layer(name: str, kind: type[LayerSpec], number: int) -> None:
    without, model = load_model(name), load_model(name, mtp=True)
    assert (without.num_mtp_layers, model.num_mtp_layers) == (0, number)
    added = model.layers[len(without.layers) :]
    assert [type(spec) for spec in added] == [kind] * number
    like = [spec for spec in without.layers if type(spec) is kind][-1]
    assert [(spec.layer, spec.parts) for spec in added] == [
        (without.num_layers + number, like.parts) for number in range(number)
    ]
    assert model.kv_bytes_per_token == without.kv_bytes_per_token + number * like.nbytes
    assert (model.state_bytes, model.hidden_size) == (without.state_bytes, without.hidden_size)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"])
def test_every_name_of_the_number_counts(key: str) -> None:
    assert [spec.layer for spec in mtp_of({**LLAMA, key: 3})] == [2, 3, 4]


def test_types_of_mtp_layers_are_those_of_the_config() -> None:
    hybrid = {"model_type": "gpt_oss", "num_hidden_layers": 2, "head_dim": 64, "num_mtp_layers": 2}
    types = ["sliding_attention", "full_attention"]
    assert [type(spec) for spec in mtp_of({**hybrid, "layer_types": types})] == [FullAttention] * 2
    windows = {**hybrid, "layer_types": types, "mtp_layer_types": ["sliding_attention"] * 2}
    assert [type(spec) for spec in mtp_of(windows)] == [SlidingWindow] * 2
    only_windows = {**hybrid, "layer_types": ["sliding_attention"] * 2}
    assert [type(spec) for spec in mtp_of(only_windows)] == [SlidingWindow] * 2


@pytest.mark.parametrize(
    "given",
    [
        {"num_nextn_predict_layers": 2, "mtp_layers_block_type": ["attention", "moe"]},
        {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"},
        {"num_nextn_predict_layers": 2},
    ],
)
def test_blocks_of_an_mtp_layer_may_keep_nothing(given: dict[str, Any]) -> None:
    assert [type(spec) for spec in mtp_of({**NEMOTRON, **given})] == [FullAttention] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, r"m has no MTP layers: its config sets none of num_nextn_predict_layers, .*; plan without MTP"),
        ({**LLAMA, "num_mtp_layers": 0}, "m has no MTP layers"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, "m has no MTP layers"),
        ({**LLAMA, "num_mtp_layers": "one"}, "'num_nextn_predict_layers' is 'one'"),
        ({**LLAMA, "num_mtp_layers": 2, "mtp_layer_types": ["full_attention"]}, "has 1 types of MTP layers for 2"),
        (
            {**LLAMA, "num_mtp_layers": 1, "mtp_layer_types": ["conv"]},
            "MTP layers of type 'conv', but no decoder layer",
        ),
    ],
)
def test_models_without_such_layers_are_refused(config: dict[str, Any], message: str) -> None:
    assert read_config({**config, "num_mtp_layers": 0}, name="m").num_mtp_layers == 0
    with pytest.raises(ConfigError, match=message):
        read_config(config, name="m", mtp=True)


def test_ranks_are_checked_as_without() -> None:
    with pytest.raises(ParallelismError, match="sizes that work: 1, 2, 4, 8"):
        read_config({**LLAMA, "num_mtp_layers": 1}, name="m", tp=3, mtp=True)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_catalogue_model_has_them_or_is_refused(name: str) -> None:
    try:
        model = load_model(name, mtp=True)
    except ConfigError as error:
        assert str(error).startswith(f"{name} has no MTP layers")  # noqa: PT017
    else:
        assert model.num_mtp_layers > 0
        assert max(spec.layer for spec in model.layers) >= model.num_layers


def test_only_families_with_such_checkpoints_assume_them() -> None:
    assumed = {
        name
        for name, family in FAMILIES.items()
        if {"num_mtp_layers", "num_nextn_predict_layers"} & set(family.defaults)
    }
    assert {"deepseek_v3", "qwen3_next"} <= assumed
