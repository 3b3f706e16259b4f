"""What one page size for all layers costs: figures published by users of vLLM."""

from __future__ import annotations

import pytest

from hybridkv.errors import ConfigError, PlanError
from hybridkv.models import catalogue, load_model, read_config
from hybridkv.models.family import FAMILIES
from hybridkv.plan import PlanOptions, make_plan, uniform_pack_sizes, uniform_plan
from hybridkv.spec import DType, FullAttention, ModelSpec

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "tp", "state_dtype", "block"),
    [
        ("qwen3-next-80b-a3b", 1, "fp32", 1056),
        ("qwen3-next-80b-a3b", 1, "bf16", 544),
        ("qwen3.5-397b-a17b", 2, "fp32", 2096),
        ("qwen3.5-397b-a17b", 8, "fp32", 528),
        ("qwen3.5-35b-a3b", 1, "fp32", 1056),
        ("qwen3.6-27b", 1, "fp32", 784),
        ("qwen3.5-4b", 1, "fp32", 528),
        ("qwen3.5-0.8b", 1, "fp32", 544),
        ("nemotron-h-8b", 1, "fp32", 1040),
        ("nemotron-3-nano-30b-a3b", 1, "fp32", 2096),
        ("granite-4.0-h-small", 1, "bf16", 528),
        ("jamba-1.5-mini", 1, "bf16", 80),
        ("falcon-h1-34b", 1, "bf16", 1040),
        ("falcon-h1-34b", 1, "fp32", 2064),
        ("lfm2-8b-a1b", 1, "fp32", 16),
        ("kimi-linear-48b-a3b", 1, "fp32", 1920),
        ("gpt-oss-120b", 1, "fp32", 16),
        ("gemma-3-27b", 1, "fp32", 16),
    ],
)
def test_published_blocks(name: str, tp: int, state_dtype: str, block: int) -> None:
    model = load_model(name, tp=tp, state_dtype=DType.parse(state_dtype))
    assert uniform_plan(model, 80 * GIB).block_tokens == block


def test_packing_shortens_the_block() -> None:
    model = load_model("qwen3.5-397b-a17b", tp=2)
    blocks = {
        name: uniform_plan(model, 80 * GIB, size).block_tokens for name, size in uniform_pack_sizes(model).items()
    }
    assert blocks == {"1": 2096, "2": 1056, "4": 528, "8": 272, "all": 144}


def test_a_small_state_is_padded_to_a_page() -> None:
    assert uniform_plan(load_model("lfm2-8b-a1b"), 80 * GIB).padding_ratio == 0.75


def test_groups_of_unequal_length_are_padded_with_empty_layers() -> None:
    """Gemma-3-27B: 52 window layers in groups of 10 leave 8 of 60 places empty."""
    assert uniform_plan(load_model("gemma-3-27b"), 80 * GIB).padding_ratio == pytest.approx(8 / 60)


def test_models_without_attention_have_no_block() -> None:
    model = load_model("mamba2-2.7b")
    uniform = uniform_plan(model, 80 * GIB)
    assert uniform.block_tokens is None
    assert uniform.max_requests(32768) == 80 * GIB // model.state_bytes - 1
    assert uniform_pack_sizes(model) == {"1": 1}


def test_nonsense_is_refused() -> None:
    model = load_model("gpt-oss-120b")
    with pytest.raises(PlanError, match="pack size 0"):
        uniform_plan(model, 80 * GIB, 0)
    with pytest.raises(PlanError, match="requests of 0 tokens"):
        uniform_plan(model, 80 * GIB).max_requests(0)


def test_kinds_with_smaller_pages_hold_more_tokens_in_one() -> None:
    """gpt-oss with two full layers a page: a window layer's page holds twice the tokens."""
    uniform = uniform_plan(load_model("gpt-oss-120b"), 80 * GIB, 2)
    assert sorted(bucket.block_tokens for bucket in uniform.buckets) == [16, 32]


def test_groups_are_as_long_as_the_longest_kind_if_that_is_close() -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 5, "head_dim": 64}
    for types, units in (("fffww", 2), ("ffwww", 2), ("ffffw", 1)):
        names = [{"f": "full_attention", "w": "sliding_attention"}[letter] for letter in types]
        model = read_config({**config, "layer_types": names}, name="m")
        assert uniform_plan(model, GIB).group_units == units
    names = ["full_attention"] * 4 + ["sliding_attention"] * 3
    model = read_config({**config, "num_hidden_layers": 7, "layer_types": names}, name="m")
    assert uniform_plan(model, GIB).group_units == 4


def test_requests_that_fit() -> None:
    """Qwen3.5-397B TP2 by hand: 16 blocks of KV and 3 of states, each 15 layers of 2,096 x 1,024 bytes."""
    uniform = uniform_plan(load_model("qwen3.5-397b-a17b", tp=2), 80 * GIB)
    assert uniform.request_bytes(32768) == (16 + 3) * 15 * 2096 * 1024
    assert uniform.max_requests(32768) == (80 * GIB // (15 * 2096 * 1024) - 1) // 19


def uniform_models() -> list[ModelSpec]:
    """Models in which all layers keep the same: of the catalogue, and of the families with their default sizes."""
    models = [load_model(name) for name in catalogue()]
    for model_type in sorted(FAMILIES):
        try:
            models.append(read_config({"model_type": model_type}, name=model_type))
        except ConfigError:  # its layers have no default
            continue
    return [
        model
        for model in models
        if len({(type(spec), spec.parts) for spec in model.layers}) == 1 and isinstance(model.layers[0], FullAttention)
    ]


@pytest.mark.parametrize("model", uniform_models(), ids=lambda model: str(model.name))
@pytest.mark.parametrize("num_tokens", [1, 100, 8192, 32768])
def test_uniform_models_take_no_more_than_in_a_uniform_plan(model: ModelSpec, num_tokens: int) -> None:
    plan = make_plan(model, PlanOptions(80 * GIB))
    for size in (1, len(model.layers)):
        uniform = uniform_plan(model, 80 * GIB, size)
        assert plan.request_bytes(num_tokens) <= uniform.request_bytes(num_tokens)
    assert plan.padding_ratio == 0
    assert plan.max_requests(num_tokens) >= uniform_plan(model, 80 * GIB).max_requests(num_tokens) * 0.999
