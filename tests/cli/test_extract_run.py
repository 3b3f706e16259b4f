"""What `hybridkv extract` has in flight, with an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridkv.cli.extract_input import Sample
from hybridkv.cli.extract_run import Done, Extraction, Ready
from hybridkv.engine import Prompt
from hybridkv.errors import DiskError

MIB = 1 << 20


class SlowEngine:
    """Takes a moment for each prompt, and counts those it has."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def stream(self, prompt: Prompt, params: object, *, adapter: str | None = None) -> AsyncIterator[Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        completion = SimpleNamespace(error=None)
        rows = torch.zeros(prompt.num_tokens, 1, 4)
        yield SimpleNamespace(result=SimpleNamespace(completions=[completion], hidden_states=rows))
        self.running -= 1


def samples(count: int, num_tokens: int = 8) -> list[Ready]:
    prompt = Prompt(np.arange(num_tokens, dtype=np.int32))
    return [Ready(Sample(index, f"line {index}", "input_ids", [], None), prompt, False) for index in range(count)]


def written(index: int, rows: Tensor, token_ids: Tensor) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(rows.nbytes)
    return future


@pytest.mark.parametrize(("limit", "most"), [(10 * MIB, 10), (5 * MIB // 2, 2), (1, 1)])
def test_samples_in_flight_are_bounded_by_their_bytes(limit: int, most: int) -> None:
    engine, done = SlowEngine(), list[Done]()
    extraction = Extraction(engine, None, None)
    extraction.run(samples(50), written, done.append, bytes_per_token=MIB // 8, in_flight_bytes=limit)
    assert engine.most == most
    assert sorted(one.ready.sample.index for one in done) == list(range(50))


def test_a_sample_is_in_flight_until_it_is_written() -> None:
    """A disk that does not keep up holds the engine back."""
    waiting, engine = list[Future[int]](), SlowEngine()

    def slowly(index: int, rows: Tensor, token_ids: Tensor) -> Future[int]:
        waiting.append(Future())
        if len(waiting) == 3:  # as many as may be in flight
            assert index == 2
        for future in waiting[:-2]:
            if not future.done():
                future.set_result(1)
        if index >= 8:
            waiting[-1].set_result(1)
            for future in waiting:
                if not future.done():
                    future.set_result(1)
        return waiting[-1]

    extraction = Extraction(engine, None, None)
    extraction.run(samples(10), slowly, lambda one: None, bytes_per_token=MIB // 8, in_flight_bytes=3 * MIB)
    assert engine.most <= 3


def test_small_samples_are_bounded_in_number() -> None:
    engine = SlowEngine()
    extraction = Extraction(engine, None, None)
    extraction.run(samples(50), written, lambda one: None, bytes_per_token=1, in_flight_bytes=7 * MIB)
    assert engine.most == 7


def test_a_disk_that_fails_ends_the_run() -> None:
    def full(index: int, rows: Tensor, token_ids: Tensor) -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(DiskError("cannot write")) if index == 5 else future.set_result(1)
        return future

    extraction, done = Extraction(SlowEngine(), None, None), list[Done]()
    with pytest.raises(DiskError, match="cannot write"):
        extraction.run(samples(50), full, done.append, bytes_per_token=1, in_flight_bytes=2 * MIB)
    assert len(done) < 10
