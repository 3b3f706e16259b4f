"""Many requests at once among several engines: every answer is right, and nothing is held when all have ended.

HYBRIDKV_LINK_ROUNDS: how often each is repeated, with other requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from hybridkv.engine import Result, SamplingParams
from tests.engine.drive import GREEDY, memory_for
from tests.engine.zoo import fresh, prompt
from tests.link.pairs import REMOTE_DECODE, at_rest, plain
from tests.link.workers import PATIENCE_S, Worker, Workers

ROUNDS = int(os.environ.get("HYBRIDKV_LINK_ROUNDS", "1"))
CROWDED = ["llama", "gemma3", "qwen3_next", "falcon_h1"]
_AT_ONCE = 24
seeds = pytest.mark.parametrize("seed", range(ROUNDS))


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    producer: Worker
    consumer: Worker
    is_early: bool
    number: int


def ask(asked: Asked) -> Result:
    """Hand one request over."""
    tokens, params, producer, consumer, is_early, number = asked
    if not is_early:
        first = producer.generate(tokens, params, transfer=REMOTE_DECODE)
        result: Result = consumer.generate(tokens, params, transfer=first.kv_transfer_params)
        return result
    named = {"transfer_id": f"crowd {number}"}
    at = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": producer.port}
    answer = consumer.ask("generate", tokens, params, transfer=named | at)
    producer.generate(tokens, params, transfer=REMOTE_DECODE | named)
    late: Result = answer.result(PATIENCE_S)
    return late


def random_requests(
    chance: random.Random, count: int, producers: Sequence[Worker], consumers: Sequence[Worker], longest: int = 90
) -> list[Asked]:
    """Prompts of which many begin alike, sampled in several ways."""
    requests = []
    for number in range(count):
        tokens = prompt(longest, chance.randrange(3))[: chance.randrange(0, longest - 10)]
        tokens += prompt(chance.randrange(1, 12), chance.randrange(1000))
        params = replace(GREEDY, max_tokens=chance.randrange(1, 7))
        if chance.random() < 0.4:
            params = replace(params, temperature=1.0, seed=chance.randrange(99), top_p=chance.choice([1.0, 0.7]))
        if chance.random() < 0.15:
            params = replace(params, n=3, temperature=1.0, seed=number)
        pair = chance.choice(producers), chance.choice(consumers)
        requests.append(Asked(tokens, params, *pair, chance.random() < 0.4, number))
    return requests


def check_all(family: str, requests: Sequence[Asked], results: Sequence[Result | None]) -> None:
    """All results that there are have the tokens of one plain engine."""
    right = plain(family).generate([one.prompt for one in requests], [one.params for one in requests], progress=False)
    for result, other in zip(results, right, strict=True):
        if result is not None:
            assert [one.token_ids for one in result.completions] == [one.token_ids for one in other.completions]


def check_empty(engines: Sequence[Worker]) -> None:
    """Nothing is pinned or quarantined, and without its cached prefixes an engine uses no memory."""
    for worker in engines:
        at_rest(worker)
        worker.call("reset")
        audit = worker.audit()
        assert not any(audit.used_bytes.values()), audit


def all_at_once(call: Callable[[Asked], Any], requests: Sequence[Asked]) -> list[Any]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(call, requests))


@seeds
@pytest.mark.parametrize("family", CROWDED)
@pytest.mark.parametrize(("num_producers", "num_consumers"), [(1, 2), (2, 1)], ids=["one to two", "two to one"])
def test_three_processes(workers: Workers, family: str, num_producers: int, num_consumers: int, seed: int) -> None:
    producers = [workers.start(family, role="prefill") for _ in range(num_producers)]
    peers = [one.url for one in producers]
    consumers = [workers.start(family, role="decode", peers=peers) for _ in range(num_consumers)]
    chance = random.Random(f"{family} {num_producers} {seed}")
    requests = random_requests(chance, 150, producers, consumers)
    results = all_at_once(ask, requests)
    check_all(family, requests, results)
    stats = [one.stats().link for one in consumers]
    assert not any(one.failures for one in stats)
    assert sum(one.received_requests for one in stats) == len(requests)
    check_empty([*producers, *consumers])


@seeds
@pytest.mark.parametrize("family", CROWDED)
def test_prompts_wait_for_room(workers: Workers, family: str, seed: int) -> None:
    """The consumer has memory for two requests: prompts wait for it, and samples are preempted."""
    memory = memory_for(fresh(family), 2, 140)
    producer = workers.start(family, role="prefill", max_num_batched_tokens=64, max_num_seqs=8)
    consumer = workers.start(family, role="decode", peers=[producer.url], memory=memory, max_num_batched_tokens=64,
                             max_num_seqs=8)  # fmt: skip
    chance = random.Random(f"{family} {seed}")
    requests = [
        one._replace(params=replace(one.params, max_tokens=chance.randrange(10, 30)))
        for one in random_requests(chance, 30, [producer], [consumer])
    ]
    results = all_at_once(ask, requests)
    check_all(family, requests, results)
    assert any(result.received is not None for result in results)
    check_empty([producer, consumer])


@seeds
@pytest.mark.parametrize("transport", ["cma", "tcp"])
@pytest.mark.parametrize("family", CROWDED)
def test_requests_left_early(workers: Workers, family: str, transport: str, seed: int) -> None:
    """Callers of either side leave at any time: those that stay get the right answer."""
    producer = workers.start(family, transport, role="prefill", lease_s=3.0, max_num_batched_tokens=64, max_num_seqs=32)
    consumer = workers.start(family, transport, role="decode", peers=[producer.url], timeout_s=4.0)
    chance = random.Random(f"{family} {seed}")
    waits = [(chance.random() * 0.2, chance.random() * 0.4) for _ in range(60)]

    def leave(asked: Asked) -> Result | None:
        tokens, params, _, _, is_early, number = asked
        named = {"transfer_id": f"left {number}"} if is_early else {}
        sent = producer.ask("leave", tokens, params, REMOTE_DECODE | named, waits[number][0])
        transfer: Any = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": producer.port, **named}
        if not is_early:
            first = sent.result(PATIENCE_S)
            transfer = None if first is None else first.kv_transfer_params
        result: Result | None = consumer.call("leave", tokens, params, transfer, waits[number][1])
        sent.result(PATIENCE_S)
        return result

    requests = random_requests(chance, 60, [producer], [consumer])
    requests = [one._replace(params=replace(one.params, max_tokens=20)) for one in requests]
    check_all(family, requests, all_at_once(leave, requests))
    check_empty([producer, consumer])
    after = random_requests(chance, 4, [producer], [consumer])
    check_all(family, after, [ask(one) for one in after])
