"""vLLM's own model classes beside the layers that hybridkv reads from the same config: every family, by name."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import re
from pathlib import Path

import pytest
from checkpoints import FAMILIES as CHECKPOINTS
from engines import Engine, Host, Process, transfer_config
from hosted import FAMILIES as HOSTED
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.model_executor.layers.attention.mla_attention import unified_mla_attention_with_output
from vllm.model_executor.models.registry import _PREVIOUSLY_SUPPORTED_MODELS
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_layers import COMPARED, MODELS, NOT_COMPARED, TWO_BLOCKS, Built

from hybridkv.integrations.vllm.catalogue import _SAME_STATES
from hybridkv.integrations.vllm.groups import known_layers, layer_specs
from hybridkv.models.family import FAMILIES
from tests.tiny import tiny_config

REMOVED = {"bamba": "BambaForCausalLM", "minimax": "MiniMaxForCausalLM"}
"""Families whose classes vLLM had once."""
PRESENT = [name for name in MODELS if name not in REMOVED]


@pytest.fixture(scope="module")
def built(host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    host.wait_until_started()
    directory = tmp_path_factory.mktemp("layers")
    environment = {"VLLM_KIMI_K3_GEMM_AR": "0"}  # a kernel for GPUs
    path = directory / "built"
    process = Process(host, directory / "log", layers=PRESENT, to=str(path), environment=environment)
    process.wait_until_started()
    process.close()
    found: dict[str, Built] = pickle.loads(path.read_bytes())
    return found


def test_every_family_is_here() -> None:
    assert {model_type for model_type, _ in MODELS.values()} | NOT_COMPARED == FAMILIES.keys()
    assert not NOT_COMPARED & set(COMPARED)
    assert set(REMOVED.values()) <= _PREVIOUSLY_SUPPORTED_MODELS.keys(), "vLLM has it again: build it"


@pytest.mark.parametrize("name", PRESENT)
def test_each_name_is_that_of_its_decoder_layer(name: str, built: dict[str, Built]) -> None:
    """Kinds, shapes and dtypes are compared by `known_layers` itself."""
    model, config, layers, _ = built[name]
    known = known_layers(config, model, 16)
    assert {one.name for one in known.values()} == set(layers)
    assert all(one.number == extract_layer_index(one.name) for one in known.values())
    if name != TWO_BLOCKS:
        assert {one.name: key.layer for key, one in known.items()} == layers


def test_attention_in_several_shared_blocks_keeps_the_order_of_vllm(built: dict[str, Built]) -> None:
    """vLLM counts along one block, then along the next. Only vLLM reads what it stores of such a model."""
    model, config, layers, _ = built[TWO_BLOCKS]
    known = known_layers(config, model, 16)
    assert {one.name: key.layer for key, one in known.items() if key.is_state} == {
        name: layer for name, layer in layers.items() if name.endswith("mixer")
    }
    attention = {key.layer: layers[one.name] for key, one in sorted(known.items()) if not key.is_state}
    assert attention == {2: 2, 4: 5, 5: 4, 7: 7}
    assert model.model_type not in _SAME_STATES


@pytest.mark.parametrize("name", PRESENT)
def test_only_vllms_own_attention_classes_call_hooks(name: str, built: dict[str, Built]) -> None:
    """Kimi-Linear has an attention class of its own, which does not. A hook that is never called waits for nothing."""
    attention = {name for name, spec in layer_specs(built[name].config).items() if not isinstance(spec, MambaSpec)}
    assert built[name].with_hooks == (set() if name == "kimi_linear" else attention)


def test_operations_of_attention_call_hooks() -> None:
    for operation in (unified_attention_with_output, unified_mla_attention_with_output):
        assert "@maybe_transfer_kv_layer" in inspect.getsource(operation)
    kimi = importlib.util.find_spec("vllm.models.kimi_k3.nvidia.mla")
    assert kimi is not None
    assert kimi.origin is not None
    assert "attention_with_output" not in Path(kimi.origin).read_text(), "Kimi-Linear's attention has hooks now"


@pytest.mark.parametrize("name", [name for name in HOSTED if name not in REMOVED])
def test_models_of_other_tests_have_vllms_names(name: str, built: dict[str, Built]) -> None:
    ours, theirs = HOSTED[name].specs(1), built[name].layers
    assert {re.sub(r"\d+", "N", one) for one in ours} == {re.sub(r"\d+", "N", one) for one in theirs}


def test_falcon_h1_starts(host: Host, tmp_path: Path) -> None:
    """A real engine, up to its caches: vLLM cannot prefill Mamba-2 on a CPU."""
    config = tiny_config("falcon_h1", head_dim=32, num_attention_heads=2, max_position_embeddings=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    host.wait_until_started()
    transfer = transfer_config(["memory://?size=1MiB"])
    engine = Engine(host, CHECKPOINTS["qwen3_next"], tmp_path, tmp_path / "log", kv_transfer_config=transfer)
    engine.wait_until_started()
    engine.close()
