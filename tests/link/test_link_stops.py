"""Linked engines of which one is stopped (SIGSTOP) for longer than the other waits, and goes on later."""

from __future__ import annotations

import time

import pytest

from tests.link.crew import LENGTH, TRANSPORTS, Crew, crew, early_params, oracle
from tests.link.fault_workers import Outpost

__all__ = ["crew", "oracle"]  # fixtures


@TRANSPORTS
@pytest.mark.parametrize("gate", ["claim", "write-0", "written-5"])
def test_a_stopped_producer(crew: Crew, gate: str) -> None:
    """Its pages are quarantined until it says that it has ended. What it writes after that harms nobody."""
    producer, other = crew.producer(lease_s=30.0), crew.producer()
    consumer = crew.consumer(producer, other, timeout_s=0.5)
    crew.check_handover(producer, consumer)
    producer.call("restore")
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    producer.call("shut", gate)
    answer = consumer.ask("reply", prompt, offered)
    producer.reached(gate)
    producer.call("open", gate, 0.3)  # it runs into this after it was stopped
    producer.stop()
    assert answer.result(20) == (crew.right(prompt), None)
    begin = time.monotonic()
    while time.monotonic() - begin < (6.5 if gate == "claim" else 1.5):  # a call of the consumer waits for 5 s
        crew.check_reply(consumer)
        crew.check_handover(other, consumer)
    assert consumer.call("wait_for", quarantine_gauge=1)["quarantined"] == 1
    producer.go_on()
    _keep_busy(crew, consumer, 0.5)
    consumer.call("wait_for", quarantined=0, arrivals=0)
    producer.call("wait_for", pins=0, outbound=0, pushes=0)
    crew.check_handover(producer, consumer)


def _keep_busy(crew: Crew, consumer: Outpost, seconds: float) -> None:
    """Requests that take all pages which are free: a page that is written to by others spoils one of them."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        prompts = [crew.prompt() for _ in range(4)]
        answers = [consumer.ask("reply", prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result(20) == (crew.right(prompt), None)


@TRANSPORTS
def test_requests_wait_for_pages_that_a_stopped_producer_may_write_to(crew: Crew) -> None:
    """The prompt does not fit twice: it is computed once its first pages are free."""
    producer = crew.producer(lease_s=30.0)
    consumer = crew.consumer(producer, timeout_s=0.5, memory="224KiB")
    prompt = crew.prompt()
    offered = producer.call("prefill", prompt)
    producer.call("shut", "write-5")
    answer = consumer.ask("reply", prompt, offered)
    producer.reached("write-5")
    producer.stop()
    time.sleep(1.5)
    assert not answer.done(), answer.result()
    producer.go_on()
    producer.call("open", "write-5")
    assert answer.result(20) == (crew.right(prompt), None)
    consumer.call("wait_for", quarantined=0, arrivals=0)
    crew.check_reply(consumer)


@TRANSPORTS
@pytest.mark.parametrize("is_early", [False, True], ids=["late", "early"])
def test_a_stopped_consumer(crew: Crew, is_early: bool) -> None:
    """Its leases end. When it goes on, it computes what it waited for, and later prompts come again."""
    producer = crew.producer(lease_s=1.0)
    consumer, other = crew.consumer(producer), crew.consumer(producer)
    crew.check_handover(producer, consumer)
    producer.call("restore")
    prompt = crew.prompt()
    if is_early:
        answer = consumer.ask("reply", prompt, early_params(producer.port, "early"))
        producer.call("wait_for", outbound=1)
    else:
        offered = producer.call("prefill", prompt)
        producer.call("slow_down", 0.4)
        answer = consumer.ask("reply", prompt, offered)
        producer.call("wait_for", pushes=1)
    consumer.stop()
    producer.call("wait_for", pins=0, outbound=0)
    producer.call("restore")
    crew.check_reply(producer)
    crew.check_handover(producer, other)
    consumer.go_on()
    assert answer.result(20) == (crew.right(prompt), None)
    consumer.call("wait_for", quarantined=0, arrivals=0)
    producer.call("wait_for", pins=0, outbound=0, pushes=0)
    crew.check_handover(producer, consumer)


@TRANSPORTS
def test_a_silent_producer_delays_no_other(crew: Crew) -> None:
    producer, other = crew.producer(lease_s=30.0), crew.producer()
    consumer = crew.consumer(producer, other, timeout_s=1.5)
    crew.check_handover(producer, consumer)
    prompts = [crew.prompt(60) for _ in range(8)]
    offered = [producer.call("prefill", prompt) for prompt in prompts]
    producer.stop()
    answers = [consumer.ask("reply", prompt, params) for prompt, params in zip(prompts, offered, strict=True)]
    for _ in range(3):
        time.sleep(0.5)
        prompt = crew.prompt()
        assert consumer.call("reply", prompt, other.call("prefill", prompt)) == (crew.right(prompt), LENGTH)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.result(20) == (crew.right(prompt), None)
    producer.go_on()
    consumer.call("wait_for", quarantined=0, arrivals=0)
