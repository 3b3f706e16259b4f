"""Threads that tokenize: a long text must delay neither other replies nor other short texts.

A text of 16 MiB takes half a minute, and nothing stops it. The process does not wait for it: workers are daemons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from hybridkv.engine import Engine
from hybridkv.workers import Workers

T = TypeVar("T")

LONG_BYTES = 2**18
"""Of a request's body; from here on it waits for the other long ones."""


class Tokenizing:
    """One thread for short texts and one for long ones. A tokenizer that is not made for two threads gets one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._short = Workers(1, "hybridkv-tokenizer")
        can_share = isinstance(engine.tokenizer, PreTrainedTokenizerFast)
        self._long = Workers(1, "hybridkv-long-texts") if can_share else self._short

    async def run(self, work: Callable[[Engine], T], body_bytes: int) -> T:
        """What `work` makes of the engine's tokenizer."""
        workers = self._long if body_bytes >= LONG_BYTES else self._short
        return await asyncio.wrap_future(workers.submit(lambda: work(self._engine)))

    def close(self) -> None:
        for workers in {self._short, self._long}:
            workers.close()
