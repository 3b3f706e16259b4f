"""What the tests of faults share: a crew of linked engines that starts, and knows what it must reply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hybridkv.engine import Engine
from tests.link.fault_workers import Outpost
from tests.link.rig import PARAMS, model_of, prompt_of
from tests.link.workers import TCP

LENGTH = 300
TRANSPORTS = pytest.mark.parametrize("transport", ["", TCP], ids=["default", "tcp"])
FAST = {"lease_s": 1.0, "timeout_s": 1.0}


class Crew:
    """Starts outposts and knows what they must reply."""

    def __init__(self, transport: str, oracle: Engine, seed: int = 0) -> None:
        self._transport = transport
        self._oracle = oracle
        self._stack = ExitStack()
        self._seed = seed

    def producer(self, **options: Any) -> Outpost:
        # The smallest parcels of 300 tokens are some ten.
        return self._start(role="prefill", **{**FAST, "parcel_bytes": 16 << 10, **options})

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
        [result] = self._oracle.generate([prompt], PARAMS, progress=False)
        return list(result.token_ids)

    def check_reply(self, one: Outpost) -> None:
        """It answers an ordinary request."""
        prompt = self.prompt(40)
        assert one.call("reply", prompt) == (self.right(prompt), None)

    def check_handover(self, producer: Outpost, consumer: Outpost, length: int = LENGTH) -> None:
        """A prompt goes over."""
        prompt = self.prompt(length)
        assert consumer.call("reply", prompt, producer.call("prefill", prompt)) == (self.right(prompt), length)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Engine]:
    with Engine(model_of("llama"), memory="4MiB", device="cpu") as engine:
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
