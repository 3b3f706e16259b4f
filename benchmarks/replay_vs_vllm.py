"""The same trace and the same bytes through vLLM's KVCacheManager and through ours: one table, then one line of JSON.

The prompts of a trace in Mooncake's format are served one after the other, nothing is decoded. The ratio is cached
tokens over prompt tokens; seconds are CPU time of the cache alone. vLLM's real manager gets as many uniform pages as
fit into the bytes, in the groups vLLM itself forms, and is driven as its scheduler does: chunks of at most 8,192
tokens, which with states end where states are kept. It runs as it is by default, and with `--prefix-match-unit 16`.
Ours gets the same bytes, and a breakpoint at the last whole block of the trace.

A trace names blocks of tokens, 512 in Mooncake's: each token is taken to be the name of its block. A prompt's last,
partial block has a name of its own, so the next turn never shares it, though its text does; `--whole-blocks` cuts it
off every prompt, which is kinder to all, and most to caches that keep a prompt's very end.

Run it in vLLM's environment: make bench-replay TRACE=...
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from rich.console import Console
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    get_request_block_hasher,
    init_none_hash,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
)
from vllm.v1.request import Request

from hybridkv.cache import Cache, CacheLayout, NoRoom
from hybridkv.errors import HybridKVError, PlanError
from hybridkv.models import load_model
from hybridkv.plan import Plan, PlanOptions, make_plan, uniform_plan
from hybridkv.spec import ChunkedLocal, DType, LatentAttention, LayerSpec, LinearState, ModelSpec, SlidingWindow
from hybridkv.units import format_bytes, parse_size

BUDGET = 8192
FINE_HASH = 16
TRACE_BLOCK = 512


class Prompt(NamedTuple):
    hash_ids: list[int]
    num_tokens: int
    block_tokens: int

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for block in self.hash_ids:
            tokens += [block] * self.block_tokens
        return tokens[: self.num_tokens]


class Outcome(NamedTuple):
    hit_ratio: float
    seconds: float
    refused: int
    """Prompts that do not fit, however much is evicted."""


def read_trace(path: Path, limit: int | None, whole_blocks: bool) -> list[Prompt]:
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(prompts) == limit:
                break
            try:
                record = json.loads(line)
                size = record.get("block_size", TRACE_BLOCK)
                prompt = Prompt(record["hash_ids"], record["input_length"], size)
            except (ValueError, KeyError, AttributeError) as error:
                raise HybridKVError(f"{path}, line {number} is no request of a Mooncake trace: {error!r}") from None
            if whole_blocks:
                prompt = prompt._replace(num_tokens=prompt.num_tokens // size * size or prompt.num_tokens)
            prompts.append(prompt)
    if not prompts:
        raise HybridKVError(f"{path} holds no requests: name a trace in Mooncake's format")
    return prompts


def replay(prompts: Sequence[Prompt], serve: Callable[[Prompt, list[int]], int | None]) -> Outcome:
    """`serve` returns the cached tokens of a prompt, or None for no room. Making the token list is not timed."""
    hits, refused, seconds = 0, 0, 0.0
    for prompt in prompts:
        tokens = prompt.tokens()
        start = time.process_time()
        cached = serve(prompt, tokens)
        seconds += time.process_time() - start
        hits += cached or 0
        refused += cached is None
    return Outcome(round(hits / sum(prompt.num_tokens for prompt in prompts), 4), round(seconds, 1), refused)


def ours(prompts: Sequence[Prompt], plan: Plan, breakpoints: bool) -> Outcome:
    """The prompts through our cache core, on the bytes of `plan`."""
    cache = Cache(CacheLayout.from_plan(plan), run_operations=lambda operations: None)

    def serve(prompt: Prompt, tokens: list[int]) -> int | None:
        whole = prompt.num_tokens // prompt.block_tokens * prompt.block_tokens
        lease = cache.begin(tokens, breakpoints=[whole] if breakpoints and 0 < whole < prompt.num_tokens else [])
        if isinstance(cache.extend(lease, lease.num_tokens - lease.computed), NoRoom):
            cache.abort(lease)
            return None
        cache.commit(lease)
        cache.release(lease, keep=False)
        return lease.cached_tokens

    return replay(prompts, serve)


class Vllm:
    """vLLM's manager, driven as its scheduler does."""

    def __init__(self, model: ModelSpec, memory_bytes: int, hash_tokens: int | None) -> None:
        """`hash_tokens`: tokens hashed at a time; by default what the sizes of the groups' blocks allow."""
        uniform = uniform_plan(model, memory_bytes)
        if uniform.block_tokens is None:
            raise PlanError(f"{model.name} has states alone: choose a model with attention")
        self.block = uniform.block_tokens
        groups = vllm_groups(model, self.block)
        sizes = [group.kv_cache_spec.block_size for group in groups]
        self.hash_tokens: int = hash_tokens or math.gcd(*sizes)
        self.has_states = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=uniform.num_pages,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=0,  # the engine's default
            ),
            max_model_len=1 << 21,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=self.hash_tokens,
            max_in_flight_tokens=BUDGET,
            enable_caching=True,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(self.hash_tokens, sha256)
        self.sampling = SamplingParams(max_tokens=1)
        self.sampling.update_from_generation_config({}, eos_token_id=-1)
        self.served = 0

    def serve(self, prompt: Prompt, tokens: list[int]) -> int | None:
        manager = self.manager
        self.served += 1
        request = Request(str(self.served), tokens, self.sampling, None, block_hasher=self.hasher)
        manager.new_step_starts()
        blocks, hit, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        position: int = hit
        while position < len(tokens):
            end = self._chunk_end(request, position)
            first = position == hit
            manager.new_step_starts()
            if manager.allocate_slots(request, end - position, hit if first else 0, blocks if first else None) is None:
                manager.free(request)
                return None
            position = request.num_computed_tokens = end
            self._drain()
        manager.free(request)
        return int(hit)

    def _chunk_end(self, request: Request, start: int) -> int:
        """The scheduler's `_mamba_block_aligned_split`, without speculation and checkpoints inside a kernel."""
        length: int = request.num_prompt_tokens
        end = min(start + BUDGET, length)
        if not self.has_states:
            return end
        if end < length:
            aligned = end // self.block * self.block
            end = aligned if aligned > start or self.block <= BUDGET else end
        last = get_mamba_prefill_checkpoint_position(length, self.block, False)
        stops = [last]
        if start % self.block:
            stops.append((start // self.block + 1) * self.block)
        if self.manager.coordinator.enable_partial_hash_hits:
            tail = get_mamba_prefill_checkpoint_position(length, self.hash_tokens, False)
            stops += [tail] if last < tail else []
        junction = request.shared_prefix_boundary
        if start < junction < end:
            stops.append(start + (junction - start) // self.block * self.block)
        return min((stop for stop in stops if start < stop < end), default=end)

    def _drain(self) -> None:
        self.manager.take_new_block_ids()
        _, returned = self.manager.take_kv_cache_block_copies()
        self.manager.take_boundary_state_offloads()
        if returned:
            self.manager.block_pool.free_blocks(returned)


def vllm_groups(model: ModelSpec, block_tokens: int) -> list[KVCacheGroupSpec]:
    specs = {f"{spec.layer}.{spec.kind}": vllm_spec(spec, block_tokens) for spec in model.layers}
    groups: list[KVCacheGroupSpec] = _get_kv_cache_groups_uniform_page_size(unify_kv_cache_spec_page_size(specs))
    return groups


def vllm_spec(spec: LayerSpec, block_tokens: int) -> KVCacheSpec:
    if isinstance(spec, LinearState):
        return MambaSpec(
            block_size=block_tokens,
            shapes=tuple(part.shape for part in spec.parts),
            dtypes=tuple(getattr(torch, part.dtype) for part in spec.parts),
            mamba_cache_mode="align",
        )
    if isinstance(spec, ChunkedLocal):
        raise PlanError(f"layer {spec.layer} attends in chunks, which vLLM does not cache: choose another model")
    heads, dim = spec.parts[0].shape
    common: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": heads,
        "dtype": getattr(torch, spec.parts[0].dtype),
    }
    if isinstance(spec, LatentAttention):
        return MLAAttentionSpec(head_size=dim + spec.parts[1].shape[1], **common)
    if isinstance(spec, SlidingWindow):
        return SlidingWindowSpec(head_size=dim, sliding_window=spec.window, **common)
    return FullAttentionSpec(head_size=dim, **common)


def compare(prompts: Sequence[Prompt], model: ModelSpec, memory_bytes: int, breakpoints: bool) -> dict[str, Any]:
    """All three on the same bytes."""
    vllm = Vllm(model, memory_bytes, None)
    default = replay(prompts, vllm.serve)
    # Finer hashing is refused for a single group, and changes nothing where blocks are that fine already.
    can_be_finer = vllm.hash_tokens > FINE_HASH and len(vllm.manager.kv_cache_config.kv_cache_groups) > 1
    fine = replay(prompts, Vllm(model, memory_bytes, FINE_HASH).serve) if can_be_finer else default
    own = ours(prompts, make_plan(model, PlanOptions(memory_bytes)), breakpoints)
    return {
        "memory_bytes": memory_bytes,
        "vllm_hit_ratio": default.hit_ratio,
        "vllm_16_hit_ratio": fine.hit_ratio,
        "ours_hit_ratio": own.hit_ratio,
        "vllm_seconds": default.seconds,
        "vllm_16_seconds": fine.seconds,
        "ours_seconds": own.seconds,
        "vllm_refused": default.refused,
        "ours_refused": own.refused,
    }


def table(title: str, results: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title=title)
    for column in ("memory of a rank", "vLLM", "vLLM, match unit 16", "hybridkv", "seconds"):
        shown.add_column(column, justify="right")
    for result in results:
        ratios = (f"{result[key]:.2%}" for key in ("vllm_hit_ratio", "vllm_16_hit_ratio", "ours_hit_ratio"))
        seconds = (f"{result[key]:.0f}" for key in ("vllm_seconds", "vllm_16_seconds", "ours_seconds"))
        shown.add_row(format_bytes(result["memory_bytes"]), *ratios, " / ".join(seconds))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace in Mooncake's format, one request a line")
    parser.add_argument("--model", default="qwen3.5-397b-a17b", help="a name of the catalogue, or a config.json")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks; the memory is that of one of them")
    parser.add_argument("--memory", default="30GiB,100GiB,400GiB", help="sizes to try, with commas between")
    parser.add_argument("--state-dtype", default="fp32")
    parser.add_argument("--limit", type=int, help="the first so many requests only")
    parser.add_argument("--whole-blocks", action="store_true", help="cut prompts to whole blocks of the trace")
    parser.add_argument("--no-breakpoints", action="store_true", help="tell our cache nothing but the tokens")
    args = parser.parse_args()
    try:
        prompts = read_trace(args.trace, args.limit, args.whole_blocks)
        model = load_model(args.model, tp=args.tp, state_dtype=DType.parse(args.state_dtype))
        sizes = [parse_size(size) for size in args.memory.split(",")]
        results = [compare(prompts, model, size, not args.no_breakpoints) for size in sizes]
    except (HybridKVError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    title = f"Cached prompt tokens: {len(prompts)} requests of {args.trace.name}, {model.name}, TP {args.tp}"
    Console().print(table(title, results))
    print(
        json.dumps(
            {
                "benchmark": "replay_vs_vllm",
                "trace": args.trace.name,
                "requests": len(prompts),
                "model": model.name,
                "tp": args.tp,
                "state_dtype": args.state_dtype,
                "whole_blocks": args.whole_blocks,
                "breakpoints": not args.no_breakpoints,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
