"""Time to the first token of ten model types: the engine against stock transformers, on the same random weights.

    python benchmarks/first_tokens.py [--device cuda] [--tokens 512 2048] [--types mistral phi3]

Both get the same prompts, in turn, and compute all of each: no prefix is cached. `hit` is the same prompt once more, of
which the engine computes the last block only. The engine runs as users start it, stock transformers eagerly with its
default attention. On a CPU models have some 40 million parameters, on a GPU the sizes of a model with 2 to 8 billion.

One JSON line last: milliseconds, medians, by type and number of tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from hybridkv import Engine, SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
Sizes = dict[str, Any]


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> Sizes:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


SMALL = _sizes(512, 1536, 8, 8, 2, 64)
LARGE = _sizes(4096, 14336, 32, 32, 8, 128)
_SMALL_EXPERTS = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
_LARGE_EXPERTS = {"moe_intermediate_size": 1024, "num_experts_per_tok": 4}


def _latents(rank: int, query_rank: int, head_dim: int) -> Sizes:
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "v_head_dim": head_dim,
    }


_CONVOLUTIONS = ["conv", "conv", "conv", "full_attention"]

TYPES: dict[str, tuple[Sizes, Sizes]] = {
    "mistral": ({"sliding_window": 1024}, {"sliding_window": 4096}),
    "qwen2": ({}, {}),
    "qwen3_moe": ({"num_experts": 16, **_SMALL_EXPERTS}, {"num_experts": 32, **_LARGE_EXPERTS, "hidden_size": 2048}),
    "gemma2": ({"sliding_window": 256}, {**_sizes(2304, 9216, 26, 8, 4, 256)}),
    "phi3": ({}, {}),
    "olmo3": ({"sliding_window": 256}, {}),
    "cohere2": ({"sliding_window": 256}, {}),
    "glm4_moe_lite": (
        {"n_routed_experts": 16, "num_key_value_heads": 8, **_SMALL_EXPERTS, **_latents(128, 128, 64)},
        {
            "n_routed_experts": 32,
            "num_key_value_heads": 32,
            **_LARGE_EXPERTS,
            **_latents(512, 768, 128),
            "hidden_size": 2048,
        },
    ),
    "lfm2_moe": (
        {"num_experts": 16, "layer_types": _CONVOLUTIONS * 2, **_SMALL_EXPERTS},
        {"num_experts": 32, "layer_types": _CONVOLUTIONS * 8, **_LARGE_EXPERTS, "hidden_size": 2048},
    ),
    "falcon_mamba": ({"state_size": 16}, {"num_hidden_layers": 64}),
}


def make_model(model_type: str, device: torch.device) -> PreTrainedModel:
    is_large = device.type == "cuda"
    sizes = {**(LARGE if is_large else SMALL), **TYPES[model_type][is_large]}
    config = CONFIG_MAPPING[model_type](vocab_size=32768, max_position_embeddings=32768, pad_token_id=0, **sizes)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if is_large else torch.float32).eval()


def timed(device: torch.device, call: Callable[[], object]) -> float:
    """Milliseconds of a call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1000


def measure(model_type: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    drawn = random.Random(1)
    prompts = {
        count: [[drawn.randrange(4, 32768) for _ in range(count)] for _ in range(args.repeats + 1)]
        for count in args.tokens
    }
    model = make_model(model_type, device)
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}

    def stock(prompt: list[int]) -> None:
        with torch.inference_mode():
            int(model(input_ids=torch.tensor([prompt], device=device), logits_to_keep=1).logits[0, -1].argmax())

    alone = {count: [timed(device, partial(stock, p)) for p in all_of] for count, all_of in prompts.items()}
    with Engine(model, memory=args.memory, device=str(device), max_num_batched_tokens=8192) as engine:
        for count, all_of in prompts.items():
            first, again = (
                [timed(device, partial(engine.generate, p, ONE_TOKEN, progress=False)) for p in all_of]
                for _ in range(2)
            )
            ours, theirs = statistics.median(first[1:]), statistics.median(alone[count][1:])
            found[str(count)] = {
                "ours_ms": round(ours, 2),
                "stock_ms": round(theirs, 2),
                "ratio": round(ours / theirs, 3),
                "hit_ms": round(statistics.median(again[1:]), 2),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="lengths of the prompts")
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES), help="model types")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length, after one to warm up")
    parser.add_argument("--memory", default=None, help="the engine's arena (default: 2GiB, on a GPU 16GiB)")
    parser.add_argument("--threads", type=int, default=2, help="threads on a CPU")
    args = parser.parse_args()
    device = torch.device(args.device)
    args.memory = args.memory or ("16GiB" if device.type == "cuda" else "2GiB")
    disable_progress_bar()
    torch.set_num_threads(args.threads)
    table = Table(title=f"First token, ms, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    for column in ("type", "tokens", "engine", "stock", "engine / stock", "hit"):
        table.add_column(column, justify="left" if column == "type" else "right")
    found = {}
    console = Console()
    for model_type in args.types:
        console.print(f"{model_type} ...")
        found[model_type] = measure(model_type, args, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for count in args.tokens:
            row = found[model_type][str(count)]
            cells = [f"{row[name]:g}" for name in ("ours_ms", "stock_ms", "ratio", "hit_ms")]
            table.add_row(model_type, f"{count:,}", *cells)
            console.print(f"{model_type}, {count:,} tokens: engine, stock, ratio, hit: {', '.join(cells)}")
    console.print(table)
    print(json.dumps({"benchmark": "first_tokens", "device": str(device), "ms": found}))


if __name__ == "__main__":
    main()
