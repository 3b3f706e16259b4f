"""Linked engines killed at random times while requests run. `make prove-link` kills more of them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hybridkv.engine import Engine
from tests.link.crew import TRANSPORTS, Crew, early_params
from tests.link.fault_workers import Outpost, free_port
from tests.link.rig import model_of

ROUNDS = int(os.environ.get("HYBRIDKV_LINK_ROUNDS", "1"))
SEED = int(os.environ.get("HYBRIDKV_LINK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
TOKENS = 192
"""Tokens of a prompt: some 24 MiB of cache."""
LONGEST_S = 1.0
"""From the first request to the kill."""
BULKY: dict[str, Any] = {"model": "bulky", "memory": "256MiB", "parcel_bytes": 1 << 20, "lease_s": 3.0}


@pytest.mark.parametrize("side", ["producer", "consumer"])
@TRANSPORTS
def test_kills_at_random_times(transport: str, side: str, record_property: Callable[[str, object], None]) -> None:
    """The survivor answers all requests, and uses the process that takes the place of the killed one."""
    record_property("link", f"{side} over {transport or 'default'}: HYBRIDKV_LINK_SEED={SEED}")
    chance = random.Random(f"{SEED} {transport} {side}")
    with Engine(model_of("bulky"), memory="64MiB", device="cpu") as oracle:
        crew = Crew(transport, oracle, seed=chance.randrange(1 << 30))
        try:
            summary = _rounds(crew, side, chance)
        finally:
            crew.close()
    record_property("link", f"{side} killed over {transport or 'default'}: {summary}")


def _rounds(crew: Crew, side: str, chance: random.Random) -> dict[str, Any]:
    port, begin, answered, received = free_port(), time.monotonic(), 0, 0
    producer: Outpost | None = None
    consumer: Outpost | None = None
    for number in range(ROUNDS):
        producer = producer or crew.producer(port=port, **BULKY)
        consumer = consumer or crew.consumer(producer, **{**BULKY, "timeout_s": 5.0})
        if chance.random() < 0.7:
            crew.check_handover(producer, consumer, TOKENS)
        prompts = [crew.prompt(TOKENS) for _ in range(3)]
        answers = [_hand_over(producer, consumer, prompt, f"{number}-{index}") for index, prompt in enumerate(prompts)]
        time.sleep(chance.uniform(0.0, LONGEST_S))
        victim, survivor = (producer, consumer) if side == "producer" else (consumer, producer)
        victim.kill()
        if side == "producer":
            for prompt, (_, answer) in zip(prompts, answers, strict=True):
                tokens, came = answer.result(30)
                assert tokens == crew.right(prompt)
                answered, received = answered + 1, received + (came is not None)
            producer = None
        else:
            for prefill, _ in answers:
                prefill.result(30)
                answered += 1
            consumer = None
        survivor.call("wait_for", quarantined=0, arrivals=0, pins=0, outbound=0, pushes=0, requests=0)
        crew.check_reply(survivor)
        assert survivor.exit_code is None
    report = survivor.call("report")
    return {
        "kills": ROUNDS,
        "answered": answered,
        "received": received,
        "failures": report["failures"],
        "sent": report["sent"],
        "seconds": round(time.monotonic() - begin),
    }


def _hand_over(
    producer: Outpost, consumer: Outpost, prompt: list[int], transfer_id: str
) -> tuple[Future[Any], Future[Any]]:
    """Both sides get the request at once."""
    answer = consumer.ask("reply", prompt, early_params(producer.port, transfer_id))
    return producer.ask("prefill", prompt, transfer_id), answer
