"""Two linked engines, of which one is killed: the other one goes on, and its replies are right."""

from __future__ import annotations

import pytest

from tests.link.crew import TRANSPORTS, Crew, crew, oracle
from tests.link.fault_workers import free_port

__all__ = ["crew", "oracle"]  # fixtures


# --- the producer is killed -------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("gate", ["connect", "claim", "written-0", "write-5", "end"])
def test_a_killed_producer(crew: Crew, gate: str) -> None:
    """Wherever it is: the consumer computes the prompt, frees its pages, and uses the producer that comes after it."""
    port = free_port()
    producer = crew.producer(port=port, gates=[gate] if gate == "connect" else [])
    consumer = crew.consumer(producer, timeout_s=20.0)
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    if gate != "connect":
        producer.call("shut", gate)
    answer = consumer.ask("reply", prompt, offered)
    producer.reached(gate)
    producer.kill()
    assert answer.result(15) == (crew.right(prompt), None)
    crew.check_reply(consumer)
    report = consumer.call("wait_for", quarantined=0, quarantine_gauge=0, arrivals=0, requests=0)
    assert report["failures"] == {"peer": 1}
    crew.check_handover(crew.producer(port=port), consumer)
    assert consumer.exit_code is None


@TRANSPORTS
def test_a_producer_that_dies_before_the_claim(crew: Crew) -> None:
    other, port = crew.producer(), free_port()
    producer = crew.producer(port=port)
    consumer = crew.consumer(producer, other)
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    producer.kill()
    assert consumer.call("reply", prompt, offered) == (crew.right(prompt), None)
    crew.check_handover(other, consumer)
    consumer.call("wait_for", quarantined=0, arrivals=0)
    crew.check_handover(crew.producer(port=port), consumer)


# --- the consumer is killed -------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("gate", ["claim", "write-0", "written-5", "end"])
def test_a_killed_consumer(crew: Crew, gate: str) -> None:
    """Wherever the producer is: it unpins, serves others, and the consumer that comes after it."""
    producer = crew.producer(lease_s=20.0)
    consumer, other = crew.consumer(producer), crew.consumer(producer)
    crew.check_handover(producer, other)
    producer.call("restore")
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    producer.call("shut", gate)
    consumer.ask("reply", prompt, offered)
    producer.reached(gate)
    consumer.kill()
    producer.call("open", gate)
    producer.call("wait_for", pins=0, outbound=0, pushes=0)  # long before the lease ends
    crew.check_reply(producer)
    crew.check_handover(producer, other)
    crew.check_handover(producer, crew.consumer(producer))
    producer.call("wait_for", pins=0, outbound=0, pushes=0)
    assert producer.exit_code is None


@TRANSPORTS
def test_a_consumer_that_never_claims(crew: Crew) -> None:
    """The lease of its prompt ends."""
    producer = crew.producer()
    consumer = crew.consumer(producer)
    crew.check_handover(producer, consumer)
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    assert producer.call("report")["pins"] == 1
    consumer.kill()
    report = producer.call("wait_for", timeout_s=3.0, pins=0, outbound=0)
    assert report["failures"] == {"lease": 1}
    late = crew.consumer(producer)
    assert late.call("reply", prompt, offered) == (crew.right(prompt), None)
    assert late.call("wait_for", quarantined=0, arrivals=0)["failures"] == {"unknown": 1}
