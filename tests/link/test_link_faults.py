"""Two linked engines, of which one is killed, stopped, slow or wrong: the other one goes on, and its replies are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hybridkv.engine import Engine
from tests.link.fault_workers import Outpost, expected, free_port, model_of, prompt_of

LENGTH = 300
TRANSPORTS = pytest.mark.parametrize("transport", ["", "tcp"], ids=["default", "tcp"])
FAST = {"lease_s": 1.0, "timeout_s": 1.0}


class Crew:
    """Starts outposts and knows what they must reply."""

    def __init__(self, transport: str, oracle: Engine) -> None:
        self._transport = transport
        self._oracle = oracle
        self._stack = ExitStack()
        self._seed = 0

    def producer(self, **options: Any) -> Outpost:
        # The smallest parcels of 300 tokens are some ten.
        return self._start(role="prefill", parcel_bytes=16 << 10, **{**FAST, **options})

    def consumer(self, *peers: Outpost | int, **options: Any) -> Outpost:
        ports = [peer if isinstance(peer, int) else peer.port for peer in peers]
        return self._start(role="decode", peers=ports, **{**FAST, **options})

    def _start(self, **options: Any) -> Outpost:
        return self._stack.enter_context(Outpost(self._transport, **options))

    def prompt(self, length: int = LENGTH) -> list[int]:
        """Another one at each call."""
        self._seed += 1
        return prompt_of(length, self._seed)

    def right(self, prompt: list[int]) -> list[int]:
        [reply] = expected(self._oracle, [prompt])
        return reply

    def check_reply(self, one: Outpost) -> None:
        """It answers an ordinary request."""
        prompt = self.prompt(40)
        assert one.call("reply", prompt) == (self.right(prompt), None)

    def check_handover(self, producer: Outpost, consumer: Outpost) -> None:
        """A prompt goes over."""
        prompt = self.prompt()
        assert consumer.call("reply", prompt, producer.call("prefill", prompt)) == (self.right(prompt), LENGTH)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Engine]:
    with Engine(model_of("llama"), memory="4MiB") as engine:
        yield engine


@pytest.fixture
def crew(transport: str, oracle: Engine) -> Iterator[Crew]:
    crew = Crew(transport, oracle)
    yield crew
    crew.close()


def params_for(port: int, request_id: str = "none") -> dict[str, Any]:
    """What a producer at this port would have answered."""
    return {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port, "remote_request_id": request_id}


def early_params(port: int, transfer_id: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port, "transfer_id": transfer_id}


# --- the producer is killed -------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("gate", ["connect", "claim", "write-0", "written-0", "write-5", "written-5", "end"])
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
    report = consumer.call("wait_for", quarantined=0, arrivals=0, requests=0)
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
@pytest.mark.parametrize("gate", ["claim", "write-0", "written-0", "write-5", "written-5", "end"])
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
