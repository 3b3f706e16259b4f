"""The queue alone: clients take turns, whatever comes, starts, comes back or goes."""

from __future__ import annotations

import copy
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache.tokens import PLAIN_KEY
from hybridkv.engine.inspection.publishing import Publishing
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.request import Request, Sample
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampling_state import SamplingState
from hybridkv.engine.taps import NO_TAPS
from hybridkv.engine.text import TextStream
from hybridkv.engine.waiting import Waiting

PROMPT = Prompt([5, 6])
PUBLISHING = Publishing(lambda: 0.0, lambda: False)
TEXT = TextStream(None)


def request_of(client: str, n: int = 1) -> Request:
    params = SamplingParams(n=n)
    return Request("", PROMPT, params, PLAIN_KEY, NO_TAPS, PUBLISHING, client=client, has_store=False)


def sample_of(request: Request, index: int = 0) -> Sample:
    row = SamplingState(request.params, PROMPT.ids.as_array(), ends=frozenset(), sibling=index)
    sample = Sample(request, index, row, TEXT)
    request.samples.append(sample)
    return sample


REQUEST = request_of("")
ROW = sample_of(REQUEST).row


class Life:
    """A queue, and what must hold whenever a sample starts."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.arrived: list[Sample] = []
        """Waiting samples that have not run, in the order in which their client's are to start."""
        self.returned: list[Sample] = []
        self.running: list[Sample] = []
        self.turns = 0
        self.bypassed: dict[str, Counter[str]] = {}
        """By waiting client: turns that others had since it came or had its own."""

    def arrive(self, client: str, n: int = 1) -> None:
        self._queue(sample_of(request_of(client, n)))

    def _queue(self, sample: Sample) -> None:
        self.bypassed.setdefault(sample.request.client, Counter())
        self.arrived.append(sample)
        self.waiting.add(sample)

    def start(self) -> None:
        for sample in self.waiting.first(1):
            self.waiting.take(sample)
            if self.returned:
                assert sample is min(self.returned, key=lambda one: one.rank)
                self.returned.remove(sample)
            else:
                self._has_turn(sample)
            self.running.append(sample)
            self._fork(sample.request)

    def _has_turn(self, sample: Sample) -> None:
        client = sample.request.client
        own = [one for one in self.arrived if one.request.client == client]
        assert sample is next((one for one in own if one.index), own[0]), "siblings first, then as they came"
        self.turns += 1
        sample.turn = self.turns
        self.arrived.remove(sample)
        self._forget_if_gone(client)
        for other, turns in self.bypassed.items():
            if other == client:
                turns.clear()
            else:
                turns[client] += 1
                assert turns[client] == 1, f"{client} had two turns while {other} waited"

    def _forget_if_gone(self, client: str) -> None:
        if all(one.request.client != client for one in self.arrived):
            self.bypassed.pop(client, None)

    def _fork(self, request: Request) -> None:
        """All siblings of a prompt that was computed wait for places of their own."""
        born = range(len(request.samples), request.num_samples)
        for sample in [sample_of(request, index) for index in born]:
            self._queue(sample)

    def preempt(self, number: int) -> None:
        if self.running:
            sample = self.running.pop(number % len(self.running))
            self.returned.append(sample)
            self.waiting.add(sample)

    def abort(self, number: int) -> None:
        everyone = self.arrived + self.returned
        if everyone:
            gone = everyone[number % len(everyone)]
            (self.returned if gone.has_run else self.arrived).remove(gone)
            self.waiting.discard(gone)
            self._forget_if_gone(gone.request.client)

    def check(self) -> None:
        expected = self.arrived + self.returned
        assert len(self.waiting) == len(expected)
        assert set(self.waiting) == set(expected)
        assert self.waiting.num_samples == sum(1 + one.request.num_to_fork for one in expected)


CLIENTS = st.sampled_from(["", "a", "b", "c", "d"])
NUMBERS = st.integers(0, 40)
STEPS = st.one_of(
    st.tuples(st.just("arrive"), CLIENTS, st.integers(1, 4)),
    st.tuples(st.just("start")),
    st.tuples(st.just("start")),
    st.tuples(st.just("preempt"), NUMBERS),
    st.tuples(st.just("abort"), NUMBERS),
)


@given(st.lists(STEPS, max_size=120))
def test_random_lives_are_fair(steps: list[tuple[str, ...]]) -> None:
    life = Life()
    for name, *values in steps:
        getattr(life, name)(*values)
        life.check()
    while life.waiting:
        life.start()
    life.check()


def test_a_newcomer_is_served_before_the_client_that_was_served_last() -> None:
    life = Life()
    for client in "aaab":
        life.arrive(client)
    life.start()
    life.arrive("c")
    assert [one.request.client for one in life.waiting] == ["b", "c", "a", "a"]


@pytest.mark.parametrize("num_clients", [1, 20_000])
def test_a_long_queue_is_as_fast_as_a_short_one(num_clients: int) -> None:
    """A step looks at the next samples, starts one, takes in one and drops one."""

    def seconds(num_samples: int) -> float:
        waiting = Waiting()
        requests = [copy.copy(REQUEST) for _ in range(min(num_clients, num_samples))]
        for number, request in enumerate(requests):
            request.client = str(number)
        samples = [Sample(requests[i % len(requests)], i % 2, ROW, TEXT) for i in range(num_samples)]
        for sample in samples:
            waiting.add(sample)
        best = 1.0
        for sample in samples[len(samples) // 2 :][:200]:
            begin = time.perf_counter()
            waiting.discard(sample)
            first = waiting.first(32)[1]
            waiting.take(first)
            waiting.add(sample)
            waiting.add(first)
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(20_000) < 10 * seconds(100)
