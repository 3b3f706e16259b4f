"""Clients that go away: whatever they had asked for is gone a step later, and its pages come back."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import openai
import pytest

from hybridkv import Engine
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.serve.serving import LONG, MODEL, Client, Pace, Served, check_idle, eventually, serving


def running(engine: Engine) -> int:
    return len(engine._core.scheduler.running)


def waiting(engine: Engine) -> int:
    return len(engine._core.scheduler.waiting)


def gone(served: Served, count: int = 1) -> bool:
    """Counted as such, soon."""
    name = "hybridkv_requests_total|disconnected"
    return eventually(lambda: served.metrics()[name] >= count)


@pytest.fixture
def mine(engine: Engine, pace: Pace) -> Any:
    """A server of its own, whose counters begin at zero, on an engine that walks."""
    with serving(engine) as served:
        yield served
        check_idle(served)


@pytest.mark.parametrize("stream", [False, True])
def test_while_decoding(stream: bool, mine: Served, pace: Pace) -> None:
    client = Client(mine, prompt=prompt(20, 1), stream=stream)
    pace.advance(5)
    assert running(mine.engine) == 1
    client.vanish()
    assert eventually(lambda: pace.num_asked == 1)  # to abort it
    pace.advance(1)
    assert not mine.engine._core.has_work
    pace.run()
    assert gone(mine)


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_middle_of_a_prompt(stream: bool, mine: Served, pace: Pace) -> None:
    """400 tokens, 64 a step: after two steps there is no token to send yet."""
    client = Client(mine, prompt=prompt(400, 2), max_tokens=50, stream=stream)
    pace.advance(2)
    assert mine.engine._core.computed_tokens
    client.vanish()
    assert eventually(lambda: pace.num_asked == 1)
    pace.advance(1)
    assert not mine.engine._core.has_work
    pace.run()
    assert gone(mine)


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_queue(stream: bool, mine: Served, pace: Pace) -> None:
    """Eight may run: the ninth waits, and goes without having been computed."""
    others = [Client(mine, prompt=prompt(5, seed), max_tokens=6) for seed in range(8)]
    assert eventually(lambda: pace.num_waiting == 8)
    pace.advance(1)
    last = Client(mine, prompt=prompt(30, 9), stream=stream)
    assert eventually(lambda: pace.num_asked == 1)
    pace.advance(1)
    assert (running(mine.engine), waiting(mine.engine)) == (8, 1)
    last.vanish()
    assert eventually(lambda: pace.num_asked == 1)
    lookups = mine.engine._core.cache.stats.requests
    pace.advance(1)
    assert (running(mine.engine), waiting(mine.engine)) == (8, 0)
    pace.run()
    assert all(one.read().startswith(b"HTTP/1.1 200") for one in others)
    assert gone(mine)
    assert mine.engine.stats().cache.requests == lookups


def test_all_of_a_request_goes(mine: Served, pace: Pace) -> None:
    client = Client(mine, prompt=[prompt(20, 1), prompt(20, 2)], n=3, stream=True)
    pace.advance(4)
    assert running(mine.engine) == 6
    client.vanish()
    assert eventually(lambda: pace.num_asked == 2)
    pace.advance(1)
    assert not mine.engine._core.has_work
    pace.run()
    assert gone(mine)


def test_before_the_body_is_complete(mine: Served, pace: Pace) -> None:
    with socket.create_connection(("127.0.0.1", int(mine.url.split(":")[-1]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
    pace.run()
    assert gone(mine)
    assert mine.metrics()["hybridkv_requests_total|refused"] == 0


def test_one_that_does_not_read_holds_no_pages(served: Served) -> None:
    """Replies end, whether they are read or not; what was not read is still there afterwards."""
    clients = [
        Client(served, prompt=prompt(20, seed), stream=True, logprobs=60, return_token_ids=True) for seed in range(4)
    ]
    assert eventually(lambda: served.engine._core.has_work)
    assert eventually(lambda: not served.engine._core.has_work)
    assert all(lease.is_pin for lease in served.engine._core.cache.leases)
    text = b""
    while b"[DONE]" not in text:
        text += clients[0].read()
    for client in clients:
        client.vanish()


def test_a_cancelled_async_client(served: Served) -> None:
    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {
                "model": MODEL,
                "prompt": prompt(20, 3),
                "max_tokens": LONG,
                "extra_body": {"ignore_eos": True},
            }
            whole = asyncio.create_task(client.completions.create(**asked))
            stream = await client.completions.create(**asked, stream=True)
            async for _ in stream:
                break
            whole.cancel()
            await stream.close()
            with pytest.raises(asyncio.CancelledError):
                await whole

    asyncio.run(cancel())
    tokens = served.engine._core.computed_tokens
    assert eventually(lambda: not served.engine._core.has_work)
    assert served.engine._core.computed_tokens - tokens < 2 * LONG / 2


def test_timeouts_of_clients(served: Served) -> None:
    body = {"prompt": prompt(20, 4), "max_tokens": LONG, "n": 8, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", timeout=0.2, json=body)
    start = Stopwatch()
    assert eventually(lambda: not served.engine._core.has_work)
    assert start.seconds < 5
