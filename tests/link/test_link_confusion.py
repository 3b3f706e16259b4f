"""Linked engines whose messages are lost, repeated, reordered or rubbish, and whose pages or secrets are wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.link.crew import LENGTH, TRANSPORTS, Crew, crew, early_params, oracle, params_for
from tests.link.rig import REPLY_TOKENS
from tests.patience import Stopwatch

__all__ = ["crew", "oracle"]  # fixtures

_PLAN = {"kind": "plan", "claim": "CLAIM", "step": 0, "start": 0, "end": 16, "by_layer": False, "parcel_bytes": 1}
_RUBBISH: list[Any] = [
    b"",
    b"\xff\xfe",
    b"{",
    [],
    7,
    {},
    {"kind": "plan"},
    {"kind": ["plan"], "claim": "CLAIM"},
    {"kind": "parcel", "claim": ["CLAIM"], "step": 0, "number": 0, "checksum": 1},
    {"kind": "parcel", "claim": "CLAIM", "step": {}, "number": 0, "checksum": 1},
    {"kind": "parcel", "claim": "CLAIM", "step": 0, "number": "0", "checksum": 1},
    {"kind": "parcel", "claim": "unknown", "step": 0, "number": 0, "checksum": 1},
    {"kind": "end", "claim": "unknown", "num_parcels": [], "first": []},
    {"kind": "end", "claim": "CLAIM", "num_parcels": ["a"], "first": []},
    {"kind": "end", "claim": "CLAIM", "num_parcels": [[1]], "first": []},
    {"kind": "end", "claim": "CLAIM", "num_parcels": 3, "first": []},
    {"kind": "end", "claim": "CLAIM", "num_parcels": [1], "first": [{"token": "x"}]},
    {"kind": "failed", "claim": "unknown", "reason": 3},
    {**_PLAN, "pages": {"tables": 3, "states": {}}},
    {**_PLAN, "step": "one", "pages": {"tables": {}, "states": {}}},
    {**_PLAN, "step": 9, "start": "a", "pages": {"tables": {}, "states": {}}},
    {**_PLAN, "step": 9, "pages": {"tables": {"full": ["a"]}, "states": {"full": None}}},
]
_LIES: list[Any] = [
    {"kind": "parcel", "claim": "CLAIM", "step": 0, "number": 1 << 40, "checksum": 1},
    {"kind": "parcel", "claim": "CLAIM", "step": 0, "number": -1, "checksum": 1},
    {"kind": "parcel", "claim": "CLAIM", "step": 0, "number": 0, "checksum": 1},
    {"kind": "end", "claim": "CLAIM", "num_parcels": [1, 1], "first": []},
    {**_PLAN, "end": 1 << 50, "pages": {"tables": {"full": [1 << 40]}, "states": {}}},
    {**_PLAN, "start": -5, "pages": {"tables": {"full": [1, 2]}, "states": {}}},
    {**_PLAN, "parcel_bytes": 0, "pages": {"tables": {}, "states": {"none": [1]}}},
]


def encoded(messages: Sequence[Any]) -> list[bytes]:
    return [one if isinstance(one, bytes) else json.dumps(one, separators=(",", ":")).encode() for one in messages]


@TRANSPORTS
def test_messages_that_are_repeated_reordered_or_rubbish(crew: Crew) -> None:
    producer = crew.producer()
    consumer = crew.consumer(producer, timeout_s=20.0)
    for confusion in (("repeat",), ("reverse",), ("babble", encoded(_RUBBISH))):
        consumer.call("confuse", *confusion)
        crew.check_handover(producer, consumer)
        consumer.call("restore")
    assert consumer.call("wait_for", arrivals=0)["failures"] == {}


@TRANSPORTS
def test_messages_that_lie(crew: Crew) -> None:
    """They have the right form and name a claim, but not what exists. The reply is right, and the link goes on."""
    producer = crew.producer()
    consumer = crew.consumer(producer, timeout_s=0.5)
    for lie in encoded(_LIES):
        consumer.call("confuse", "babble", [lie])
        prompt = crew.prompt()
        assert consumer.call("reply", prompt, producer.call("prefill", prompt))[0] == crew.right(prompt)
        consumer.call("wait_for", quarantined=0, arrivals=0)
        consumer.call("restore")
    crew.check_handover(producer, consumer)


@TRANSPORTS
@pytest.mark.parametrize("confusion", [
    ("drop", "plan", 0), ("drop", "parcel", 7), ("drop", "end", 0), ("repeat_first_drop_last",),
])  # fmt: skip
def test_messages_that_are_lost(crew: Crew, confusion: tuple[Any, ...]) -> None:
    """The consumer computes the prompt after its timeout, and its pages become free."""
    producer = crew.producer()
    consumer = crew.consumer(producer)
    prompt = crew.prompt()
    consumer.call("confuse", *confusion)
    assert consumer.call("reply", prompt, producer.call("prefill", prompt)) == (crew.right(prompt), None)
    assert consumer.call("wait_for", quarantined=0, arrivals=0)["failures"] == {"timeout": 1}
    consumer.call("restore")
    crew.check_handover(producer, consumer)
    producer.call("wait_for", pins=0, outbound=0, pushes=0)


@TRANSPORTS
def test_a_prompt_without_its_first_tokens(crew: Crew) -> None:
    """The consumer has the whole prompt and nothing to go on with: it computes the last block again."""
    producer = crew.producer()
    consumer = crew.consumer(producer)
    prompt = crew.prompt()
    before = consumer.call("report")["computed"]
    consumer.call("confuse", "forget_first_tokens")
    assert consumer.call("reply", prompt, producer.call("prefill", prompt)) == (crew.right(prompt), LENGTH)
    assert consumer.call("report")["computed"] - before == LENGTH % 16 + REPLY_TOKENS - 1
    consumer.call("restore")
    crew.check_handover(producer, consumer)


@TRANSPORTS
@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("number", [0, 7])
def test_corrupt_pages(crew: Crew, side: str, number: int) -> None:
    """The prompt is computed from the bad parcel on: a model with full attention keeps what came before it."""
    producer = crew.producer()
    consumer = crew.consumer(producer)
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    if side == "producer":
        producer.call("spoil_source", number)
    else:
        consumer.call("spoil_target", number)
    before = consumer.call("report")["computed"]
    assert consumer.call("reply", prompt, offered) == (crew.right(prompt), None)
    report = consumer.call("wait_for", quarantined=0, arrivals=0)
    assert report["failures"] == {"corrupt": 1}
    computed = report["computed"] - before
    assert (computed < 200) == (number > 0)  # messages of three writes may come in any order
    producer.call("wait_for", pins=0, outbound=0)


@TRANSPORTS
def test_a_slow_link(crew: Crew) -> None:
    """The consumer gives up; the producer says when it has ended its writes."""
    producer = crew.producer()
    consumer = crew.consumer(producer, timeout_s=0.5)
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    producer.call("slow_down", 0.7)
    begin = Stopwatch()
    assert consumer.call("reply", prompt, offered) == (crew.right(prompt), None)
    assert begin.seconds < 5
    assert consumer.call("wait_for", quarantined=0, arrivals=0)["failures"] == {"timeout": 1}
    producer.call("wait_for", pins=0, outbound=0, pushes=0)
    producer.call("restore")
    crew.check_handover(producer, consumer)


@TRANSPORTS
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_wrong_secret(crew: Crew, side: str) -> None:
    wrong = {"secret": "a secret of other engines"}
    producer = crew.producer(**wrong if side == "producer" else {})
    consumer = crew.consumer(producer, **wrong if side == "consumer" else {})
    for _ in range(3):
        prompt = crew.prompt()
        assert consumer.call("reply", prompt, producer.call("prefill", prompt)) == (crew.right(prompt), None)
    assert consumer.call("wait_for", quarantined=0, arrivals=0)["failures"] == {"unproven": 3}
    producer.call("wait_for", pins=0, outbound=0)


@TRANSPORTS
def test_a_lease_is_renewed_while_its_request_waits_for_room(crew: Crew) -> None:
    producer = crew.producer(lease_s=0.5)
    consumer = crew.consumer(producer, max_num_seqs=1)
    prompt = crew.prompt()
    consumer.call("slow_steps", 0.3)
    busy = consumer.ask("reply", crew.prompt(40))
    time.sleep(0.2)
    answer = consumer.ask("reply", prompt, producer.call("prefill", prompt))
    time.sleep(1.2)
    assert producer.call("report")["pins"] == 1
    busy.result(20)
    assert answer.result(20) == (crew.right(prompt), LENGTH)
    producer.call("wait_for", pins=0, outbound=0)


@TRANSPORTS
@pytest.mark.parametrize("gate", ["", "claim", "written-3"])
def test_the_consumer_aborts_its_request(crew: Crew, gate: str) -> None:
    """Before the claim (no gate) and after it."""
    producer = crew.producer(lease_s=20.0)
    consumer = crew.consumer(producer, timeout_s=20.0, max_num_seqs=1)
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    if gate:
        producer.call("shut", gate)
    else:
        consumer.call("slow_steps", 0.3)
        consumer.ask("reply", crew.prompt(40))
        time.sleep(0.2)
    consumer.ask("reply", prompt, offered)
    producer.reached(gate) if gate else time.sleep(0.2)
    consumer.call("abort")
    consumer.call("restore")
    if gate:
        consumer.call("wait_for", quarantined=1, requests=0)
        crew.check_reply(consumer)
        consumer.call("wait_for", quarantined=1)
        producer.call("open", gate)
    consumer.call("wait_for", quarantined=0, arrivals=0, requests=0)
    producer.call("wait_for", pins=0, outbound=0, pushes=0)
    producer.call("restore")
    crew.check_handover(producer, consumer)


@TRANSPORTS
@pytest.mark.parametrize("ends", ["abort", "lease", "withdrawn"])
def test_an_early_claim_that_ends_while_its_prompt_is_computed(crew: Crew, ends: str) -> None:
    """Nothing stays pinned, and the producer's engine goes on."""
    lease_s, step_s = (2.0, 0.8) if ends == "lease" else (20.0, 0.25)  # five steps: the lease ends before the fourth
    producer = crew.producer(max_num_batched_tokens=64, max_num_seqs=8, lease_s=lease_s)
    consumer = crew.consumer(producer, timeout_s=20.0)
    prompt = crew.prompt()
    answer = consumer.ask("reply", prompt, early_params(producer.port, "early"))
    producer.call("wait_for", outbound=1)
    producer.call("slow_steps", step_s)
    prefill = producer.ask("prefill", prompt, "early")
    producer.call("wait_for", requests=1, pushes=1)
    if ends == "lease":
        consumer.kill()
    else:
        consumer.call("abort")
        answer.result(10)
    producer.call("wait_for", outbound=0, pushes=0)
    if ends == "withdrawn":
        producer.call("abort")
    prefill.result(20)
    producer.call("wait_for", pins=0, outbound=0, pushes=0)
    producer.call("restore")
    crew.check_reply(producer)
    if ends != "lease":
        crew.check_handover(producer, consumer)


@TRANSPORTS
def test_prompts_that_wait_give_way_to_others(crew: Crew) -> None:
    producer = crew.producer(memory="192KiB")
    consumer = crew.consumer(producer)
    prompts = [crew.prompt(200) for _ in range(3)]
    offered = [producer.call("prefill", prompt) for prompt in prompts]
    assert all(offered)
    for prompt, params, received in zip(reversed(prompts), reversed(offered), (200, None, None), strict=True):
        assert consumer.call("reply", prompt, params) == (crew.right(prompt), received)
    producer.call("wait_for", pins=0, outbound=0)


@TRANSPORTS
def test_a_prompt_that_no_producer_has(crew: Crew) -> None:
    producer = crew.producer()
    consumer = crew.consumer(producer)
    prompt = crew.prompt()
    assert consumer.call("reply", prompt, params_for(producer.port)) == (crew.right(prompt), None)
    assert consumer.call("reply", crew.prompt(), early_params(producer.port, "nobody's"))[1] is None
    assert consumer.call("wait_for", quarantined=0, arrivals=0)["failures"] == {"unknown": 1, "timeout": 1}
    producer.call("wait_for", outbound=0, pushes=0)


@TRANSPORTS
def test_nothing_listens_on_other_interfaces(crew: Crew) -> None:
    producer = crew.producer()
    consumer = crew.consumer(producer)
    crew.check_handover(producer, consumer)
    for one in (producer, consumer):
        assert set(one.call("listeners")) == {"0100007F"}
