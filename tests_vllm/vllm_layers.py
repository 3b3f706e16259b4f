"""Layers that vLLM's own model classes keep. Each class is built of a tiny config, without weights.

It patches its process: run it in one of its own.
"""

from __future__ import annotations

import pickle
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from hosted import grouped
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.integrations.vllm.model import model_spec
from hybridkv.integrations.vllm.placement import calls_hooks
from hybridkv.spec import ModelSpec
from tests.tiny import tiny_config

_LIKE_PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi_linear": {"mla_use_nope": True},
    "lfm2": {
        "conv_dim": 64,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba2": {"intermediate_size": 128},
    "qwen3": {"max_window_layers": 4},
    "zamba2": {"num_key_value_heads": 4},
}
"""Fields that vLLM's classes need, and that the tiny configs lack."""
TWO_BLOCKS = "zamba2 with two shared blocks"
COMPARED = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "olmo3",
    "llama4_text",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "minimax",
    "lfm2",
    "lfm2_moe",
    "falcon_h1",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "jamba",
    "mamba2",
]
"""Model types whose names of layers are compared with those of vLLM's classes."""
NOT_COMPARED = {
    "afmoe",
    "arcee",
    "axk1",
    "bailing_hybrid",
    "cohere",
    "cohere2",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon_mamba",
    "gemma",
    "gemma4_text",
    "gemma4_unified_text",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "granite",
    "granite_swa",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "kolibri1",
    "laguna",
    "lfm3",
    "longcat_flash",
    "mamba",
    "mimo_v2_flash",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral4",
    "muse_glimmer_text",
    "muse_spark_text",
    "nemotron",
    "olmo2",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3_omni_moe_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "step3p5",
}
"""Model types that were never built in vLLM: docs/vllm.md says so. A new type must be added to one of the two."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, _LIKE_PUBLISHED.get(name, {})) for name in COMPARED},
    TWO_BLOCKS: (
        "zamba2",
        {
            **_LIKE_PUBLISHED["zamba2"],
            "num_hidden_layers": 8,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 2,
        },
    ),
}
"""Model types, and changes of their tiny configs."""


class Built(NamedTuple):
    """A model as both describe it."""

    model: ModelSpec
    config: KVCacheConfig
    layers: dict[str, int]
    """The decoder layer that each of vLLM's layers lies in, by its name: from the tree of modules."""
    with_hooks: set[str]
    """Names of layers that call the connector, as `placement` sees it."""


def write(names: Sequence[str], path: str) -> None:
    """Build these models, and write them as a pickled dict."""
    _do_without_a_gpu()
    with tempfile.TemporaryDirectory() as directory:
        built = {name: _build(Path(directory) / name, *MODELS[name]) for name in names}
    Path(path).write_bytes(pickle.dumps(built))


def _build(directory: Path, model_type: str, changes: Mapping[str, Any]) -> Built:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = tiny_config(model_type, **changes)
    config.architectures = [ARCHITECTURES.get(model_type) or ARCHITECTURES[model_type.removesuffix("_text")]]
    config.save_pretrained(directory)
    made = EngineArgs(
        model=str(directory), skip_tokenizer_init=True, max_model_len=512, dtype="bfloat16", enable_prefix_caching=True
    ).create_engine_config()
    with set_current_vllm_config(made):
        # Groups of ranks depend on the model: one of experts has one more.
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        else:
            rendezvous = f"file://{directory}/rendezvous"
            parallel_state.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        with torch.device("meta"):
            model = initialize_model(made)
        specs = get_kv_cache_spec(made)
    modules = made.compilation_config.static_forward_context
    layers = _decoder_layers(model, {name: modules[name] for name in specs})
    with_hooks = {name for name in specs if calls_hooks(modules[name])}
    return Built(model_spec(made, grouped(specs), 0), grouped(specs), layers, with_hooks)


def _decoder_layers(model: torch.nn.Module, modules: Mapping[str, Any]) -> dict[str, int]:
    names = {id(module): name for name, module in modules.items()}
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        place = re.search(r"\blayers\.(\d+)\.", path)
        if id(module) not in names or place is None:
            continue
        # Zamba2 has one attention for each layer that uses a block, in every such layer: the layer knows its own.
        own = re.search(r"dpa_list\.(\d+)", path)
        layer = model.get_submodule(path[: place.end() - 1])
        if own is None or int(own[1]) == layer.block_idx:
            found[names[id(module)]] = int(place[1])
    return found


def _do_without_a_gpu() -> None:
    """Replace what these classes need to be constructed, and not to name their layers."""
    import vllm.model_executor.models.registry as registry
    from vllm.triton_utils import triton

    registry._run_in_subprocess = lambda function: function()  # each model, for 10 s
    triton.set_allocator = lambda _: None  # OLMo-Hybrid; Triton has no CPU backend
    torch.cuda.Stream = type("Stream", (), {})  # Kimi-Linear
    torch.cpu._is_amx_tile_supported = lambda: True  # MLA: without it vLLM gives up prefix caching, which states need
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):  # imported for Qwen3.5's images
        if name not in sys.modules:
            module = sys.modules[name] = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.functional = SimpleNamespace()
