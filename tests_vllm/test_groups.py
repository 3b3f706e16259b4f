"""vLLM's real specs beside the layers that hybridkv reads from the same config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hosted import BF16, BLOCK, FAMILIES, STATE_BLOCK, full, grouped, window
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from hybridkv.errors import InputError
from hybridkv.integrations.vllm.groups import LayerKey, known_layers, layer_specs
from hybridkv.spec import LinearState

ATTENTION = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": BF16}


def refused(family: str, specs: dict[str, KVCacheSpec]) -> str:
    with pytest.raises(InputError) as error:
        known_layers(grouped(specs), FAMILIES[family].model(), 16)
    return str(error.value)


def changed(family: str, name: str, change: Callable[[Any], KVCacheSpec] | KVCacheSpec) -> str:
    """The error for a model with one layer changed, which must name the layer."""
    specs = FAMILIES[family].specs(1)
    specs[name] = change(specs[name]) if callable(change) else change
    message = refused(family, specs)
    assert name in message
    return message


def with_(**fields: Any) -> Callable[[Any], KVCacheSpec]:
    return lambda spec: replace(spec, **fields)


# What both know.


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_known(name: str, tp: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    family = FAMILIES[name]
    specs, model = family.specs(tp), family.model(tp, rank=tp - 1)
    config = grouped(specs)
    known = known_layers(config, model, 16)
    assert {one.name for one in known.values()} == set(specs) == set(layer_specs(config))
    assert {(key.layer, key.is_state) for key in known} == {
        (spec.layer, isinstance(spec, LinearState)) for spec in model.layers
    }
    for is_state in (False, True):  # the specs of a kind are in the order of the layers
        names = [name for name, spec in specs.items() if isinstance(spec, MambaSpec) == is_state]
        assert [one.name for key, one in sorted(known.items()) if key.is_state == is_state] == names
    for key, one in known.items():
        assert one.theirs == specs[one.name]
        assert one.ours.layer == key.layer
        assert config.kv_cache_groups[one.table.number].layer_names.count(one.name) == 1
        assert one.table.block_tokens == (STATE_BLOCK if key.is_state else BLOCK)
        assert one.table.is_state == key.is_state == isinstance(one.theirs, MambaSpec)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_have_the_order_and_the_bytes_of_vllms_tensors(name: str, tp: int) -> None:
    """A convolution comes first, then a recurrent state."""
    for key, one in FAMILIES[name].layers(tp).items():
        if key.is_state:
            assert [part.name for part in one.ours.parts] in (["conv", "recurrent"], ["conv"], ["recurrent"])
            assert isinstance(one.theirs, MambaSpec)
            for part, shape, dtype in zip(one.ours.parts, one.theirs.shapes, one.theirs.dtypes, strict=True):
                assert part.nbytes == torch.empty(shape, dtype=dtype).nbytes
        else:
            assert one.ours.nbytes * BLOCK == one.theirs.page_size_bytes


def test_groups_of_uniform_type() -> None:
    """One group with specs of its own for each layer, as for layers with different numbers of heads."""
    specs = FAMILIES["qwen3_next"].specs(1)
    tokens = {name: spec for name, spec in specs.items() if not isinstance(spec, MambaSpec)}
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    uniform = UniformTypeKVCacheSpecs.from_specs(tokens)
    assert uniform is not None
    (mamba,) = set(states.values())
    groups = [KVCacheGroupSpec(list(states), mamba), KVCacheGroupSpec(list(tokens), uniform)]
    known = known_layers(KVCacheConfig(5, [], groups), FAMILIES["qwen3_next"].model(), 16)
    assert known[LayerKey(1, False)].theirs is tokens["model.layers.1.self_attn.attn"]
    assert known[LayerKey(1, False)].table.number == 1
    assert known[LayerKey(0, True)].table.number == 0

    tokens["model.layers.3.self_attn.attn"] = full(1, heads=4)
    uniform = UniformTypeKVCacheSpecs.from_specs(tokens)
    assert uniform is not None
    groups[1] = KVCacheGroupSpec(list(tokens), uniform)
    with pytest.raises(InputError, match=r"model\.layers\.3\.self_attn\.attn: vLLM has KV heads 4"):
        known_layers(KVCacheConfig(5, [], groups), FAMILIES["qwen3_next"].model(), 16)


# What differs is refused.

ATTN = "model.layers.1.self_attn.attn"
FIRST = "model.layers.0.self_attn.attn"


@pytest.mark.parametrize(("family", "name", "change", "what"), [
    ("qwen3_next", ATTN, with_(num_kv_heads=4), "KV heads 4"),
    ("qwen3_next", ATTN, with_(head_size=32, head_size_v=32), "head size"),
    ("qwen3_next", ATTN, with_(head_size_v=8), "head size"),
    ("qwen3_next", ATTN, with_(dtype=torch.float16), "dtype float16"),
    ("qwen3_next", ATTN, with_(dtype=torch.uint8), "dtype uint8"),
    ("qwen3_next", ATTN, with_(sliding_window=64), "window 64"),
    ("qwen3_next", ATTN, with_(attention_chunk_size=64), "chunk 64"),
    ("qwen3_next", ATTN, with_(block_size=24), "blocks of 24 tokens"),
    ("qwen3_next", ATTN, with_(tokens_per_state=2), "tokens of an element 2"),
    ("gemma3_text", FIRST, window(1, 32), "window 32"),
    ("gemma3_text", FIRST, full(1), "kind FullAttentionSpec"),
    ("gemma3_text", FIRST, full(1, sliding_window=64), "kind FullAttentionSpec"),
    ("llama4_text", FIRST, with_(attention_chunk_size=64), "chunk 64"),
    ("llama4_text", FIRST, full(1, attention_chunk_size=128), "kind FullAttentionSpec"),
    ("llama4_text", FIRST, window(1, 128), "kind SlidingWindowSpec"),
    ("kimi_linear", "model.layers.1.self_attn", with_(head_size=32), "elements of a latent 32"),
    ("kimi_linear", "model.layers.1.self_attn", with_(dtype=torch.uint8), "dtype uint8"),
    ("kimi_linear", "model.layers.1.self_attn", full(1), "kind FullAttentionSpec"),
])  # fmt: skip
def test_attention_that_differs_is_refused(
    family: str, name: str, change: Callable[[Any], KVCacheSpec] | KVCacheSpec, what: str
) -> None:
    assert what in changed(family, name, change)


@pytest.mark.parametrize(("family", "name", "spec"), [
    ("qwen3_next", ATTN, SinkFullAttentionSpec(**ATTENTION, sink_len=4)),
    ("qwen3_next", ATTN, RSWASpec(**ATTENTION, rswa_window=64)),
    ("qwen3_next", ATTN, CrossAttentionSpec(**ATTENTION)),
    ("qwen3_next", ATTN, SlidingWindowSpec(**ATTENTION, sliding_window=64)),
    ("qwen3_next", ATTN, ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)),
    ("qwen3_next", ATTN, MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=BF16)),
    ("gemma3_text", FIRST, SlidingWindowMLASpec(**ATTENTION, sliding_window=64)),
    ("gemma3_text", FIRST, RSWASpec(**ATTENTION, rswa_window=64, sliding_window=64)),
    ("kimi_linear", "model.layers.1.self_attn",
     HiddenStateCacheSpec(block_size=BLOCK, num_kv_heads=1, head_size=40, dtype=BF16)),
])  # fmt: skip
def test_unknown_kinds_are_refused(family: str, name: str, spec: KVCacheSpec) -> None:
    assert f"kind {type(spec).__name__}" in changed(family, name, spec)


def gdn(**sizes: int) -> tuple[tuple[int, ...], ...]:
    given = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 8, "conv_kernel_size": 4, **sizes}
    return tuple(MambaStateShapeCalculator.gated_delta_net_state_shape(1, **given))


@pytest.mark.parametrize(("change", "what"), [
    (with_(shapes=gdn(num_k_heads=4)), "shape of conv"),
    (with_(shapes=gdn(conv_kernel_size=5)), "shape of conv"),
    (with_(shapes=gdn(num_spec=1)), "shape of conv"),
    (with_(shapes=gdn(head_k_dim=8, head_v_dim=16)), "shape of"),
    (with_(shapes=(gdn()[0], (4, 16, 8))), "shape of recurrent (4, 16, 8)"),
    (with_(shapes=(gdn()[0], (8, 4, 16))), "shape of recurrent (8, 4, 16)"),
    (with_(shapes=(gdn()[0][::-1], gdn()[1])), "shape of conv (96, 3)"),
    (with_(shapes=gdn()[::-1]), "shape of conv"),
    (with_(shapes=(*gdn(), (4, 8)), dtypes=(BF16, torch.float32, BF16)), "tensors of a state 3"),
    (with_(dtypes=(torch.float32, torch.float32)), "dtype of conv float32"),
    (with_(dtypes=(BF16, torch.float16)), "dtype of recurrent float16"),
    (with_(num_speculative_blocks=1), "speculative blocks 1"),
])  # fmt: skip
def test_states_that_differ_are_refused(change: Callable[[Any], KVCacheSpec], what: str) -> None:
    specs = FAMILIES["qwen3_next"].specs(1)
    message = refused("qwen3_next", specs | {"model.layers.0.linear_attn": change(specs["model.layers.0.linear_attn"])})
    assert what in message
    assert "model.layers.0.linear_attn" in message


def test_a_state_of_another_kind_is_refused() -> None:
    """The kind says how vLLM orders the axes of a recurrent state."""
    assert "shape of recurrent" in changed(
        "qwen3_next", "model.layers.0.linear_attn", with_(mamba_type=MambaAttentionBackendEnum.MAMBA2)
    )
    assert "shape of recurrent" in changed(
        "nemotron_h", "model.layers.0.mixer", with_(mamba_type=MambaAttentionBackendEnum.GDN_ATTN)
    )


def test_a_state_where_attention_is_expected_and_the_reverse() -> None:
    specs = FAMILIES["qwen3_next"].specs(1)
    mamba = specs["model.layers.0.linear_attn"]
    assert "model.layers.1.self_attn.attn" in refused("qwen3_next", specs | {ATTN: mamba})
    assert "model.layers.0.linear_attn" in refused("qwen3_next", specs | {"model.layers.0.linear_attn": full(1)})


@pytest.mark.parametrize("name", ["model.layers.4.self_attn.attn", "model.layers.1.self_attn.indexer"])
def test_a_layer_too_many(name: str) -> None:
    assert f"a cache for {name}" in refused("qwen3_next", FAMILIES["qwen3_next"].specs(1) | {name: full(1)})


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.attn.0", "model.encoder", "3.layers.1.attn"])
def test_a_layer_whose_name_has_no_single_number(name: str) -> None:
    specs = FAMILIES["qwen3_next"].specs(1)
    del specs[ATTN]
    assert name in refused("qwen3_next", {name: full(1)} | specs)


@pytest.mark.parametrize(("name", "number"), [("model.layers.1.self_attn.attn", 1), ("model.layers.2.linear_attn", 2)])
def test_a_layer_that_is_missing(name: str, number: int) -> None:
    specs = FAMILIES["qwen3_next"].specs(1)
    del specs[name]
    assert f"no cache for layer {number}" in refused("qwen3_next", specs)


def test_the_blocks_of_states_have_any_size() -> None:
    """A state is one page, whatever number of tokens it stands for."""
    specs = FAMILIES["qwen3_next"].specs(1)
    any_size = {name: replace(spec, block_size=37) if isinstance(spec, MambaSpec) else spec for name, spec in specs.items()}  # fmt: skip  # noqa: E501
    assert len(known_layers(grouped(any_size), FAMILIES["qwen3_next"].model(), 16)) == 4


def test_full_attention_is_exactly_that_class() -> None:
    """A subclass may keep something else: it is refused until it is known here."""

    class Newer(FullAttentionSpec):
        pass

    assert "kind Newer" in changed("qwen3_next", ATTN, Newer(**ATTENTION))
