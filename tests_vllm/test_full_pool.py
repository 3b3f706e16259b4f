"""Engines whose cache is almost full: from the smallest pool that vLLM accepts upwards, no hit ends an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, Family
from engines import Engine, EngineDiedError, Request, file_url, tokens, transfer_config
from oracle import Oracle
from pools import workload
from shelves import forget, verify

SCHEDULER = "hybridkv.integrations.vllm.checkpoint_scheduler.CheckpointScheduler"
LONGEST = 1024
SMALL: dict[str, Any] = {"max_model_len": LONGEST, "max_num_batched_tokens": 512}
REQUESTS = int(os.environ.get("HYBRIDKV_POOL_REQUESTS", "40"))
POOLS = int(os.environ.get("HYBRIDKV_POOLS", "2"))
SMALLEST = {"qwen3_next": 10, "gemma3": 27}
"""Blocks with these options, one of them vLLM's null block."""
Start = Callable[..., Engine]


def engine_of(family: Family, start: Start, blocks: int, directory: Path, **options: Any) -> Engine:
    return start(
        family,
        kv_transfer_config=transfer_config([file_url(directory)]),
        num_gpu_blocks_override=blocks,
        **options,
    )


@pytest.mark.parametrize("scheduler", [{}, {"scheduler_cls": SCHEDULER}], ids=["vllm", "ours"])
def test_a_hit_that_needs_more_blocks_than_vllm_counts(scheduler: dict[str, str], start: Start, tmp_path: Path) -> None:
    """Five requests decode. The hit is preempted, and comes back at the end of a block: vLLM counts six blocks for it,
    seven are free, and it takes nine."""
    engine = engine_of(FAMILIES["qwen3_next"], start, 28, tmp_path, **scheduler)
    stem = tokens(600, seed=1)
    engine.ask(stem)
    forget(engine, tmp_path)
    requests = {str(n): Request(tokens(50 + n, seed=10 + n), max_tokens=60) for n in range(5)}
    requests["hit"] = Request(stem + tokens(700, seed=2), at=8)
    run = engine.run(requests)
    assert run["hit"].cached == 600
    assert run.preemptions
    assert {reply.finish for reply in run.replies.values()} == {"length"}
    engine.close()


def test_the_smallest_pool(family: Family, start: Start) -> None:
    """With one block less vLLM does not start: the workloads begin where it does."""
    engine = start(family, num_gpu_blocks_override=SMALLEST[family.name] - 1, **SMALL)
    with pytest.raises(EngineDiedError, match="To serve at least one request with the model's max seq len"):
        engine.ask([3])


@pytest.mark.parametrize("more", range(POOLS))
def test_random_requests(more: int, family: Family, start: Start, oracle: Oracle, tmp_path: Path) -> None:
    """Shared prefixes, salts, aborts, resets and preemptions. No engine ends, no token is wrong, no block is lost."""
    blocks = SMALLEST[family.name] + more
    own = {"scheduler_cls": SCHEDULER} if more % 2 else {}
    engine = engine_of(family, start, blocks, tmp_path, **SMALL, **own)
    requests, aborts = workload(more, REQUESTS, LONGEST)
    run = engine.run(requests, aborts, resets=range(30, 10 * REQUESTS, 70))
    assert run.replies.keys() == requests.keys()
    assert sum(reply.cached > 0 for reply in run.replies.values()) > REQUESTS // 20
    assert engine.call("reset_prefix_cache"), "blocks are held, though all requests have ended"
    assert engine.call("free_blocks") == blocks - 1
    oracle.check(run, exact=False)
    engine.close()
    assert verify(tmp_path) > 0
