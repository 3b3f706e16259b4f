"""Every name of transformers that the seams rely on. One that moves must fail here, not in somebody's replies."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from hybridkv.engine.loading.families import SUPPORTED
from hybridkv.engine.runner import decoder_layers
from hybridkv.engine.seams import ATTENTION, PagedCache, frame, ops
from hybridkv.engine.seams.functions import kv_source
from hybridkv.engine.seams.patches import FUNCTIONS, METHODS, attach
from hybridkv.errors import HybridKVError
from tests.engine.drive import Driver
from tests.engine.zoo import ALL, build, fresh, oracle_logits, prompt, text_config
from tests.tiny import is_installed

NAMES = {
    "qwen3_next": {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"},
    "qwen3_5": {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"},
    "qwen3_5_moe": {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"},
    "olmo_hybrid": {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"},
    "kimi_linear": {"causal_conv1d_fn", "chunk_kimi_delta_attention"},
    "falcon_h1": {"causal_conv1d_fn", "mamba2_chunk_scan"},
    "nemotron_h": {"causal_conv1d_fn", "mamba2_chunk_scan"},
    "bamba": {"causal_conv1d_fn", "mamba2_chunk_scan"},
    "granitemoehybrid": {"causal_conv1d_fn", "mamba2_chunk_scan"},
    "zamba2": {"causal_conv1d_fn", "mamba2_chunk_scan"},
    "mamba2": {"causal_conv1d_fn", "mamba2_chunk_scan"},
    "jamba": {"causal_conv1d_fn", "mamba_selective_scan"},
    "mamba": {"causal_conv1d_fn", "mamba_selective_scan"},
    "falcon_mamba": {"causal_conv1d_fn", "mamba_selective_scan"},
    "bailing_hybrid": {"causal_conv1d_fn", "chunk_kimi_delta_attention"},
    "lfm2": {"causal_conv1d_fn"},
    "lfm2_moe": {"causal_conv1d_fn"},
    "lfm3": {"causal_conv1d_fn"},
}


def modeling_file(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def test_every_family_is_in_the_zoo() -> None:
    assert {family.model_type for family in ALL.values()} == {name for name in SUPPORTED if is_installed(name)}


@pytest.mark.parametrize("family", ALL)
def test_the_functions_we_stand_in_for_are_there_and_no_others(family: str) -> None:
    module = modeling_file(build(family))
    assert {name for name in FUNCTIONS if hasattr(module, name)} == NAMES.get(family, set())
    assert {owner for owner, _ in METHODS if hasattr(module, owner)} == (
        {"MiniMaxLightningAttention"} if family == "minimax" else set()
    )


@pytest.mark.parametrize("family", ALL)
def test_forward_takes_what_the_runner_gives(family: str) -> None:
    accepted = inspect.signature(build(family).forward).parameters
    assert ("logits_to_keep" in accepted) == (family != "qwen3_omni_moe")
    assert ("past_key_values" if ALL[family].attention else "cache_params") in accepted
    assert ("position_ids" in accepted) == ALL[family].attention


@pytest.mark.parametrize("family", ALL)
def test_decoder_layers_are_found(family: str) -> None:
    model = build(family)
    assert len(decoder_layers(model)) == text_config(model).num_hidden_layers


@pytest.mark.parametrize(
    "name", ["update", "update_conv_state", "update_recurrent_state", "has_previous_state", "get_seq_length"]
)
def test_the_cache_still_has_the_verbs_we_override(name: str) -> None:
    assert callable(getattr(Cache, name))
    assert getattr(PagedCache, name) is not getattr(Cache, name)


def test_every_use_of_a_cache_by_a_model_is_known() -> None:
    """A new verb of caches in a modeling file is a new way to be wrong."""
    known = {"update", "update_conv_state", "update_recurrent_state", "has_previous_state", "get_conv_state",
             "get_recurrent_state", "is_recording_past", "get_seq_length", "layers", "get_linear_cache",
             "set_linear_cache", "is_sliding"}  # fmt: skip
    for family in ALL:
        source = inspect.getsource(modeling_file(build(family)))
        used = {word.split("(")[0] for owner in ("past_key_values.", "cache_params.") for word in _after(source, owner)}
        assert used <= known, family


def _after(source: str, owner: str) -> list[str]:
    import re

    return re.findall(rf"\b{re.escape(owner)}([a-z_]+)", source)


def test_our_attention_gets_no_mask() -> None:
    attach(fresh("llama"))
    assert ATTENTION in AttentionInterface._global_mapping
    assert ATTENTION not in AttentionMaskInterface._global_mapping


@pytest.mark.parametrize("family", [name for name, family in ALL.items() if family.attention])
def test_keys_come_from_the_layer_that_the_stock_model_takes_them_from(family: str) -> None:
    """A layer without keys of its own is given the very tensor of another one."""
    seen: list[tuple[Any, torch.Tensor]] = []

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((module, key))
        return query.transpose(1, 2)[..., : args[0].shape[-1]], None

    AttentionInterface.register("seen_by_a_test", attend)
    model = fresh(family)
    model.set_attn_implementation("seen_by_a_test")
    with torch.inference_mode():
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert seen
    for module, key in seen:
        owner = next(one for one, its in seen if its is key)
        assert kv_source(module) == (None if owner is module else owner.layer_idx)


def test_minimax_mixers_have_the_parts_we_use() -> None:
    mixer = next(m for m in build("minimax").modules() if type(m).__name__ == "MiniMaxLightningAttention")
    for name in (
        "layer_idx",
        "num_attention_heads",
        "head_dim",
        "act_fn",
        "qkv_proj",
        "slope_rate",
        "norm",
        "out_proj",
    ):
        assert hasattr(mixer, name), name


def test_attaching_twice_patches_once() -> None:
    model = fresh("qwen3_next")
    attach(model)
    once = modeling_file(model).causal_conv1d_fn
    attach(model)
    assert modeling_file(model).causal_conv1d_fn is once


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "minimax", "bamba"])
def test_stock_models_of_the_same_kind_are_not_affected(family: str) -> None:
    model = build(family, 1)
    before = oracle_logits(model, prompt(30, 77)).clone()
    attach(fresh(family))
    import tests.engine.zoo as zoo

    zoo._logits.cache_clear()
    assert torch.equal(oracle_logits(model, prompt(30, 77)), before)


def test_a_paged_model_outside_an_engine_says_so() -> None:
    model = fresh("llama", 2)
    attach(model)
    with pytest.raises(HybridKVError, match="outside an engine"):
        model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=PagedCache(), use_cache=False)


def test_two_engines_live_together() -> None:
    """Different models of one family, and another family, step by step in turn."""
    drivers = [Driver(build("qwen3_next")), Driver(build("qwen3_next", 1)), Driver(build("bamba"))]
    for driver in drivers:
        driver.add("a", prompt(60, 1))
    while any(driver.core.has_work for driver in drivers):
        for driver in drivers:
            driver.step()


def test_no_result_of_an_operation_is_its_argument() -> None:
    """Compilers reuse the memory of arguments: a schema without an alias must be true."""
    kept, other = torch.randn(3, 4), torch.randn(5, 2)
    first, second = ops._results((kept, other.t()), (kept, other))
    assert torch.equal(first, kept)
    assert first.data_ptr() != kept.data_ptr()
    assert torch.equal(second, other.t())
    assert second.is_contiguous()


def test_a_step_inside_a_step_is_refused() -> None:
    driver = Driver(build("llama"))
    some: Any = object()
    with frame.running(some), pytest.raises(HybridKVError, match="inside another"), frame.running(some):
        pass
    driver.add("a", prompt(5, 1))
    driver.run()


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.hidden: dict[int, Any] = {}

    def before_layer(self, layer: int, frame: Any) -> None:
        self.seen.append(("before", layer))

    def after_layer(self, layer: int, frame: Any, hidden: Any) -> None:
        self.seen.append(("after", layer))
        self.hidden[layer] = hidden


@pytest.mark.parametrize("family", ALL)
def test_observers_see_every_layer_of_a_step_in_order(family: str) -> None:
    driver, recorder = Driver(build(family)), Recorder()
    driver.runner.observe(recorder)
    driver.add("a", prompt(20, 1))
    driver.step()
    count = text_config(driver.model).num_hidden_layers
    assert recorder.seen == [(when, layer) for layer in range(count) for when in ("before", "after")]
    assert all(hidden.shape[-2:] == (20, 64) for hidden in recorder.hidden.values())
    driver.runner.close()
    driver.run()
    assert len(recorder.seen) == 2 * count
