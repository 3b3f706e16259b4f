"""Hits are admitted only if their blocks are free: vLLM's own manager with random requests, and no engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from hybridkv.integrations.vllm.admission import _PATIENCE, Admission, guard

BLOCK = 32
LONGEST = 640
SEEDS = 40
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=100)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, attention_chunk_size=128
)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((FULL.page_size_bytes // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
MIXES: dict[str, list[KVCacheSpec]] = {
    "full": [FULL],
    "states": [FULL, STATE, STATE, STATE],
    "windows": [FULL, WINDOW, WINDOW],
    "chunks": [FULL, CHUNKED],
    "all": [FULL, WINDOW, STATE],
    "checkpoints": [FULL, replace(STATE, num_prefill_checkpoint_blocks=1)],
}


def make_manager(specs: list[KVCacheSpec], blocks: int) -> KVCacheManager:
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
    )
    init_none_hash(sha256)
    return KVCacheManager(
        config,
        max_model_len=LONGEST,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        max_in_flight_tokens=LONGEST,
        enable_caching=True,
        log_stats=False,
    )


def make_request(name: str, tokens: list[int]) -> Request:
    sampling = SamplingParams(max_tokens=8)
    sampling.update_from_generation_config({}, eos_token_id=10**6)
    return Request(name, tokens, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


class Life:
    """Random requests on one manager: hits of vLLM and of a connector, chunks, preemptions, ends."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager = manager
        self.source = random.Random(seed)
        self.stems = [[self.source.randrange(1000) for _ in range(LONGEST)] for _ in range(3)]
        self.running: list[Request] = []
        self.number = 0
        self.admitted = self.refused = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.manager.new_step_starts()
        self._run()
        if self.source.random() < 0.6:
            self._admit()
        if self.running and self.source.random() < 0.2:
            self._free(self.source.choice(self.running))
        self.manager.take_new_block_ids()
        self.manager.take_boundary_state_offloads()

    def _run(self) -> None:
        for request in list(self.running):
            count = min(self.source.randrange(1, 200), request.num_tokens - request.num_computed_tokens)
            while request in self.running and count and self.manager.allocate_slots(request, count) is None:
                self._free(self.running[-1])
            request.num_computed_tokens += count

    def _admit(self) -> None:
        stem = self.source.choice(self.stems)
        length = self.source.randrange(2, LONGEST - 8)
        same = self.source.randrange(length + 1)
        tokens = stem[:same] + [self.source.randrange(1000) for _ in range(length - same)]
        self.number += 1
        request = make_request(str(self.number), tokens)
        found, local, _ = self.manager.get_computed_blocks(request)
        at = self.source.choice((self.source.randrange(length), self.source.randrange(length) // BLOCK * BLOCK))
        external = max(0, min(at, length - 1) - local)
        count = self.source.randrange(1, length - local - external + 1)
        done = self.manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=local,
            new_computed_blocks=found,
            num_external_computed_tokens=external,
            full_sequence_must_fit=self.source.random() < 0.5,
            has_scheduled_reqs=bool(self.running),
        )
        if done is None:
            self.refused += 1
            return
        self.admitted += 1
        request.num_computed_tokens = local + external + count
        self.running.append(request)

    def _free(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request)


@pytest.mark.parametrize("mix", MIXES)
def test_no_admission_raises_and_the_count_is_what_vllm_takes(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, int]] = []
    allocate = KVCacheManager.allocate_slots

    def measured(manager: KVCacheManager, request: Request, *args: Any, **options: Any) -> Any:
        before = manager.block_pool.get_num_free_blocks()
        done = allocate(manager, request, *args, **options)
        if options.get("num_external_computed_tokens") and done is not None:
            counted[-1] = counted[-1][0], before - manager.block_pool.get_num_free_blocks()
        else:
            del counted[-1:]
        return done

    def noted(admission: Admission, *args: Any, **options: Any) -> int:
        counted.append((count(admission, *args, **options), -1))
        return counted[-1][0]

    count = Admission._blocks
    monkeypatch.setattr(KVCacheManager, "allocate_slots", measured)
    monkeypatch.setattr(Admission, "_blocks", noted)
    checked = refused = 0
    for seed in range(SEEDS):
        manager = make_manager(MIXES[mix], blocks=random.Random(seed).randrange(25, 80))
        guard(manager, give_up=lambda request: None)
        life = Life(manager, seed)
        for _ in range(60):
            counted.clear()
            life.step()
            real = [pair for pair in counted if pair[1] >= 0]
            # A block for a checkpoint inside the chunk is counted, whether vLLM keeps one or not.
            spare = 1 if mix == "checkpoints" else 0
            assert all(theirs <= ours <= theirs + spare for ours, theirs in real), (seed, real)
            checked += len(real)
        for request in list(life.running):
            life._free(request)
        assert manager.reset_prefix_cache()
        refused += life.refused
    assert checked > 10 * SEEDS
    assert refused > SEEDS


def test_vllm_alone_ends_in_an_error() -> None:
    """The guard prevents this error. If this test fails, vLLM counts right, and `admission` can be deleted."""
    life = Life(make_manager(MIXES["states"], blocks=40), seed=0)
    with pytest.raises(ValueError, match="free blocks from the pool"):
        life.run(2000)


def test_a_hit_waits_while_others_run_and_is_given_up_where_none_does() -> None:
    """It fits vLLM's count of five blocks, and takes eight. Blocks of ended requests come back some steps later."""
    given_up: list[str] = []
    manager = make_manager(MIXES["states"], blocks=9)
    guard(manager, give_up=lambda request: given_up.append(request.request_id))
    guard(manager, give_up=lambda request: given_up.append("another connector's"))
    request = make_request("hit", list(range(40)))

    def admit(**options: Any) -> Any:
        return manager.allocate_slots(request, 8, num_external_computed_tokens=32, **options)

    other = make_request("other", [1])
    manager.block_pool.get_new_blocks(1)
    for others_run in (True, *[False] * (_PATIENCE - 1), True, *[False] * (_PATIENCE - 1)):
        assert admit(has_scheduled_reqs=others_run) is None
    assert not given_up
    assert admit(has_scheduled_reqs=False) is None
    assert given_up == ["hit", "another connector's"]
    assert manager.block_pool.get_num_free_blocks() == 7
    assert manager.allocate_slots(other, 1) is not None, "other requests are vLLM's alone"


def test_it_is_installed_once() -> None:
    manager = make_manager(MIXES["full"], blocks=9)
    own: Callable[..., Any] = manager.allocate_slots
    guard(manager, give_up=print)
    first = manager.allocate_slots
    guard(manager, give_up=print)
    assert manager.allocate_slots is first is not own
    assert len(first.give_up) == 2
