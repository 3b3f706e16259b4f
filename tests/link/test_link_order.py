"""Calls of two linked engines that come in an unlucky order. Nothing is sent: the agent is a stand-in."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from hybridkv.link.agent import Agent
from hybridkv.link.arena import HostArena, Place
from hybridkv.link.arrival import Arrival, Stage, Wanted
from hybridkv.link.consumer import Consumer
from hybridkv.link.errors import LinkError, PeerDown, PeerGone, PeerStranger, Refused
from hybridkv.link.messages import End, FirstToken, Plan
from hybridkv.link.peers import Peer
from hybridkv.link.producer import Producer, Prompt
from hybridkv.link.push import Push, Pusher, Target
from hybridkv.link.runs import Cutter, PageTables
from hybridkv.link.stats import LinkStats
from tests.link.sides import geometry_of
from tests.link.test_runs import plan_of, spec_of

NO_PAGES = PageTables({}, {})
PROMPT = Prompt(16, "digest", "sampling")
WANTED = Wanted(0, 16, NO_PAGES, "digest", "sampling", True)


class StandIn:
    """An agent that sends nothing."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.metadata = b"producer"
        self.known: list[str] = []

    def tell(self, peer: str, message: bytes) -> None:
        self.told.append(message)

    def add(self, metadata: bytes) -> str:
        self.known.append(metadata.decode())
        return metadata.decode()

    def remove(self, peer: str) -> None:
        self.known.remove(peer)

    def messages(self) -> list[tuple[str, bytes]]:
        return []


class Pair:
    """A producer that knows one consumer, and what it has released."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.agent = StandIn()
        self.producer = Producer(
            "producer", cast(Agent, self.agent), HostArena(memoryview(b"")), cast(Any, None), LinkStats(), lease_s=60.0,
            on_release=self.released.append,
        )  # fmt: skip
        self.producer._targets["consumer"] = Target("consumer", Place(0, 0), cast(Cutter, None))

    def claim(self, claim: str = "claim", request: str = "request", *, early: bool = True) -> None:
        self.producer.handle("claim", {
            "engine_id": "consumer", "num_tokens": 16, "digest": "digest", "sampling": "sampling", "claim": claim,
            "pages": {"tables": {}, "states": {}}, "start": 0, "request_id": request, "early": early,
        })  # fmt: skip

    def offer(self, request: str) -> None:
        self.producer.offer(self.producer.begin(request, PROMPT), NO_PAGES, [])

    def cancel(self) -> bool:
        """Until it is settled."""
        return soon(lambda: self.producer.handle("cancel", {"claim": "claim"})["settled"])


def soon(is_so: Callable[[], bool], timeout_s: float = 3.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.producer.close()


def test_a_claim_that_comes_after_its_cancel_is_refused(pair: Pair) -> None:
    assert pair.cancel()
    with pytest.raises(Refused, match="cancelled"):
        pair.claim()
    assert pair.producer.num_outbound == 0


def test_no_step_pushes_for_a_claim_that_was_cancelled(pair: Pair) -> None:
    pair.claim()
    outbound = pair.producer.begin("request", PROMPT)
    assert pair.cancel()
    assert pair.producer.start_early(outbound) is None
    pair.producer.offer(outbound, NO_PAGES, [FirstToken(1)])
    assert pair.released[-1] == "request"
    pair.producer.withdraw(outbound, "twice")
    assert pair.cancel()


def test_a_producer_that_is_closed_takes_no_claims(pair: Pair) -> None:
    pair.producer.close()
    with pytest.raises(Refused, match="closed"):
        pair.claim()


def test_the_offer_whose_lease_ends_first_is_withdrawn_first(pair: Pair) -> None:
    """And none that is claimed, or still computed."""
    late = pair.producer.begin("late", PROMPT)
    for request in ("claimed", "old", "renewed", "new"):
        pair.offer(request)
    pair.producer._pusher.start = lambda push: None  # type: ignore[method-assign]
    pair.claim(request="claimed", early=False)
    pair.producer.handle("renew", {"request_ids": ["renewed"]})
    pair.producer.offer(late, NO_PAGES, [])
    pair.producer.begin("computed", PROMPT)
    while pair.producer.withdraw_oldest("share"):
        pass
    assert pair.released == ["old", "new", "renewed", "late"]
    assert pair.producer._stats.failures == {"share": 4}
    assert pair.producer.num_outbound == 2


def test_claims_without_a_prompt_have_a_limit(pair: Pair) -> None:
    pair.producer._pusher.start = lambda push: None  # type: ignore[method-assign]
    pair.offer("offered")
    for number in range(4095):
        pair.claim(f"claim {number}", f"request {number}")
    with pytest.raises(Refused, match="too many prompts wait here") as refused:
        pair.claim("one more", "one more")
    assert refused.value.kind == "busy"
    pair.claim("of an offer", "offered", early=False)
    pair.producer.handle("cancel", {"claim": "claim 7"})
    pair.claim("one more", "one more")


def test_consumers_are_remembered_up_to_a_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that connected first is forgotten, unless a push to it is in progress."""
    producer = pair.producer
    producer._geometry = geometry_of(spec_of("llama"), plan_of("llama", 0))
    monkeypatch.setattr(producer._pusher, "is_pushing_to", lambda name: name == "consumer")

    def connect(name: str) -> None:
        producer.handle("connect", {
            "version": 1, "engine_id": name, "geometry": producer._geometry.to_json(), "place": [0, 0, "DRAM", 0],
            "metadata": b64encode(name.encode()).decode(),
        })  # fmt: skip

    names = [f"engine {number}" for number in range(258)]
    for name in names[:255]:
        connect(name)
    assert pair.agent.known == names[:255]
    for count in (256, 257, 258):
        connect(names[count - 1])
        assert pair.agent.known == names[count - 255 : count]
        assert list(producer._targets) == ["consumer", *names[count - 255 : count]]
    pair.claim()  # of the consumer that is known still


class _StuckWrite:
    is_done = False


def test_a_push_with_writes_in_progress_is_not_over_whatever_happens() -> None:
    over: list[Push] = []
    pusher = Pusher(over.append)
    target = Target("consumer", Place(0, 0), cast(Cutter, None))
    push = Push(cast(Agent, StandIn()), HostArena(memoryview(b"")), target, "claim",
                checksums=True, parcel_bytes=1, wake=lambda: None)  # fmt: skip
    write = _StuckWrite()
    push._writes = cast(Any, [write])
    push._post = cast(Any, lambda: 1 / 0)  # type: ignore[method-assign]
    pusher.start(push)
    assert soon(lambda: push.failure is not None)
    time.sleep(0.05)
    assert pusher.find("claim") is push
    write.is_done = True
    assert soon(lambda: over == [push])
    pusher.close(1.0)


class Client:
    """Answers a call as a test says."""

    def __init__(self, answer: Callable[[str], dict[str, Any]]) -> None:
        self.answer = answer

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        return self.answer(method)


class PeerStandIn:
    url, lease_s, engine_id = "http://127.0.0.1:1", 1.0, "producer"
    cutter: Any = None

    def __init__(self, answer: Callable[[str], dict[str, Any]]) -> None:
        self.client = Client(answer)

    def connect(self, *, after: int = 0) -> int:
        raise AssertionError("not needed")

    def close(self) -> None:
        pass


def consumer_of(peer: PeerStandIn) -> Consumer:
    agent, peers = cast(Agent, StandIn()), [cast(Peer, peer)]
    return Consumer("id", agent, HostArena(memoryview(b"")), peers, LinkStats(), timeout_s=9.0, on_change=lambda: None)


def test_an_arrival_that_has_failed_is_not_claimed() -> None:
    arrival = Arrival(cast(Peer, None), "request", is_early=False)
    arrival.fail("peer", "gone")
    assert not arrival.claimed(WANTED, 1.0)
    assert arrival.stage is Stage.FAILED
    assert arrival.is_settled


def raiser(error: LinkError) -> Callable[[str], dict[str, Any]]:
    def answer(method: str) -> dict[str, Any]:
        raise error

    return answer


@pytest.mark.parametrize(("answer", "frees"), [
    (raiser(PeerDown("busy")), False),
    (raiser(PeerGone("refused")), True),
    (raiser(PeerStranger("another process")), True),
    (lambda method: {"settled": True, "engine_id": "another"}, True),
    (lambda method: {"settled": False, "engine_id": "producer"}, False),
], ids=["busy", "gone", "stranger", "restarted", "writing"])  # fmt: skip
def test_what_shows_that_a_producer_is_dead(answer: Callable[[str], dict[str, Any]], frees: bool) -> None:
    """And that it takes a while, until what it sent has landed."""
    consumer = consumer_of(PeerStandIn(answer))
    arrival = consumer.expect(PeerStandIn.url, "request", is_early=True)
    arrival.claimed(WANTED, 9.0)
    arrival.engine_id, arrival.is_asking = "producer", False
    consumer.give_up(arrival, "a test")
    time.sleep(0.6)
    assert not arrival.is_settled
    assert soon(lambda: arrival.is_settled, 1.5) is frees
    consumer.close()


def test_an_arrival_is_not_settled_before_its_claim_is_answered() -> None:
    consumer = consumer_of(PeerStandIn(lambda method: {"settled": True, "engine_id": "producer", "known": []}))
    waiting, arrival = (consumer.expect(PeerStandIn.url, name, is_early=True) for name in ("waiting", "request"))
    arrival.claimed(WANTED, 9.0)
    arrival.engine_id = "producer"
    consumer.give_up(arrival, "a test")
    assert consumer._stats.quarantined == 1
    consumer.give_up(waiting, "a test")
    time.sleep(0.5)
    assert not arrival.is_settled
    assert consumer._stats.quarantined == 1
    arrival.is_asking = False
    assert soon(lambda: arrival.is_settled)
    assert soon(lambda: consumer._stats.quarantined == 0)
    consumer.close()


def test_a_prompt_is_released_if_its_claim_was_cancelled_before_it_came() -> None:
    pair = Pair()
    outbound = pair.producer.begin("request", Prompt(16, "digest", "sampling"))
    pair.producer.offer(outbound, PageTables({}, {}), [])
    assert pair.producer.handle("cancel", {"claim": "claim"})["settled"]
    with pytest.raises(Refused, match="cancelled"):
        pair.claim()
    assert pair.released == ["request"]


class _NoParcels:
    """A cutter of prompts without bytes."""

    def parcels(self, *args: object, **options: object) -> list[Any]:
        return []


class _Connected:
    cutter = _NoParcels()


@pytest.mark.parametrize(("steps", "is_whole"), [
    ([(0, 48), (48, 100)], True),
    ([(0, 100)], True),
    ([(0, 48), (64, 100)], False),
    ([(0, 48)], False),
    ([(16, 100)], False),
    ([], False),
])  # fmt: skip
def test_steps_must_cover_the_prompt(steps: list[tuple[int, int]], is_whole: bool) -> None:
    arrival = Arrival(cast(Peer, _Connected()), "request", is_early=True)
    arrival.claimed(Wanted(0, 100, PageTables({}, {}), "digest", "sampling", is_plain=True), 9.0)
    arena = HostArena(memoryview(b""))
    for number, (start, end) in enumerate(steps):
        arrival.hear(Plan(arrival.id, number, start, end, False, 1, PageTables({}, {})), arena)
    last = End(arrival.id, (0,) * len(steps), (FirstToken(1),))
    if is_whole:
        arrival.hear(last, arena)
        assert arrival.stage is Stage.DONE
    else:
        with pytest.raises(LinkError, match="do not cover"):
            arrival.hear(last, arena)
