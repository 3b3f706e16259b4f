"""Clients of a completions endpoint: what each of them asks for, how it behaves, and what it saw.

A client is a plain connection that reads lines: with hundreds of them on the cores that the server computes on, a real
HTTP client would be most of what is measured. Nothing here starts or stops a server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NUM_PREFIXES = 20
PREFIX_TOKENS = 256


class Length(NamedTuple):
    """A class of requests: from, to."""

    prompt_tokens: tuple[int, int]
    reply_tokens: tuple[int, int]
    shares_prefix: bool
    weight: int


LENGTHS = {
    "short": Length((16, 128), (8, 32), False, 5),
    "medium": Length((300, 600), (16, 64), True, 3),
    "long": Length((800, 1500), (32, 96), True, 1),
}
BEHAVIOURS = {"reads": 80, "whole": 4, "leaves": 8, "cancels": 5, "bad": 3}
"""To the end; the same without a stream; gone in the middle of its stream; gone before it; a request that is wrong."""


class Ask(NamedTuple):
    length: str
    behaviour: str
    tokens: list[int]
    max_tokens: int
    leaves_after: int
    cancels_after_s: float


class Seen(NamedTuple):
    """A stream that was read to its end."""

    length: str
    ttft_s: float
    per_token_s: float
    longest_gap_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int


@dataclass
class Log:
    """What all clients saw."""

    streams: list[Seen] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """What should not have happened, by what was said."""


def asks(seed: int, vocab_size: int) -> Any:
    """An endless series of requests of one client."""
    shared = random.Random("prefixes")
    prefixes = [[shared.randrange(4, vocab_size) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    chance = random.Random(seed)
    weights = [length.weight for length in LENGTHS.values()]
    while True:
        name = chance.choices(list(LENGTHS), weights)[0]
        length = LENGTHS[name]
        tokens = [chance.randrange(4, vocab_size) for _ in range(chance.randint(*length.prompt_tokens))]
        if length.shares_prefix:
            prefix = prefixes[min(int(chance.expovariate(0.2)), NUM_PREFIXES - 1)]  # some are asked for far more often
            tokens[:PREFIX_TOKENS] = prefix
        behaviour = chance.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
        reply = chance.randint(*length.reply_tokens)
        yield Ask(name, behaviour, tokens, reply, chance.randint(1, reply), chance.random() * 0.3)


class Client:
    """Asks again and again until a time."""

    def __init__(self, port: int, model: str, log: Log) -> None:
        self._port = port
        self._model = model
        self._log = log

    async def run(self, series: Any, until_s: float) -> None:
        while time.monotonic() < until_s:
            ask: Ask = next(series)
            try:
                await self._one(ask)
            except (OSError, EOFError, ValueError, KeyError) as error:
                self._log.errors[f"{type(error).__name__}: {error}"[:120]] += 1
            else:
                self._log.done[ask.behaviour] += 1

    async def _one(self, ask: Ask) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        try:
            start = time.monotonic()
            writer.write(self._request(ask))
            if ask.behaviour == "cancels":
                await asyncio.sleep(ask.cancels_after_s)
                return
            await self._read(reader, ask, start)
        finally:
            writer.transport.abort() if ask.behaviour in ("leaves", "cancels") else writer.close()

    def _request(self, ask: Ask) -> bytes:
        body: dict[str, Any] = {"model": self._model, "prompt": ask.tokens, "max_tokens": ask.max_tokens}
        body |= {"ignore_eos": True, "seed": 1, "return_token_ids": True}
        if ask.behaviour != "whole":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if ask.behaviour == "bad":
            body |= {"temperature": -1}
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def _read(self, reader: asyncio.StreamReader, ask: Ask, start: float) -> None:
        status = int((await reader.readline()).split()[1])
        expected = 400 if ask.behaviour == "bad" else 200
        if status != expected:
            raise ValueError(f"status {status}: {(await reader.read())[-300:]!r}")
        if ask.behaviour == "bad":
            return
        if ask.behaviour == "whole":
            reply = json.loads((await reader.read()).split(b"\r\n\r\n", 1)[1])
            _check(len(reply["choices"][0]["token_ids"]), ask)
            return
        await self._read_stream(reader, ask, start)

    async def _read_stream(self, reader: asyncio.StreamReader, ask: Ask, start: float) -> None:
        times: list[float] = []
        usage: dict[str, Any] = {}
        while True:
            line = await reader.readline()
            if not line:
                raise EOFError("a stream that ended without [DONE]")
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            usage = event["usage"] or usage
            times += [time.monotonic()] * sum(len(choice["token_ids"]) for choice in event["choices"])
            if ask.behaviour == "leaves" and len(times) >= ask.leaves_after:
                return
        _check(len(times), ask)
        self._log.streams.append(_seen(ask, start, times, usage))


def _check(num_tokens: int, ask: Ask) -> None:
    if num_tokens != ask.max_tokens:
        raise ValueError(f"{num_tokens} tokens of {ask.max_tokens}")


def _seen(ask: Ask, start: float, times: list[float], usage: dict[str, Any]) -> Seen:
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Seen(
        length=ask.length,
        ttft_s=times[0] - start,
        per_token_s=sum(gaps) / len(gaps) if gaps else 0.0,
        longest_gap_s=max(gaps, default=0.0),
        total_s=times[-1] - start,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        reply_tokens=len(times),
    )
