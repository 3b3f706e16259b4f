"""Engines whose cache is almost full: from the smallest pool that vLLM accepts upwards, no hit ends an engine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import FAMILIES, Family
from engines import Engine, EngineDiedError, Host, Reply, Request, Run, Server, file_url, tokens, transfer_config
from oracle import Oracle
from pools import workload
from shelves import forget, verify

SCHEDULER = "hybridkv.integrations.vllm.checkpoint_scheduler.CheckpointScheduler"
LONGEST = 1024
SMALL: dict[str, Any] = {"max_model_len": LONGEST, "max_num_batched_tokens": 512}
REQUESTS = int(os.environ.get("HYBRIDKV_POOL_REQUESTS", "40"))
OUTLIERS = 1 + REQUESTS // 200
POOLS = range(int(os.environ.get("HYBRIDKV_POOLS", "0"))) or (0, 5)
"""Blocks beyond the smallest pool. With 5, as with most, the engine of Qwen3-Next ended before hits were counted."""
SMALLEST = {"qwen3_next": 10, "gemma3": 27}
"""Blocks with these options, one of them vLLM's null block."""
CLIENTS = 12
Start = Callable[..., Engine]


def engine_of(family: Family, start: Start, blocks: int, directory: Path, **options: Any) -> Engine:
    return start(
        family, kv_transfer_config=transfer_config([file_url(directory)]), num_gpu_blocks_override=blocks, **options
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


@pytest.mark.parametrize("more", POOLS)
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
    oracle.check(run, exact=False, outliers=OUTLIERS)
    engine.close()
    assert verify(tmp_path) > 0


@pytest.mark.parametrize("more", POOLS[1::2])
def test_random_requests_over_http(
    more: int, family: Family, host: Host, checkpoints: Mapping[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    """Clients that leave abort their requests. Every other one is answered, and the server lives on.

    vLLM refuses a reset while blocks are held, for a step in flight or for a save by a worker in another process.
    """
    host.wait_until_started()
    options = {
        "dtype": family.dtype,
        "max-num-seqs": 8,
        "max-model-len": LONGEST,
        "max-num-batched-tokens": 512,
        "num-gpu-blocks-override": SMALLEST[family.name] + more,
        "mamba-ssm-cache-dtype": "bfloat16" if family.dtype == "bfloat16" else "auto",
        "scheduler-cls": SCHEDULER,
        "kv-transfer-config": json.dumps(transfer_config([file_url(tmp_path / "store")])),
    }
    named = [f"--{name}={value}" for name, value in options.items()]
    model = checkpoints[family.name]
    server = Server(host, tmp_path / "log", model, "--tokens-only", "--skip-tokenizer-init", *named)
    server.wait_until_healthy()
    requests, aborts = workload(100 + more, REQUESTS, LONGEST)

    def ask(name: str) -> Reply | None:
        if int(name) % 25 == 24:
            httpx.post(f"{server.url}/reset_prefix_cache", params={"reset_running_requests": True})
        return generate(server.url, requests[name], patience_s=0.05 if name in aborts else 120.0)

    with ThreadPoolExecutor(CLIENTS) as clients:
        replies = dict(zip(requests, clients.map(ask, requests), strict=True))
    assert {name for name, reply in replies.items() if reply is None} <= aborts.keys()
    assert httpx.get(f"{server.url}/health").status_code == 200
    wait_until_free(server)
    server.terminate()
    oracle.check(Run({name: reply for name, reply in replies.items() if reply}, 0, 0), exact=False, outliers=OUTLIERS)


def generate(url: str, request: Request, patience_s: float) -> Reply | None:
    """The reply, or None if it did not come in time."""
    params = {"temperature": 0, "max_tokens": request.max_tokens, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": request.prompt, "sampling_params": params, "cache_salt": request.salt}
    try:
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=httpx.Timeout(120.0, read=patience_s))
    except httpx.ReadTimeout:
        return None
    [choice] = answer.raise_for_status().json()["choices"]
    said = choice["token_ids"]
    return Reply(request, said, [{} for _ in said], cached=0, finish=choice["finish_reason"], spans=[])


def wait_until_free(server: Server) -> None:
    """Wait until no request holds a block, so that vLLM's own cache can be emptied."""
    deadline = time.monotonic() + 30.0
    while not httpx.post(f"{server.url}/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < deadline, server.last_words()
        time.sleep(0.1)
