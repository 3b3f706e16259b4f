"""CPU time of the cache core a request, against vLLM's KVCacheManager in the same run. The last line is JSON.

Both sides get the same requests in turn: a list of token ids, three quarters of it shared with other requests, in a
cache that is too small, so that eviction is at work. Both name blocks of 16 tokens with SHA-256. What is timed is the
whole life of a request but its decode steps, which are timed apart:

    vLLM      Request() with its block hasher, get_computed_blocks, allocate_slots and its drains, free
    hybridkv  begin (token conversion, match), extend, commit (hash, publish, checkpoints), release

Run it in vLLM's environment: make bench-core, with our core compiled; make bench-core CORE=src, as it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
)
from vllm.v1.request import Request

from hybridkv.cache import IS_COMPILED, Cache, CacheGroup, CacheLayout, Lease, NoRoom, Role
from hybridkv.sight import Sight

BLOCK = 16
STATE_BLOCK = 544  # what one uniform page makes of Qwen3-Next with bf16 states
STATE_PAGES = 64  # a state weighs as much as this many blocks of KV
FAMILIES = 20
DECODE = 16
SHARED = 3 / 4


class Setup(NamedTuple):
    """One mix of groups on both sides."""

    windows: Sequence[int] = ()
    states: bool = False
    hash_tokens: int = BLOCK
    """Tokens vLLM hashes at a time."""


SETUPS = {
    "full": Setup(),
    "full+states": Setup(states=True),
    "full+window": Setup(windows=[1024]),
    "full+5 windows": Setup(windows=[512, 768, 1024, 1280, 1536]),
}
LARGE_BLOCK = Setup(states=True, hash_tokens=STATE_BLOCK)


def vllm_blocks(blocks: int, num_groups: int, concurrency: int) -> int:
    """Room for the running requests, and for the shared prefixes once."""
    return (concurrency + 2) * (blocks * num_groups + 6) + FAMILIES * blocks + 16


class Timings:
    def __init__(self) -> None:
        self.request: list[float] = []
        self.decode: list[float] = []
        self.hit_tokens = 0

    def median_us(self) -> tuple[float, float]:
        return statistics.median(self.request) * 1e6, statistics.median(self.decode) * 1e6


class Ours:
    """hybridkv's cache, driven as a scheduler would: the oldest requests end when there is no room."""

    def __init__(self, setup: Setup, length: int, concurrency: int) -> None:
        blocks = math.ceil((length + DECODE) / BLOCK)
        groups = [CacheGroup("full", Role.FULL, STATE_PAGES, page_bytes=BLOCK)]
        groups += [
            CacheGroup(f"window{w}", Role.LOCAL, STATE_PAGES, page_bytes=BLOCK, sight=Sight(window=w))
            for w in setup.windows
        ]
        slabs = (concurrency + 2 + FAMILIES) * blocks // STATE_PAGES + 4
        if setup.windows:  # as many pages as vLLM has blocks: both are the same bytes
            slabs = vllm_blocks(blocks, len(groups), concurrency) // STATE_PAGES
        if setup.states:
            groups.append(CacheGroup("state", Role.STATE, 1, page_bytes=STATE_PAGES * BLOCK))
            slabs += 3 * (concurrency + 2) + 2 * FAMILIES
        layout = CacheLayout.of(groups, block_tokens=BLOCK, num_slabs=slabs, kv_bytes_per_token=1)
        self.cache = Cache(layout, run_operations=lambda operations: None)
        self.running: list[Lease] = []
        self.concurrency = concurrency
        self.times = Timings()

    def serve(self, tokens: list[int]) -> None:
        cache = self.cache
        start = time.perf_counter()
        lease = cache.begin(tokens)
        spent = time.perf_counter() - start
        while True:
            start = time.perf_counter()
            step = cache.extend(lease, lease.num_tokens - lease.computed)
            spent += time.perf_counter() - start
            if not isinstance(step, NoRoom):
                break
            spent += self._end_oldest()
        start = time.perf_counter()
        cache.commit(lease, sampled=(7,))
        spent += time.perf_counter() - start
        for _ in range(DECODE):
            start = time.perf_counter()
            done = cache.extend(lease, 1)
            if not isinstance(done, NoRoom):
                cache.commit(lease, sampled=(7,))
            self.times.decode.append(time.perf_counter() - start)
            if isinstance(done, NoRoom):
                break
        self.times.hit_tokens += lease.cached_tokens
        self.running.append(lease)
        if len(self.running) > self.concurrency:
            spent += self._end_oldest()
        self.times.request.append(spent)

    def _end_oldest(self) -> float:
        lease = self.running.pop(0)
        start = time.perf_counter()
        self.cache.release(lease)
        return time.perf_counter() - start


class Theirs:
    """vLLM's manager, driven as its scheduler does."""

    def __init__(self, setup: Setup, length: int, concurrency: int) -> None:
        self.block = STATE_BLOCK if setup.states else BLOCK
        full = FullAttentionSpec(block_size=self.block, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
        specs: list[KVCacheSpec] = [full]
        for window in setup.windows:
            specs.append(
                SlidingWindowSpec(
                    block_size=BLOCK, num_kv_heads=2, head_size=256, dtype=torch.bfloat16, sliding_window=window
                )
            )
        if setup.states:
            state = MambaSpec(
                block_size=self.block,
                shapes=((full.page_size_bytes // 4,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
            specs += [state] * 3
        blocks = math.ceil((length + DECODE) / self.block)
        config = KVCacheConfig(
            num_blocks=vllm_blocks(blocks, 1 if setup.states else len(specs), concurrency),
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
            prefix_cache_retention_interval=0,
        )
        self.states = setup.states
        self.hash_tokens = setup.hash_tokens
        self.budget = max(8192, length)
        self.manager = KVCacheManager(
            config,
            max_model_len=length + DECODE + 64,
            scheduler_block_size=math.lcm(*(spec.block_size for spec in specs)),
            hash_block_size=setup.hash_tokens,
            max_in_flight_tokens=self.budget,
            enable_caching=True,
            log_stats=False,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(setup.hash_tokens, sha256)
        self.sampling = SamplingParams(max_tokens=DECODE)
        self.sampling.update_from_generation_config({}, eos_token_id=100)
        self.running: list[Request] = []
        self.concurrency = concurrency
        self.times = Timings()
        self.served = 0

    def serve(self, tokens: list[int]) -> None:
        manager = self.manager
        start = time.perf_counter()
        request = Request(str(self.served), tokens, self.sampling, None, block_hasher=self.hasher)
        manager.new_step_starts()
        blocks, hit, junction = manager.get_computed_blocks(request)
        spent = time.perf_counter() - start
        request.shared_prefix_boundary = junction
        self.served += 1
        self.times.hit_tokens += hit
        position = hit
        while position < len(tokens):
            count = self._chunk(request, position)
            manager.new_step_starts()
            while True:
                start = time.perf_counter()
                first = position == hit
                done = manager.allocate_slots(request, count, hit if first else 0, blocks if first else None)
                spent += time.perf_counter() - start
                if done is not None or not self.running:
                    break
                spent += self._end_oldest()
            if done is None:
                manager.free(request)
                return
            position += count
            request.num_computed_tokens = position
            spent += self._drain()
        for _ in range(DECODE):
            request.append_output_token_ids(7)
            manager.new_step_starts()
            start = time.perf_counter()
            done = manager.allocate_slots(request, 1)
            self.times.decode.append(time.perf_counter() - start)
            if done is None:
                break
            request.num_computed_tokens += 1
            self._drain()
        self.running.append(request)
        if len(self.running) > self.concurrency:
            spent += self._end_oldest()
        self.times.request.append(spent)

    def _chunk(self, request: Request, position: int) -> int:
        """Prefill up to the budget; with states, stop where its scheduler would: states exist at chunk ends only."""
        end = min(position + self.budget, request.num_prompt_tokens)
        if not self.states:
            return int(end - position)
        stops = [get_mamba_prefill_checkpoint_position(request.num_tokens, self.block, False)]
        if self.manager.coordinator.enable_partial_hash_hits:
            stops.append(get_mamba_prefill_checkpoint_position(request.num_prompt_tokens, self.hash_tokens, False))
        if request.shared_prefix_boundary:
            whole = (request.shared_prefix_boundary - position) // self.block * self.block
            stops.append(position + whole)
        if position % self.block:
            stops.append((position // self.block + 1) * self.block)
        stop: int = min([stop for stop in stops if position < stop < end], default=end)
        return stop - position

    def _drain(self) -> float:
        start = time.perf_counter()
        self.manager.take_new_block_ids()
        _, returned = self.manager.take_kv_cache_block_copies()
        self.manager.take_boundary_state_offloads()
        if returned:
            self.manager.block_pool.free_blocks(returned)
        return time.perf_counter() - start

    def _end_oldest(self) -> float:
        request = self.running.pop(0)
        start = time.perf_counter()
        self.manager.free(request)
        return time.perf_counter() - start


def measure(name: str, setup: Setup, length: int, count: int, concurrency: int) -> dict[str, float]:
    """Serve the same requests on both sides, in turn."""
    rng = random.Random(0)
    families = [[rng.randrange(32000) for _ in range(int(length * SHARED))] for _ in range(FAMILIES)]
    ours, theirs = Ours(setup, length, concurrency), Theirs(setup, length, concurrency)
    gc.collect()
    gc.freeze()
    for _ in range(count):
        shared = rng.choice(families)
        tokens = shared + [rng.randrange(32000) for _ in range(length - len(shared))]
        theirs.serve(tokens)
        ours.serve(list(tokens))
    (our_request, our_decode), (their_request, their_decode) = ours.times.median_us(), theirs.times.median_us()
    result = {
        "ours_us": round(our_request, 1),
        "vllm_us": round(their_request, 1),
        "ratio": round(our_request / their_request, 3),
        "ours_decode_us": round(our_decode, 2),
        "vllm_decode_us": round(their_decode, 2),
        "decode_ratio": round(our_decode / their_decode, 3),
        "ours_hit": round(ours.times.hit_tokens / (count * length), 3),
        "vllm_hit": round(theirs.times.hit_tokens / (count * length), 3),
    }
    stats = ours.cache.stats
    print(
        f"{name:32s} {result}  blocks evicted {stats.blocks_evicted}, checkpoints {stats.checkpoints_evicted}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="requests of 4,096 tokens (a tenth as many of 32k)")
    parser.add_argument("--quick", action="store_true", help="4,096 tokens only, 300 requests")
    args = parser.parse_args()
    count = 300 if args.quick else args.requests
    results: dict[str, dict[str, float]] = {}
    large_block: dict[str, dict[str, float]] = {}
    for length, number, concurrency in ((4096, count, 32), (32768, count // 10, 8)):
        if args.quick and length > 4096:
            continue
        suffix = "" if length == 4096 else " @32k"
        for name, setup in SETUPS.items():
            results[name + suffix] = measure(name + suffix, setup, length, number, concurrency)
        name = f"full+states{suffix}, vLLM hashing {STATE_BLOCK}"
        large_block[name] = measure(name, LARGE_BLOCK, length, number, concurrency)
    print(
        json.dumps(
            {
                "benchmark": "cache_core",
                "compiled": IS_COMPILED,
                "ratios": {name: result["ratio"] for name, result in results.items()},
                "decode_ratios": {name: result["decode_ratio"] for name, result in results.items()},
                "large_block_ratios": {name: result["ratio"] for name, result in large_block.items()},
                "results": results | large_block,
            }
        )
    )


if __name__ == "__main__":
    main()
